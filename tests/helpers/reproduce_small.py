"""`equilibria reproduce` with a small, slow experiment in place of the registry's; run by a test as a process."""

from __future__ import annotations

if __name__ == "__main__":
    from equilibria.cli import main
    from equilibria.lab.harness import registry
    from tests.helpers.small_experiments import experiment

    small = experiment(count=40, slow=0.1)
    registry.MODULES = {"small": ""}
    registry.load = lambda name: small
    main()
