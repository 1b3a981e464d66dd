"""`python -m fastprod` is the command `fastprod`."""

from fastprod.cli import main

main()
