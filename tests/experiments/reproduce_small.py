"""`equilibria reproduce` with a small, slow experiment in place of the registry's; run by a test as a process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if __name__ == "__main__":
    from small_experiments import experiment

    from equilibria.cli import main
    from equilibria.experiments import registry

    small = experiment(count=40, slow=0.1)
    registry.experiments = lambda: {"small": small}
    main()
