"""Ours beside its peers: what watching costs, who finds the right eigenvalue, the right symmetries, the right update.

    python benchmarks/peers.py      # or: make bench-peers

installs the peers into build/peers-venv (some minutes, once), measures everything there in one process, in turns, and
writes benchmarks/peers.md, with failures as failures. Tools are in benchmarks/peers/, one file each. Keep the machine
idle. `make clean` removes the environment.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
from pathlib import Path

from peers import environment


def main() -> int:
    if Path(sys.prefix) == environment.FOLDER:
        return _measured()
    environment.make()
    paths = os.pathsep.join(str(environment.ROOT / folder) for folder in ("src", "benchmarks"))
    command = [environment.PYTHON, __file__]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths, "WANDB_MODE": "offline"}).returncode


def _measured() -> int:
    """Inside the environment of the peers."""
    import torch

    from peers import page
    from publishing import publish

    torch.set_num_threads(1)
    results = _results(page)
    shown = page.text(results)
    print(shown)
    publish(Path(__file__).with_suffix(".md"), shown)
    goals = page.goals(results)
    for goal, met in goals.items():
        print(f"{'met' if met else 'MISSED'}: {goal}")
    return 0 if all(goals.values()) else 1


def _results(page):  # type: ignore[no-untyped-def]
    from peers import (
        cockpit,
        composer,
        curvlinops,
        eigenthings,
        eigenvalue,
        invariance,
        naive,
        ours,
        overhead,
        pyhessian,
        updates,
        wandb_watch,
    )
    from peers.bench import plain

    load = os.getloadavg()[0]
    watchers = {
        "plain training": plain,
        "equilibria watch, default": ours.watched("auto"),
        "equilibria watch, every step": ours.watched(1),
        "naive loop, every step": naive.attach,
        "composer's metrics (emulated; with SGD gradients alone), default (every 10 steps)": composer.every(10),
        "composer's metrics (emulated; with SGD gradients alone), every step": composer.every(1),
    }
    heavy = {  # whatever the optimizer
        "wandb.watch, default (gradients, every 1000 steps)": wandb_watch.watching(),
        'wandb.watch(log="all"), every step': wandb_watch.watching(log="all", log_freq=1),
        "cockpit, economy, every step": cockpit.attach,
    }
    solvers = {
        "equilibria sharpness": ours.sharpness,
        "scipy eigsh, default settings, products by hand": eigenvalue.by_eigsh(),
        "scipy eigsh, ncv=10, tol=1e-3, products by hand": eigenvalue.by_eigsh(tol=1e-3, vectors=10),
        "PyHessian": pyhessian.as_documented,
        "PyHessian, patched to stay in training mode": pyhessian.in_training_mode,
        "curvlinops with eigsh": curvlinops.as_documented,
        "curvlinops with eigsh, evaluation mode": curvlinops.in_evaluation_mode,
        "curvlinops with eigsh, BatchNorm without statistics": curvlinops.without_statistics,
        "hessian-eigenthings, k=5 as in its README": eigenthings.lanczos(5),
        "hessian-eigenthings, k=1, so 2 steps: not as documented": eigenthings.lanczos(1),
        "cockpit HessMaxEV": cockpit.largest_eigenvalue,
    }
    net, batch = eigenvalue.digits_net()
    return page.Results(
        installed=environment.read(),
        watching={"SGD": overhead.measure(watchers | heavy, "SGD"), "AdamW": overhead.measure(watchers, "AdamW")},
        presets={
            preset: tuple(cockpit.tried(preset, each, batch) for each in (net, eigenvalue.plain_net()))
            for preset in ("economy", "business", "full")
        },
        eigenvalue=list(eigenvalue.ask(solvers, net, batch)),
        truth=eigenvalue.truth(net, batch),
        invariance=invariance.measure(),
        updates=updates.measure(net, batch),
        load=load,
    )


if __name__ == "__main__":
    sys.exit(main())
