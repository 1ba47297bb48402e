"""`python -m torpor`."""

from torpor.cli import main

main()
