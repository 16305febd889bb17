"""Run by a test as a script of its own: two jobs without end, until Ctrl-C."""

from __future__ import annotations

import functools
import sys

from equilibria.lab.processes import run_jobs
from tests.helpers import demo_jobs

if __name__ == "__main__":
    jobs = {name: functools.partial(demo_jobs.hang, sys.argv[1]) for name in ("a", "b")}
    try:
        run_jobs(jobs, at_once=2, progress=lambda *_: None)
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\n")
