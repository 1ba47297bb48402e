"""A Dask cluster with its scheduler and workers; its workers are `processes` or `threads` (second argument)."""

import sys

from asked import serve

if __name__ == "__main__":
    from dask import config
    from dask.distributed import Client, LocalCluster

    config.set({"distributed.comm.timeouts.connect": "20s"})
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes="processes" in sys.argv, dashboard_address=None, memory_limit=0
    )
    client = Client(cluster)
    kept = client.scatter(list(range(1000)))
    total = client.submit(sum, kept)
    total.result(30)

    def check(number: int) -> None:
        assert total.result(30) == 499_500
        assert client.submit(lambda values, more: sum(values) + more, kept, number).result(30) == 499_500 + number
        assert len(client.scheduler_info()["workers"]) == 2

    serve(check)
