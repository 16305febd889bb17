"""All runs in the served folders, by number: no path ever comes from a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from equilibria.errors import EquilibriaError
from equilibria.records._reader import runs_below
from equilibria.serve.follow import FollowedRun

MOST_LOADED = 8  # runs whose samples are in memory: some tens of megabytes each
MOST_RUNS = 1000


class Catalogue:
    """The runs below some folders; call methods that read from one thread.

    Args:
        roots: run folders, or folders of runs. `scan` looks again at those that hold none yet.
        most_loaded: the number of runs whose samples stay in memory.

    Attributes:
        empty: the names of the folders without runs.
        left_out: whether there are more than `MOST_RUNS` runs.

    Raises:
        EquilibriaError: if one of the folders is a file.
    """

    def __init__(self, roots: Sequence[Path], *, most_loaded: int = MOST_LOADED) -> None:
        for root in roots:
            if root.exists() and not root.is_dir():
                raise EquilibriaError(f"got {root}, which is a file; expected the folder of a run, or a folder of runs")
        self._roots = [root.resolve() for root in roots]
        self._numbers: dict[Path, int] = {}
        self._known: dict[int, FollowedRun] = {}
        self._runs: dict[int, FollowedRun] = {}
        self._loaded: OrderedDict[int, None] = OrderedDict()
        self._most_loaded = most_loaded
        self.empty: tuple[str, ...] = ()
        self.left_out = False

    @property
    def runs(self) -> dict[int, FollowedRun]:
        """The runs by number, in the order of their discovery."""
        return self._runs

    def known(self, number: int) -> FollowedRun | None:
        """A run that exists, or did; None if there never was such a number."""
        return self._known.get(number)

    def scan(self) -> None:
        """Look for runs; deleted ones leave the list, and keep their numbers in case they come back."""
        roots = {path: root for root in self._roots for path in runs_below(root)}
        for path, root in list(roots.items())[:MOST_RUNS]:
            if path not in self._numbers:
                number = len(self._numbers) + 1
                self._known[number] = FollowedRun(path, name=self._name(path, root))
                self._numbers[path] = number
        present = {number: self._known[number] for path, number in self._numbers.items() if path in roots}
        for number in self._runs.keys() - present.keys():
            self._known[number].look()
            self._known[number].forget()
            self._loaded.pop(number, None)
        self._runs = present  # in one assignment: requests read it from another thread
        self.empty = tuple(root.name for root in self._roots if root not in roots.values())
        self.left_out = len(roots) > MOST_RUNS

    def loaded(self, number: int) -> FollowedRun:
        """A run with its samples up to now; beyond ``most_loaded`` runs, forgets the least recently used."""
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
