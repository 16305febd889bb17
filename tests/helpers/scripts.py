"""Training scripts as people write them, run plain and watched, and what may be said about a healthy one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

import equilibria as eq
from equilibria.findings import Finding
from equilibria.watching import WatchedRun

Watch = Callable[..., Any]


class NotWatched:
    """Stands in for the monitor in the plain run."""

    def log(self, **numbers: object) -> None:
        pass


def trained_twice(train: Callable[[Watch], nn.Module], **options: Any) -> WatchedRun:
    """Run a script plain and watched, check that every bit of its model is the same, and return the watched run.

    Args:
        train: runs the script from its seed with the function it calls in place of `equilibria.watch`.
        options: of the watching.
    """
    runs: list[WatchedRun] = []

    def watch(model: nn.Module, optimizer: Any) -> WatchedRun:
        runs.append(eq.watch(model, optimizer, **{"every": 1, **options}))
        return runs[-1]

    plain = train(lambda model, optimizer: NotWatched())
    watched = train(watch)
    states = plain.state_dict(), watched.state_dict()
    assert states[0].keys() == states[1].keys()
    same = (torch.allclose(value, states[1][name], rtol=0, atol=0, equal_nan=True) for name, value in states[0].items())
    assert all(same)
    runs[-1].close()
    assert runs[-1].failure is None
    return runs[-1]


def of_layer(run: WatchedRun, name: str) -> pa.Table:
    """The samples of one layer."""
    samples = run.samples()
    return samples.filter(pc.equal(samples["param"].cast("string"), name))


def words(findings: Iterable[Finding]) -> str:
    """All that the findings say, in lower case."""
    return "\n".join(map(str, findings)).lower()


def assert_nothing_alarming(run: WatchedRun, *, loss_is_logged: bool = False) -> None:
    """Check what no finding on a healthy run may say, whatever the script."""
    findings = run.findings()
    said = words(findings)
    assert [finding for finding in findings if finding.severity == "warning"] == []
    assert loss_is_logged or "loss" not in said
    assert "interpolat" not in said
    assert "changed outside" not in said
    assert "is scale-invariant" not in said and "are scale-invariant" not in said  # nobody asked `symmetries`
    assert "does not balance" not in said
    assert "spike" not in said


def text(length: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    """Tokens of a random Markov chain that prefers a few successors: something to learn, and noise."""
    draw = torch.Generator().manual_seed(seed)
    successors = torch.randint(vocabulary, (vocabulary, 3), generator=draw)
    choices = torch.randint(3, (length,), generator=draw).tolist()
    tokens = [0]
    for choice in choices[1:]:
        tokens.append(int(successors[tokens[-1], choice]))
    return torch.tensor(tokens)


def token_batch(tokens: Tensor, size: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stretches of the text, and the same one token later."""
    starts = torch.randint(len(tokens) - length - 1, (size,), generator=draw)
    windows = starts[:, None] + torch.arange(length + 1)
    return tokens[windows[:, :-1]], tokens[windows[:, 1:]]


def images(count: int, *, classes: int = 4, channels: int = 3, size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of one random pattern per class under as much noise, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    patterns = torch.randn(classes, channels, size, size, generator=draw)
    labels = torch.randint(classes, (count,), generator=draw)
    return patterns[labels] + torch.randn(count, channels, size, size, generator=draw), labels
