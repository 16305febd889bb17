"""A recorded run, to be looked at as one that is being watched: table, findings, report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from equilibria.diagnosis import diagnose
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.diagnosis.summary import summarise
from equilibria.findings import Finding
from equilibria.records import Run
from equilibria.records import read_run as read_record
from equilibria.views.run.card import run_card, tracker_card
from equilibria.views.run.page import write_report
from equilibria.views.run.sharpness import sharpness_table
from equilibria.views.run.terminal import run_table


class RecordedRun(Run):
    """A run on disk, with what a monitor has for one that is still going on."""

    __slots__ = ()

    def table(self) -> None:
        """Print one line per layer, the most surprising first, and what a sharpness tracker recorded, if one did."""
        queries, samples = self.sharpness(), self.samples()
        if samples.num_rows or not queries.num_rows:
            found = diagnose(samples, metadata=self.metadata)
            print(run_table(summarise(samples, metadata=self.metadata), findings=found, notes=self.notes))  # noqa: T201
        if queries.num_rows:
            print(sharpness_table(queries, metadata=self.metadata))  # noqa: T201

    def _repr_html_(self) -> str:
        samples, queries, found = self.samples(), self.sharpness(), self.findings()
        if queries.num_rows and not samples.num_rows:
            return tracker_card(queries, title=str(self), findings=found)
        return run_card(samples, summarise(samples, metadata=self.metadata), findings=found, notes=self.notes)

    def findings(self) -> tuple[Finding, ...]:
        """What the samples mean, most serious first."""
        about_sharpness = sharpness_findings(self.sharpness(), metadata=self.metadata)
        return (*diagnose(self.samples(), metadata=self.metadata), *about_sharpness)

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write everything as one HTML page that needs no network.

        Args:
            path: the file to write; an existing one is replaced.
            title: shown above the headline; the name of the directory without it.
        """
        shown = self.path.resolve().name if title is None else title
        return write_report(
            self.samples(), path, metadata=self.metadata, title=shown, notes=self.notes, sharpness=self.sharpness()
        )


def read_run(path: str | Path) -> RecordedRun:
    """The run that was recorded in a directory, also while it is being written and after its writer was killed.

    Args:
        path: the ``log_dir`` that `equilibria.watch` was given.

    Returns:
        The run: ``table()``, ``findings()``, ``samples()``, ``report(path)``, ``to_pandas()``, ``to_parquet(path)``.

    Raises:
        EquilibriaError: if there is no run at ``path``, or a newer version of equilibria wrote it.

    Example:
        >>> import tempfile
        >>> from equilibria.records import RunWriter
        >>> directory = tempfile.TemporaryDirectory()
        >>> with RunWriter(f"{directory.name}/a", metadata={}) as writer:
        ...     writer.append({"step": [0, 5], "param": ["conv1", "conv1"], "norm": [1.0, 2.0]})
        >>> read_run(f"{directory.name}/a")
        <RecordedRun .../a: 1 parameter, steps 0 to 5, 2 samples>
        >>> directory.cleanup()
    """
    run = read_record(path)
    return RecordedRun(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})
