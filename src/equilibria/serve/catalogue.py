"""All runs in the folders that were given, by number: no path ever comes from a request."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from equilibria.errors import EquilibriaError
from equilibria.records._manifest import RUN_FILE
from equilibria.serve.follow import Followed

MOST_LOADED = 8  # runs whose samples are in memory: some tens of megabytes each
MOST_RUNS = 1000
_DEPTH = 4  # folders below the one that was given


class Catalogue:
    """The runs; methods that read are called from one thread.

    Args:
        roots: run folders, or folders of runs. One that holds none yet is looked at again.

    Raises:
        EquilibriaError: one of them is a file, or there is none.
    """

    def __init__(self, roots: Sequence[Path], *, most_loaded: int = MOST_LOADED) -> None:
        for root in roots:
            if root.exists() and not root.is_dir():
                raise EquilibriaError(f"got {root}, which is a file; expected the folder of a run, or a folder of runs")
        self._roots = [root.resolve() for root in roots]
        self._numbers: dict[Path, int] = {}
        self._known: dict[int, Followed] = {}
        self._runs: dict[int, Followed] = {}
        self._loaded: OrderedDict[int, None] = OrderedDict()
        self._most_loaded = most_loaded
        self.empty: tuple[str, ...] = ()
        self.left_out = False

    @property
    def runs(self) -> dict[int, Followed]:
        """By number, in the order in which they were found."""
        return self._runs

    def known(self, number: int) -> Followed | None:
        """A run that is there, or was."""
        return self._known.get(number)

    def scan(self) -> None:
        """Look for runs; those that are gone leave the list, and keep their numbers in case they come back."""
        found = {path: root for root in self._roots for path in _runs_below(root)}
        for path, root in list(found.items())[:MOST_RUNS]:
            if path not in self._numbers:
                number = len(self._numbers) + 1
                self._known[number] = Followed(path, name=self._name(path, root))
                self._numbers[path] = number
        there = {number: self._known[number] for path, number in self._numbers.items() if path in found}
        for number in self._runs.keys() - there.keys():
            self._known[number].look()
            self._known[number].forget()
            self._loaded.pop(number, None)
        self._runs = there  # at once: requests look at it from another thread
        self.empty = tuple(root.name for root in self._roots if root not in found.values())
        self.left_out = len(found) > MOST_RUNS

    def loaded(self, number: int) -> Followed:
        """A run with its samples up to now; those of the one that nobody asked for longest are forgotten."""
        run = self._known[number]
        run.look()
        run.read()
        self._loaded[number] = None
        self._loaded.move_to_end(number)
        while len(self._loaded) > self._most_loaded:
            oldest, _ = self._loaded.popitem(last=False)
            self._known[oldest].forget()
        return run

    def _name(self, path: Path, root: Path) -> str:
        below = path.relative_to(root)
        name = root.name if path == root else str(below)
        taken = {run.name for run in self._known.values()}
        return name if name not in taken else f"{root.name if path != root else root.parent.name}/{name}"


def _runs_below(root: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Folders with a run file, by name; a run holds no other runs, and links are not followed."""
    if os.path.exists(root / RUN_FILE):  # noqa: PTH110  # False, where Path.exists raises, in a folder that is closed
        yield root
    elif depth:
        try:
            inside = sorted(entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for path in inside:
            if not Path(path).name.startswith("."):
                yield from _runs_below(Path(path), depth - 1)
