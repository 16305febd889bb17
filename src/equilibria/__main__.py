"""``python -m equilibria``: the command line."""

from __future__ import annotations

from equilibria.cli import main

if __name__ == "__main__":
    main()
