"""`equilibria import`: a run from the log of another tool, or from a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from equilibria.cli._options import NUMBER, OPTIMIZERS, PATH, build_rule, completes, example, json_option
from equilibria.cli._output import print_json
from equilibria.errors import EquilibriaError

_SETTINGS = ("momentum", "nesterov", "dampening", "betas", "adjust_lr_fn")


class _NumberOrMetric(click.ParamType):  # type: ignore[type-arg]  # not subscriptable before click 8.4
    """A finite number, or the name of a logged metric."""

    name = "number|metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Parse the typed text."""
        try:
            float(value)
        except ValueError:
            return str(value)
        return NUMBER.convert(value, param, ctx)


_SETTING = _NumberOrMetric()


@click.command(
    "import",
    epilog=example(
        "import wandb/offline-run-20260101_120000-abcd1234 runs/a --optimizer adamw --wd 0.1",
        "import checkpoints/ runs/b --optimizer adamw --lr 3e-4 --wd 0.1",
    ),
)
@click.argument("source", type=PATH)
@click.argument("run", type=PATH)
@click.option(
    "--optimizer", shell_complete=completes(OPTIMIZERS), help=f"For predictions, one of: {', '.join(OPTIMIZERS)}."
)
@click.option("--lr", type=_SETTING, help="Learning rate, or the metric that holds it; the logged one if not given.")
@click.option("--wd", "--weight-decay", type=_SETTING, help="Weight decay, likewise, or of the logged configuration.")
@click.option("--momentum", type=NUMBER, help="Momentum (sgd, sgdw: 0 if not given; muon: 0.95).")
@click.option("--nesterov", is_flag=True, help="Nesterov momentum (sgd; muon has it on by itself).")
@click.option("--dampening", type=NUMBER, help="Dampening (sgd).")
@click.option("--betas", help="beta1,beta2 (adamw, adam: 0.9,0.999 if not given; lion: 0.9,0.99).")
@click.option("--adjust-lr-fn", help="muon: original (if not given), match_rms_adamw, spectral_norm or none.")
@click.option("--invariant", multiple=True, help="Name or pattern of scale-invariant weights; may be repeated.")
@click.option("--select", multiple=True, help="Name or pattern of the parameters to import; may be repeated.")
@click.option("--column", multiple=True, help="NUMBER=PATTERN, such as norm=weights/{param}/l2; may be repeated.")
@json_option
def command(*, source: Path, run: Path, as_json: bool, **options: Any) -> None:
    """Import SOURCE, a log of norms or a folder of checkpoints, as a run in the new directory RUN.

    SOURCE is a CSV or Parquet table, the folder of a W&B, TensorBoard or MLflow run, or a folder of safetensors or
    torch checkpoints. The run is then read like a watched one: equilibria report RUN, forecast, serve.
    """
    from equilibria.findings import counted
    from equilibria.importing._run import imported_run

    imported = imported_run(
        source,
        log_dir=run,
        rule=_rule(options),
        own=False,
        settings={"lr": options["lr"], "weight_decay": options["wd"]},
        invariant=list(options["invariant"]) or None,
        select=list(options["select"]) or None,
        columns=dict(_column(text) for text in options["column"]) or None,
    )
    samples = imported.samples(["step", "angle"])
    steps = samples["step"].to_numpy()
    contents = {
        "log_dir": str(run),
        "kind": imported.metadata["imported"]["kind"],
        "params": list(imported.params),
        "first_step": int(steps[0]),
        "last_step": int(steps[-1]),
        "samples": samples.num_rows,
        "angles": samples.num_rows - samples["angle"].null_count,
        "notes": list(imported.notes),
    }
    if as_json:
        print_json(contents)
        return
    print(
        f"{run}: {counted(len(imported.params), 'parameter')}, steps {steps[0]:,} to {steps[-1]:,}, "
        f"{counted(samples.num_rows, 'sample')}, {contents['angles']:,} of them with an angle"
    )
    for note in imported.notes:
        print(f"- {note}")


def _rule(options: dict[str, Any]) -> Any:
    """The rule without lr and weight decay, which are those of the source; None without --optimizer."""
    if options["optimizer"] is not None:
        return build_rule(options | {"lr": 1.0, "wd": 0.0})
    for name in _SETTINGS:
        if options[name] not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise EquilibriaError(f"got {flag} without --optimizer; expected both", argument=flag)
    return None


def _column(text: str) -> tuple[str, str]:
    number, separator, pattern = text.partition("=")
    if not separator:
        raise EquilibriaError(
            f"got --column {text!r}; expected a number and a pattern, such as norm=weights/{{param}}/l2",
            argument="--column",
        )
    return number, pattern
