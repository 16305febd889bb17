"""The results folder: results of finished experiments, and the finished tasks of unfinished ones."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equilibria.errors import EquilibriaError, one_of, within
from equilibria.lab.harness.claim import Claim, of_type
from equilibria.lab.harness.experiment import KINDS, SCALES, SYNTHETIC
from equilibria.lab.harness.figures import SUFFIXES
from equilibria.lab.harness.task import progress_file
from equilibria.lab.harness.workers import TaskDone
from equilibria.records._files import write_whole

_MARK = "equilibria results"
_FORMAT = 1
_MARK_FILE = "equilibria-results.json"
_SECONDS = "seconds taken"  # with a blank: no array of a task has such a name


@dataclass(frozen=True, slots=True)
class Result:
    """A finished experiment.

    Attributes:
        id: of the experiment.
        title: of the experiment.
        source: the figures, equations and theorems it reproduces.
        scale: of its settings.
        config: its settings, as JSON values.
        fingerprint: of the experiment's version and settings; a later run with the same one reuses the result.
        command: the command that repeats it.
        version: of equilibria.
        packages: versions of Python and of the packages that computed it, by name.
        seconds: of CPU time, summed over all tasks.
        finished: time in ISO 8601, UTC.
        claims: with their verdicts.
        numbers: further numbers.
        figures: names of the figure files in the same folder, without suffix; each is there as .png and .pdf.
        kind: of the experiment: synthetic or networks.
        data: the data set: number of images, and a digest of them; "" without data.
        not_judged: name of a number that no claim uses -> why not.
    """

    id: str
    title: str
    source: str
    scale: str
    config: Mapping[str, Any]
    fingerprint: str
    command: str
    version: str
    packages: Mapping[str, str]
    seconds: float
    finished: str
    claims: tuple[Claim, ...]
    numbers: Mapping[str, Any]
    figures: tuple[str, ...]
    kind: str = SYNTHETIC
    data: str = ""
    not_judged: Mapping[str, str] = field(default_factory=dict)

    @property
    def fails(self) -> bool:
        """Whether a claim fails."""
        return any(claim.fails for claim in self.claims)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**values, "claims": [claim.as_dict() for claim in self.claims], "figures": list(self.figures)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        """The result that `as_dict` was called on.

        Raises:
            EquilibriaError: if a value has another type than `as_dict` gives it.
        """
        for name in ("id", "title", "source", "scale", "fingerprint", "command", "version", "finished"):
            of_type(name, values[name], str)
        for name in ("config", "packages", "numbers"):
            of_type(name, values[name], dict)
        within("seconds", values["seconds"], low=0)
        one_of("kind", values.get("kind", SYNTHETIC), KINDS)
        of_type("data", values.get("data", ""), str)
        for name, reason in of_type("not_judged", values.get("not_judged", {}), dict).items():
            of_type(name, reason, str)
        claims = tuple(Claim.from_dict(claim) for claim in of_type("claims", values["claims"], list))
        figures = tuple(of_type("figure", name, str) for name in of_type("figures", values["figures"], list))
        return cls(**{**values, "claims": claims, "figures": figures})


@dataclass(frozen=True, slots=True)
class ScaleFolder:
    """The folder of one experiment at one scale.

    Attributes:
        path: of the folder.
    """

    path: Path

    def figure(self, name: str, suffix: str) -> Path:
        """The file of a figure."""
        return self.path / f"{name}.{suffix}"

    def has_figures(self, result: Result) -> bool:
        """Whether all figures of the result are there."""
        return all(self.figure(name, suffix).is_file() for name in result.figures for suffix in SUFFIXES)

    def read(self) -> Result | None:
        """The result, or None if there is none that can be read."""
        try:
            return Result.from_dict(json.loads((self.path / "result.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):  # damaged, or of another version: counts as none
            return None

    def write(self, result: Result) -> None:
        """Write the result atomically; from then on the experiment is finished. The same result is left alone."""
        content = (json.dumps(result.as_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
        file = self.path / "result.json"
        if not file.is_file() or file.read_bytes() != content:
            write_whole(file, content)

    def prepare(self, fingerprint: str, keys: Iterable[str], *, force: bool) -> None:
        """Make room for the tasks of a run and remove tasks of other settings or versions.

        With ``force`` the old result is removed too: if this run is interrupted, the next one must not reuse it.
        """
        for key in keys:
            if not re.fullmatch(r"[\w.-]+", key):
                raise EquilibriaError(
                    f"got the task key {key!r}; expected letters, digits, dots, dashes and underscores"
                )
        for kind in ("records", "scratch"):
            for old in self.path.glob(f"{kind}-*"):
                if force or old.name != f"{kind}-{fingerprint}":
                    shutil.rmtree(old)
        if force:
            (self.path / "result.json").unlink(missing_ok=True)
        self._records(fingerprint).mkdir(parents=True, exist_ok=True)

    def store_task(self, fingerprint: str, key: str, done: TaskDone) -> None:
        """Store a finished task, so that an interrupted run resumes after it, and remove its scratch folder."""
        content = io.BytesIO()
        np.savez_compressed(content, **{**done.arrays, _SECONDS: np.asarray(done.seconds)})  # type: ignore[arg-type]
        write_whole(self._records(fingerprint) / f"{key}.npz", content.getvalue())
        scratch = self.scratch(fingerprint, key)
        shutil.rmtree(scratch, ignore_errors=True)
        progress_file(scratch).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty yet: other tasks are running
            scratch.parent.rmdir()

    def read_task(self, fingerprint: str, key: str) -> TaskDone | None:
        """A stored task, or None if there is none that can be read."""
        try:
            content = (self._records(fingerprint) / f"{key}.npz").read_bytes()
            with np.load(io.BytesIO(content), allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            return TaskDone(arrays, float(arrays.pop(_SECONDS)))
        except Exception:  # a damaged file makes zlib, zipfile or numpy raise almost anything
            return None

    def scratch(self, fingerprint: str, key: str) -> Path:
        """The scratch folder of a task, which the task itself creates."""
        return self.path / f"scratch-{fingerprint}" / key

    def _records(self, fingerprint: str) -> Path:
        return self.path / f"records-{fingerprint}"


@dataclass(frozen=True, slots=True)
class ResultsFolder:
    """All results: a folder per experiment, and in it one per scale.

    Attributes:
        path: of the folder.
    """

    path: Path

    def at_scale(self, experiment: str, scale: str) -> ScaleFolder:
        """The folder of an experiment at a scale."""
        return ScaleFolder(self.path / experiment / scale)

    def results(self) -> Iterator[tuple[ScaleFolder, Result]]:
        """All finished experiments, by id, the largest scale first."""
        for experiment in sorted(path for path in self.path.iterdir() if path.is_dir()):
            for scale in reversed(SCALES):
                folder = ScaleFolder(experiment / scale)
                result = folder.read()
                if result is not None:
                    yield folder, result


def open_results(path: str | Path) -> ResultsFolder:
    """Open or create a results folder.

    Raises:
        EquilibriaError: if ``path`` holds anything else, or cannot be written.
    """
    if not str(path):
        raise EquilibriaError("got results=''; expected the name of a folder, new or with results")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise EquilibriaError(f"got results={str(path)!r}, which is a file; expected a folder, new or with results")
    try:
        if folder.is_dir() and any(folder.iterdir()) and not _is_ours(folder):
            raise EquilibriaError(
                f"got results={str(path)!r}, which holds other things; expected a folder that is new, empty or has "
                "results of `equilibria reproduce`: choose another"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_ours(folder):
            write_whole(folder / _MARK_FILE, (json.dumps({_MARK: _FORMAT}) + "\n").encode())
    except OSError as error:
        raise EquilibriaError(
            f"got results={str(path)!r}, which cannot be written: {error.strerror or error}"
        ) from error
    return ResultsFolder(folder)


def _is_ours(folder: Path) -> bool:
    try:
        content = json.loads((folder / _MARK_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get(_MARK) == _FORMAT
