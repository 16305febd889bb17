"""The folder the demo writes: what it holds, and that nothing else is ever overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibria.errors import EquilibriaError

_MARK = "equilibria demo"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Folder:
    """Where everything goes.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def results(self) -> Path:
        """The numbers, as JSON; also the mark by which a later demo knows the folder."""
        return self.path / "demo.json"

    def run(self, branch: str) -> Path:
        """The run directory of a branch."""
        return self.path / branch

    def report(self, branch: str) -> Path:
        """The HTML page of a branch."""
        return self.path / f"{branch}.html"

    def write_results(self, results: Mapping[str, Any], *, complete: bool) -> None:
        """Write the numbers, or at the start the mark alone."""
        content = {_MARK: _FORMAT, "complete": complete, **results}
        self.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def prepare_folder(path: str | Path, branches: tuple[str, ...]) -> Folder:
    """An empty folder, or one of an earlier demo with its runs and pages removed.

    Raises:
        EquilibriaError: if there is something else at ``path``, or it cannot be written.
    """
    folder = Folder(Path(path))
    try:
        _refuse_foreign(folder)
        for branch in branches:
            if folder.run(branch).exists():
                shutil.rmtree(folder.run(branch))
            folder.report(branch).unlink(missing_ok=True)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_results({}, complete=False)
    except OSError as error:
        raise EquilibriaError(f"cannot write the demo to {folder.path}: {error.strerror or error}") from error
    return folder


def _refuse_foreign(folder: Folder) -> None:
    path = folder.path
    if path.exists() and not path.is_dir():
        raise EquilibriaError(f"got out={str(path)!r}, which is a file; expected a folder, new or of an earlier demo")
    if path.is_dir() and any(path.iterdir()) and not _is_demo(folder.results):
        raise EquilibriaError(
            f"got out={str(path)!r}, which holds other things; expected a folder that is new, empty or of an earlier "
            "demo: choose another"
        )


def _is_demo(results: Path) -> bool:
    try:
        content = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and _MARK in content
