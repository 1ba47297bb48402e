"""PyTorch in the middle of an epoch, its DataLoader's two worker processes ahead of it."""

import torch
from asked import serve
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


torch.manual_seed(1)
model = torch.nn.Linear(8, 1)
twin = torch.nn.Linear(8, 1)
twin.load_state_dict(model.state_dict())
optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3) for one in (model, twin)]
batches = iter(DataLoader(Squares(), batch_size=4, num_workers=2, persistent_workers=True))
workers = [worker.pid for worker in batches._workers]
expected = 0


def step(one, optimizer, batch):  # type: ignore[no-untyped-def]
    loss = (one(batch / 4000) - batch[:, :1] / 4000).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def check(_: int) -> None:
    global expected
    for _ in range(20):
        batch = next(batches)
        assert batch[:, 0].tolist() == [expected + k for k in range(4)], batch
        fresh = torch.stack([torch.full((8,), float(expected + k)) for k in range(4)])
        assert step(model, optimizers[0], batch) == step(twin, optimizers[1], fresh)
        expected += 4
    assert [worker.pid for worker in batches._workers] == workers
    assert all(worker.is_alive() for worker in batches._workers)


serve(check)
