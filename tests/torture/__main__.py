"""Run every attack for its share of the time, add the counts to those of earlier runs, and write the page.

python -m tests.torture [--minutes 15] [--seed N] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from equilibria._version import __version__
from tests.helpers import ROOT
from tests.torture import Attack, Result, run_attack
from tests.torture.attacks import ATTACKS

COUNTS, PAGE = ROOT / "docs" / "reliability.json", ROOT / "docs" / "reliability.md"
_HEAD = """# What is promised, and how it was tested

Written by `make torture`; do not edit. One run takes at most 15 minutes, with another seed each time; the counts of all
runs are in `reliability.json`. `make test` runs a short form of every attack.

## Promises

- **Training is bit-identical** when it is watched, and being watched never raises an exception in it: not on a full
  disk, not without the folder, not under `python -W error`.
- **A record is as durable as the checkpoint that refers to it.** `monitor.state_dict()` hands all samples to the
  operating system before it returns. A kill at any moment loses at most one second of samples, and none from before
  the last checkpoint. A crash of the whole machine may cost the last half minute: only `close()` forces samples onto
  the disk.
- **No silent damage.** Every block of a record has a checksum over all of its bytes. A damaged block is left out and a
  note names its steps; `equilibria verify RUN` lists what is whole. A record without its `run.json` still opens.
- **Bad input is one sentence** with exit code 2, never a traceback. The server answers honest viewers, whatever others
  send.

## Attacks
"""
_TAIL = """
"held" counts trials in which the promise held. A trial that breaks a promise is a bug: please report it with its
sentence and seed.

## What is not tested

Power cuts (only what the operating system promises about written data), network file systems, GPUs, Windows.
"""


def main() -> int:
    """Attack; exit code 1 if a promise was broken."""
    options = _options()
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    chosen = [attack for attack in ATTACKS if options.only in (None, attack.name)]
    share = 60 * options.minutes / sum(attack.seconds for attack in chosen)
    print(f"seed {seed}, at most {options.minutes:g} minutes")
    is_broken = False
    with tempfile.TemporaryDirectory() as folder:
        for attack in chosen:
            result = run_attack(
                attack,
                Path(folder) / attack.name.replace(" ", "-"),
                seed=seed,
                goal=attack.goal,
                seconds=share * attack.seconds,
                progress=lambda count, broken, attack=attack: _show(attack, count, broken),
            )
            print(f"\r{attack.name}: {result.trials:,} trials in {result.seconds:.0f} s, {len(result.broken)} broken")
            if summary := attack.summary():
                print(f"  {summary}")
            for sentence in result.broken[:5]:
                print(f"  {sentence}")
            is_broken |= bool(result.broken)
            _add(attack, result, seed)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Page: {PAGE.relative_to(ROOT)}")
    return int(is_broken)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="all attacks together (default: 15)")
    parser.add_argument("--seed", type=int, help="of the attacks (default: a new one)")
    parser.add_argument("--only", choices=[attack.name for attack in ATTACKS], help="one attack")
    return parser.parse_args()


def _show(attack: Attack, count: int, broken: int) -> None:
    if sys.stdout.isatty() and count % 10 == 0:
        print(f"\r{attack.name}: {count:,} of {attack.goal:,}, {broken} broken", end="", flush=True)


def _add(attack: Attack, result: Result, seed: int) -> None:
    """Add a result to the counts of earlier runs, which are kept even if a later attack fails."""
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    pooled = counts.setdefault(attack.name, {"runs": 0, "trials": 0, "held": 0, "most_in_a_run": 0, "broken": []})
    pooled["runs"] += 1
    pooled["trials"] += result.trials
    pooled["held"] += result.trials - len(result.broken)
    pooled["most_in_a_run"] = max(pooled["most_in_a_run"], result.trials)
    pooled["broken"] += [{"version": __version__, "seed": seed, "what": what[:2000]} for what in result.broken[:20]]
    COUNTS.write_text(json.dumps(counts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page() -> str:
    """The text of the page."""
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    rows = [
        (attack.name, attack.promise, *(f"{pooled[name]:,}" for name in ("runs", "trials", "held")))
        for attack in ATTACKS
        if (pooled := counts.get(attack.name))
    ]
    broken = [
        f"- {name}, seed {trial['seed']}, version {trial['version']}: `{trial['what'].splitlines()[-1][:200]}`"
        for name, pooled in counts.items()
        for trial in pooled["broken"]
    ]
    table = [("attack", "what must hold", "runs", "trials", "held"), ("---",) * 5, *rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    shown = "\n## Promises that were broken\n\n" + "\n".join(broken) + "\n" if broken else ""
    return f"{_HEAD}\n{lines}\n{_TAIL}{shown}"


if __name__ == "__main__":
    sys.exit(main())
