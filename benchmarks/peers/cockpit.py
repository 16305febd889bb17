"""cockpit: its cheapest preset, the only one that takes BatchNorm, and its largest Hessian eigenvalue."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from peers import failure
from peers.bench import Bench, Step
from peers.eigenvalue import Answer, Batch


@contextmanager
def attach(bench: Bench, preset: str = "economy") -> Iterator[Step]:
    """Has to make the step itself: it works around the backward pass."""
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    model = extend(bench.model)
    mean, each = (extend(nn.CrossEntropyLoss(reduction=how)) for how in ("mean", "none"))
    watcher, count = Cockpit(model.parameters(), quantities=configuration(preset)), itertools.count()

    def step() -> None:
        bench.optimizer.zero_grad()
        outputs, targets = model(bench.inputs), bench.targets()
        loss, single = mean(outputs, targets), each(outputs, targets)
        info = {"batch_size": len(targets), "individual_losses": single, "loss": loss, "optimizer": bench.optimizer}
        number = next(count)
        with watcher(number, info=info):
            loss.backward(create_graph=watcher.create_graph(number))
        bench.optimizer.step()

    yield step


def largest_eigenvalue(net: nn.Module, batch: Batch, start: int) -> Answer:
    """HessMaxEV at one step of training, as its documentation uses it."""
    from cockpit import Cockpit, quantities
    from cockpit.quantities import hess_max_ev
    from cockpit.utils.schedules import linear

    torch.manual_seed(start)
    quantity = quantities.HessMaxEV(linear(1))
    watcher, calls = Cockpit(net.parameters(), quantities=[quantity]), []
    original = hess_max_ev.hessian_vector_product
    hess_max_ev.hessian_vector_product = lambda *args, **named: calls.append(1) or original(*args, **named)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    loss = nn.CrossEntropyLoss()(net(batch[0]), batch[1])
    info = {"batch_size": len(batch[1]), "loss": loss, "optimizer": optimizer}
    try:
        with warnings.catch_warnings():  # torch warns of create_graph, on every call
            warnings.simplefilter("ignore")
            with watcher(0, info=info):
                loss.backward(create_graph=watcher.create_graph(0))
    finally:
        hess_max_ev.hessian_vector_product = original
    return Answer(float(quantity.get_output()[0]), len(calls))


def tried(preset: str, net: nn.Module, batch: Batch) -> str:
    """What one step with a preset comes to."""
    model = copy.deepcopy(net)
    bench = Bench(model, torch.optim.SGD(model.parameters(), lr=0.1), batch[0])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with attach(bench, preset) as step:
                step()
    except Exception as error:
        return f"**fails**: {failure.in_a_line(error)}"
    return "runs"
