"""`import_run`: a run from somebody else's log, or from checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from equilibria.errors import EquilibriaError, one_of
from equilibria.importing._checkpoints import has_checkpoints
from equilibria.importing._logs import SOURCES, has_events, is_log
from equilibria.importing._sources import from_checkpoints, from_log, matching
from equilibria.importing._writing import cohorts_of, settled, write_run
from equilibria.records._manifest import RUN_FILE
from equilibria.tensors.parameters import select_patterns
from equilibria.theory.rules import RULES, ClosedRule
from equilibria.watching._recorded import RecordedRun, read_run


def import_run(
    source: str | Path,
    *,
    log_dir: str | Path,
    optimizer: str | ClosedRule | None = None,
    lr: float | str | None = None,
    weight_decay: float | str | None = None,
    invariant: Iterable[str] | None = None,
    select: Iterable[str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> RecordedRun:
    r"""Make a run from a log of norms that another tool wrote, or from a folder of checkpoints.

    The run is like a watched one: `read_run`, `forecast`, reports and pages take it. What the source cannot tell is
    null, and ``run.notes`` says so. The angle of a step comes from the norms before and after it and the length of the
    update; one that the rounding of the logged numbers could hide is not stated. Checkpoints give norms, and angles
    over the steps between them, in ``run.diffusion()``.

    Args:
        source: a CSV or Parquet file, the folder of a Weights & Biases, TensorBoard or MLflow run, or a folder of
            checkpoints (safetensors or torch files, or folders of torch.distributed.checkpoint, with the step in their
            names).
        log_dir: the directory to write the run into; new, or empty.
        optimizer: for predictions: one of "sgd", "sgdw", "adamw", "adam", "lion" and "muon", or a rule of
            `equilibria.theory` if its betas or momentum are not the usual ones.
        lr: a number, or the name of a logged metric; None for the metric that is called so.
        weight_decay: likewise; None also for the logged configuration.
        invariant: names or patterns of the scale-invariant weights, which their law predicts where the source has what
            it needs; the measured gain predicts the others.
        select: names or patterns of the parameters; by default all but biases and scales of normalisations.
        columns: names of metrics where they are not known, such as ``{"norm": "weights/{param}/l2"}``.

    Returns:
        The run, as `read_run` gives it.

    Raises:
        EquilibriaError: if the source cannot be read or names no norm, ``log_dir`` holds files, or an argument does not
            fit. Nothing is written then.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = tempfile.TemporaryDirectory()
        >>> table = Path(folder.name, "history.csv")
        >>> lines = ["_step,norm/fc.weight,update_norm/fc.weight", "0,3.0412381,0.0412311", "1,3.0415202,0.0412307"]
        >>> _ = table.write_text("\n".join(lines))
        >>> run = import_run(table, log_dir=f"{folder.name}/run")
        >>> [round(angle, 6) for angle in run.samples()["angle"].to_pylist()]
        [0.013556, 0.013555]
        >>> folder.cleanup()
    """
    return imported_run(
        source,
        log_dir=log_dir,
        rule=_rule(optimizer),
        own=not isinstance(optimizer, str),
        settings={"lr": lr, "weight_decay": weight_decay},
        invariant=invariant,
        select=select,
        columns=columns,
    )


def imported_run(
    source: str | Path,
    *,
    log_dir: str | Path,
    rule: ClosedRule | None,
    own: bool,
    settings: Mapping[str, float | str | None],
    invariant: Iterable[str] | None,
    select: Iterable[str] | None,
    columns: Mapping[str, str] | None,
) -> RecordedRun:
    """`import_run` with a rule, whose own lr and weight decay count if ``own``."""
    path, directory = _source(source), _target(log_dir)
    chosen = None if select is None else select_patterns(select)
    if is_log(path):
        imported = from_log(path, columns, chosen, settings)
    elif path.is_dir() and has_checkpoints(path):
        imported = from_checkpoints(path, chosen, settings)
    elif has_events(path):
        imported = from_log(path, columns, chosen, settings)
    else:
        raise EquilibriaError(f"got source={source}; expected {SOURCES}", argument="source")
    if rule is not None:
        imported, rule = settled(imported, rule, own=own)
    labels = _labels(invariant, list(imported.histories))
    cohorts = [] if rule is None else cohorts_of(imported, rule, labels)
    write_run(directory, imported, rule, labels, cohorts, source=path)
    return read_run(directory)


def _source(source: str | Path) -> Path:
    if not isinstance(source, str | os.PathLike):
        raise EquilibriaError(f"got source={source!r}; expected {SOURCES}", argument="source")
    path = Path(source)
    if not path.exists():
        raise EquilibriaError(f"got source={source}, which does not exist; expected {SOURCES}", argument="source")
    if (path / RUN_FILE).is_file():
        raise EquilibriaError(
            f"got source={source}, a recorded run already: eq.read_run({str(source)!r})", argument="source"
        )
    return path


def _target(log_dir: str | Path) -> Path:
    """The directory, before the work of reading; the writer looks again."""
    if not isinstance(log_dir, str | os.PathLike):
        raise EquilibriaError(f"got log_dir={log_dir!r}; expected the path of a directory", argument="log_dir")
    directory = Path(log_dir)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        what = "a run" if (directory / RUN_FILE).is_file() else "other files"
        raise EquilibriaError(f"got log_dir={log_dir}, which holds {what}; choose a new directory", argument="log_dir")
    return directory


def _rule(optimizer: str | ClosedRule | None) -> ClosedRule | None:
    if optimizer is None or isinstance(optimizer, tuple(RULES.values())):
        return optimizer  # type: ignore[return-value]
    if not isinstance(optimizer, str):
        raise EquilibriaError(
            f"got optimizer={optimizer!r}; expected one of: {', '.join(RULES)}, or one of their rules such as "
            "equilibria.theory.AdamW(lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))",
            argument="optimizer",
        )
    return RULES[one_of("optimizer", optimizer.lower(), RULES)](1.0, 0.0)  # its settings come from elsewhere


def _labels(invariant: Iterable[str] | None, names: Sequence[str]) -> dict[str, bool | None]:
    if invariant is None:
        return dict.fromkeys(names)
    wanted = matching(select_patterns(invariant), names, argument="invariant")
    return {name: name in wanted for name in names}
