"""`read_run`: a recorded run with the same views as one that is being watched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from equilibria._display import Printable
from equilibria.diagnosis import summarise_and_diagnose
from equilibria.diagnosis.layer_summary import LayerSummary
from equilibria.diagnosis.noise import GradientNoise, gradient_noise
from equilibria.diagnosis.sharpness import sharpness_findings
from equilibria.findings import Finding, Findings, warnings_first
from equilibria.records import Record, read_record
from equilibria.views.run.card import run_card, tracker_card
from equilibria.views.run.checkpoints import checkpoint_table
from equilibria.views.run.page import write_report
from equilibria.views.run.sharpness import sharpness_table
from equilibria.views.run.terminal import run_table


class RecordedRun(Record):
    """A run on disk, with the views of a watched run."""

    __slots__ = ()

    def table(self) -> Printable:
        """One line per layer, in the order of the model, and the queries of a sharpness tracker, if there was one.

        Of many layers, those of one kind across blocks (``h.*.mlp.c_proj``) share a line.

        Returns:
            A table that ``print`` shows in the terminal and a notebook shows as the value of a cell.
        """
        queries, samples, texts = self.sharpness(), self.samples(), []
        summaries, findings = self._diagnosed(samples)
        if samples.num_rows or not queries.num_rows:
            texts.append(run_table(summaries, findings=findings, notes=self.notes, metrics=self.metrics()))
        if between := checkpoint_table(samples, self.diffusion(), metadata=self.metadata):
            texts.append(between)
        if queries.num_rows:
            texts.append(sharpness_table(queries, metadata=self.metadata))
        return Printable("\n".join(texts), self._card(samples, queries, summaries, findings))

    def _repr_html_(self) -> str:
        samples = self.samples()
        return self._card(samples, self.sharpness(), *self._diagnosed(samples))

    def _diagnosed(self, samples: pa.Table) -> tuple[tuple[LayerSummary, ...], Findings]:
        return summarise_and_diagnose(samples, metadata=self.metadata, metrics=self.metrics())

    def _card(
        self, samples: pa.Table, queries: pa.Table, summaries: Sequence[LayerSummary], findings: Sequence[Finding]
    ) -> str:
        every_finding = (*findings, *sharpness_findings(queries, metadata=self.metadata))
        if queries.num_rows and not samples.num_rows:
            return tracker_card(queries, title=str(self), findings=every_finding)
        return run_card(samples, summaries, findings=every_finding, notes=self.notes, metrics=self.metrics())

    def findings(self) -> Findings:
        """What the samples mean, and the queries of a sharpness tracker, warnings first."""
        about_sharpness = sharpness_findings(self.sharpness(), metadata=self.metadata)
        return warnings_first((*self._diagnosed(self.samples())[1], *about_sharpness))

    def noise(self) -> GradientNoise:
        """Gradient noise scale, curvature along the step and D(n), of every layer and of the network; prints itself."""
        return gradient_noise(
            self.samples(), metadata=self.metadata, metrics=self.metrics(), diffusion=self.diffusion()
        )

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write everything as one HTML page that needs no network.

        Args:
            path: the file to write, outside the folder of a run; replaces an earlier page.
            title: shown above the headline; the name of the directory by default.
        """
        shown = self.path.resolve().name if title is None else title
        return write_report(
            self.samples(),
            path,
            metadata=self.metadata,
            title=shown,
            notes=self.notes,
            sharpness=self.sharpness(),
            metrics=self.metrics(),
            diffusion=self.diffusion(),
        )


def read_run(path: str | Path) -> RecordedRun:
    """Read the run recorded in a directory, finished, still being written, or left by a killed process.

    Args:
        path: the ``log_dir`` of `equilibria.watch`.

    Returns:
        The run: ``table()``, ``findings()``, ``noise()``, ``samples()``, ``metrics()``, ``diffusion()``,
        ``report(path)``, ``to_pandas()``, ``to_parquet(path)``.

    Raises:
        EquilibriaError: if there is no run at ``path``, or a newer version of equilibria wrote it.

    Example:
        >>> import tempfile
        >>> from equilibria.records import RecordWriter
        >>> directory = tempfile.TemporaryDirectory()
        >>> with RecordWriter(f"{directory.name}/a", metadata={}) as writer:
        ...     writer.append({"step": [0, 5], "param": ["conv1", "conv1"], "norm": [1.0, 2.0]})
        >>> read_run(f"{directory.name}/a")
        <RecordedRun .../a: 1 parameter, steps 0 to 5, 2 samples>
        >>> directory.cleanup()
    """
    run = read_record(path)
    return RecordedRun(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})
