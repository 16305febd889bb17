"""`python -m equilibria.cli` is the `equilibria` command."""

from equilibria.cli import main

main()
