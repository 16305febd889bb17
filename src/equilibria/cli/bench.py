"""`equilibria bench`: what watching costs on this machine."""

from __future__ import annotations

import click

from equilibria.cli._options import WHOLE, example, json_option
from equilibria.cli._output import print_json
from equilibria.errors import EquilibriaError, whole

_ON_GPU, _ELSEWHERE = (1024, 24, 1024), (256, 4, 256)  # width, layers, tokens


@click.command("bench", epilog=example("bench", "bench --device cuda --width 2048 --json > bench.json"))
@click.option("--device", default=None, help="cuda, cpu, ...; without it a GPU if there is one.")
@click.option("--width", type=WHOLE, default=None, help="Of the matrices: 1024 on a GPU, 256 elsewhere.")
@click.option("--layers", type=WHOLE, default=None, help="Of six matrices each: 24 on a GPU, 4 elsewhere.")
@click.option("--tokens", type=WHOLE, default=None, help="In a batch: 1024 on a GPU, 256 elsewhere.")
@click.option("--steps", type=WHOLE, default=20, show_default=True, help="In each of five rounds.")
@json_option
def command(
    *, device: str | None, width: int | None, layers: int | None, tokens: int | None, steps: int, as_json: bool
) -> None:
    """Measure what watching costs on this machine: overhead, kernel launches, and bytes per second against a copy.

    Trains a stack of matrices for a few minutes with SGD and AdamW: unwatched, with every="auto" and with every=1,
    taking turns. Send us the table; numbers from GPUs that we lack are welcome.
    """
    import torch

    from equilibria.watching._bench import bench

    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EquilibriaError(
            f"got device {device!r}: {reason}; expected a device of this machine", argument="device"
        ) from None
    defaults = _ON_GPU if place.type == "cuda" else _ELSEWHERE
    sizes = [
        whole(name, default if value is None else value, low=1)
        for name, value, default in zip(("width", "layers", "tokens"), (width, layers, tokens), defaults, strict=True)
    ]
    steps = whole("steps", steps, low=1)
    try:
        result = bench(place, width=sizes[0], layers=sizes[1], tokens=sizes[2], steps=steps)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        given = "width={}, layers={}, tokens={}".format(*sizes)
        raise EquilibriaError(
            f"got {given}: {str(error).splitlines()[0]}; expected sizes that fit into the memory of {place}"
        ) from error
    if as_json:
        print_json(result)
    else:
        print(result)
