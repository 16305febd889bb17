"""Who tells scale-invariant tensors from others, on networks where the answer is known?"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from equilibria.lab.data.image_set import load_digits
from equilibria.lab.nets import GPT, BasicBlockResNet
from peers import adamp, failure, ours
from peers.eigenvalue import Batch

STEPS = 40
LARGE = 10.0  # times the weights when the answer is found: no attention is even any more, and eps is negligible
SMALL = 1e-2  # change of the outputs, relative to their spread: invariant ones stay below 1e-4


class NextToken(nn.Module):
    """The scores of a language model for what follows the last token."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.gpt(tokens)[:, -1]
        return found


@dataclass(frozen=True)
class Case:
    """A network, a batch, and the answer: found by scaling every tensor by itself, in float64."""

    name: str
    net: nn.Module
    batch: Batch

    @property
    def matrices(self) -> list[str]:
        return [name for name, param in self.net.named_parameters() if param.ndim >= 2]

    def invariant(self) -> set[str]:
        return {name for name in self.matrices if max(self._change(name, by) for by in (0.5, 2.0)) < SMALL}

    def _change(self, name: str, factor: float) -> float:
        net = copy.deepcopy(self.net).double()
        with torch.no_grad():
            for matrix in self.matrices:
                net.get_parameter(matrix).mul_(LARGE)
        inputs = self.batch[0].double() if self.batch[0].is_floating_point() else self.batch[0]
        before = net(inputs).detach()
        with torch.no_grad():
            net.get_parameter(name).mul_(factor)
        return ((net(inputs).detach() - before).norm() / (before - before.mean(0)).norm()).item()


def cases() -> list[Case]:
    torch.manual_seed(0)
    digits = load_digits()
    images = digits.train_images[:128], digits.train_labels[:128]
    tokens = torch.randint(32, (64, 16)), torch.randint(32, (64,))
    convs = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    mlp = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    gpt: dict[str, int] = {"vocabulary": 32, "width": 32, "layers": 2, "heads": 2, "context": 16}
    return [
        Case("ResNet with BatchNorm", BasicBlockResNet(8, (1, 1, 1), in_channels=1), images),
        Case("CNN without normalisation", nn.Sequential(*convs, nn.Flatten(), nn.Linear(1024, 10)), images),
        Case("MLP without normalisation", nn.Sequential(*mlp), images),
        Case("transformer, pre-norm", NextToken(GPT(**gpt)), tokens),
        Case("transformer, queries and keys normalised", NextToken(GPT(**gpt, qk_norm=True)), tokens),
    ]


@dataclass(frozen=True)
class Verdict:
    """How a test did on a network.

    Attributes:
        missed: invariant tensors that it did not name, of ``invariant`` asked at each of ``times``.
        wrong: others that it did, of ``others`` asked at each of ``times``.
        ever_wrong: how many of the others it named at least once.
    """

    tool: str
    case: str
    invariant: int
    others: int
    times: int
    missed: int
    wrong: int
    ever_wrong: int
    cost: str
    failure: str = ""


def measure() -> list[Verdict]:
    return [verdict for case in cases() for verdict in _of(case)]


def _of(case: Case) -> list[Verdict]:
    truth = case.invariant()
    tools: dict[str, Callable[[], tuple[Counter[str], int, str]]] = {
        "equilibria symmetries": lambda: _ours(case),
        "AdamP's cosine": lambda: _theirs(case, adamp.flagged),
        "pytorch_optimizer's AdamP": lambda: _theirs(case, adamp.flagged_by_copy),
    }
    return [_judged(name, case, truth, tool) for name, tool in tools.items()]


def _judged(tool: str, case: Case, truth: set[str], run: Callable[[], tuple[Counter[str], int, str]]) -> Verdict:
    others = set(case.matrices) - truth
    try:
        named, times, cost = run()
    except Exception as error:
        return Verdict(tool, case.name, len(truth), len(others), 0, 0, 0, 0, "", failure.in_a_line(error))
    return Verdict(
        tool,
        case.name,
        len(truth),
        len(others),
        times,
        sum(times - named[name] for name in truth),
        sum(named[name] for name in others),
        sum(named[name] > 0 for name in others),
        cost,
    )


def _ours(case: Case) -> tuple[Counter[str], int, str]:
    named, passes = ours.scale_invariant(copy.deepcopy(case.net), case.batch)
    return Counter(named), 1, f"{passes} backward passes, once"


def _theirs(case: Case, flagged: Callable[..., tuple[Counter[str], int]]) -> tuple[Counter[str], int, str]:
    net = copy.deepcopy(case.net)

    def train(optimizer: torch.optim.Optimizer) -> int:
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(net(case.batch[0]), case.batch[1]).backward()
            optimizer.step()
        return STEPS

    return *flagged(net, train), "part of its step"
