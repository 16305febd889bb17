"""`equilibria.watch`: what it takes and refuses, and the run that it gives back."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.helpers.watched_worlds import column, make_net, same_bits, train
from torch import nn

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.records import read_record


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)


BAD = {
    "a model that is none": ({"model": "net"}, "got model of type str; expected a torch.nn.Module"),
    "no model": ({"model": None}, "got model of type NoneType"),
    "an optimizer that is none": ({"optimizer": "sgd"}, "got optimizer of type str; expected a torch.optim.Optimizer"),
    "no optimizer": ({"optimizer": None}, "got optimizer of type NoneType"),
    "an empty list": ({"optimizer": []}, "got an empty list of optimizers; expected at least one"),
    "an empty dict": ({"optimizer": {}}, "got an empty dict of optimizers"),
    "a wrong one in a list": ({"optimizer": [3]}, "got optimizer of type int"),
    "every 0": ({"every": 0}, "got every=0; expected 1 <= every"),
    "every -1": ({"every": -1}, "got every=-1"),
    "every word": ({"every": "x"}, "got every='x'; expected 'auto' or a whole number"),
    "every half": ({"every": 1.5}, "got every=1.5; expected a whole number"),
    "every nan": ({"every": math.nan}, "got every=nan"),
    "every inf": ({"every": math.inf}, "got every=inf"),
    "every True": ({"every": True}, "got every=True; expected a whole number"),
    "every None": ({"every": None}, "got every=None"),
    "granularity": ({"granularity": "rows"}, "got granularity='rows'; expected one of: tensor, row"),
    "granularity None": ({"granularity": None}, "got granularity=None"),
    "no epoch": ({"steps_per_epoch": 0}, "got steps_per_epoch=0"),
    "part of a step": ({"steps_per_epoch": 2.5}, "got steps_per_epoch=2.5"),
    "a word for an epoch": ({"steps_per_epoch": "10"}, "got steps_per_epoch='10'"),
    "a name that is not there": ({"select": "0.wieght"}, "'0.wieght', which matches no parameter; there are: 0.weight"),
    "one of two that is not there": ({"select": ["0.weight", "conv*"]}, "'conv.', which matches no parameter"),
    "a selection of nothing": ({"select": lambda name, tensor: False}, "leaves nothing of 8 parameters to watch"),
    "an empty selection": ({"select": []}, "leaves nothing of 8 parameters to watch"),
    "numbers to select": ({"select": [3]}, "got 3 in select"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_and_leaves_no_hooks(given, message):
    net = make_net()
    optimizer = sgd(net)
    arguments = {"model": net, "optimizer": optimizer, **given}
    with pytest.raises(EquilibriaError, match=message.replace("*", r"\*")):
        eq.watch(arguments.pop("model"), arguments.pop("optimizer"), **arguments)
    assert not optimizer._optimizer_step_pre_hooks


def test_what_was_half_made_is_thrown_away_without_a_word():
    net = make_net()
    with pytest.raises(EquilibriaError):
        eq.watch(net, sgd(net), select="nothing")
    gc.collect()  # an error in a destructor is a warning, and warnings are errors here


def test_the_optimizer_of_another_model_is_refused():
    with pytest.raises(EquilibriaError, match="none of the model's"):
        eq.watch(make_net(), sgd(make_net()))


def test_everything_but_model_and_optimizer_is_named():
    net = make_net()
    with pytest.raises(TypeError):
        eq.watch(net, sgd(net), "runs/a")


@pytest.mark.parametrize("select", ["0.*", ["0.weight", "1.*"], lambda name, tensor: name.startswith(("0", "1"))])
def test_selections(select):
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=np.int64(1), select=select) as monitor:
        train(net, optimizer, 2)
        wanted = {"0.weight"} if isinstance(select, str) else {"0.weight", "1.weight", "1.bias"}
        assert set(column(monitor, "param")) == wanted


def test_two_lines_and_nothing_else():
    """No reference kept, nothing closed: training is watched all the same, and bit by bit the same."""
    net, plain = make_net(), make_net()
    optimizer = sgd(net)
    eq.watch(net, optimizer)
    gc.collect()
    assert optimizer._optimizer_step_post_hooks
    train(net, optimizer, 10)
    train(plain, sgd(plain), 10)
    assert same_bits(net, plain)


def test_epochs():
    net = make_net()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, steps_per_epoch=10) as monitor:
        train(net, optimizer, 4)
        steps, epochs = (column(monitor, name, "0.weight")[-1] for name in ("steps_to_settle", "epochs_to_settle"))
        assert steps > 0
        assert epochs == pytest.approx(steps / 10)
        assert monitor.metadata["steps_per_epoch"] == 10


def test_metadata_is_complete_and_plain():
    import json

    net = nn.Sequential(make_net(), nn.Linear(3, 3))
    groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    with eq.watch(net, optimizer, every=5, granularity="tensor") as monitor:
        metadata = monitor.metadata
    assert json.loads(json.dumps(metadata)) == metadata
    assert metadata["every"] == 5
    assert metadata["granularity"] == "tensor"
    assert metadata["torch"] == torch.__version__
    assert metadata["optimizers"] == [{"class": "AdamW", "settings": "AdamW(lr=0.001, wd=0.1); AdamW(lr=0.001, wd=0)"}]
    last = metadata["params"][-1]
    assert (last["name"], last["shape"], last["entries"], last["dtype"]) == ("1.weight", [3, 3], 9, "float32")
    assert (last["optimizer"], last["group"], last["law"], last["no_law"]) == (0, 1, "AdamW", None)


def test_a_learning_rate_in_a_tensor_is_described_as_a_number(tmp_path):
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01), betas=(0.9, 0.99))
    with eq.watch(net, optimizer, every=1, log_dir=tmp_path / "run") as monitor:
        train(net, optimizer, 2)
    assert monitor.metadata["params"][0]["rule"]["lr"] == pytest.approx(0.01)
    assert read_record(tmp_path / "run").samples().num_rows == 6


AT_EXIT = """
import os, sys, warnings
import torch, equilibria as eq
from equilibria.records import RecordWarning

torch.set_num_threads(1)
import equilibria.tensors._product_loops, equilibria.watching._watch  # once, for all children
warnings.simplefilter("error")
warnings.simplefilter("ignore", RecordWarning)

for number, end in enumerate(sys.argv[2:]):
    child = os.fork()
    if child == 0:
        break
    os.waitpid(child, 0)
else:
    sys.exit()

os.dup2(os.open(f"{sys.argv[1]}/{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
net = torch.nn.Linear(3, 3, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
monitor = eq.watch(net, optimizer, every=1, log_dir=f"{sys.argv[1]}/{number}")
for _ in range(20):
    optimizer.zero_grad()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
if end == "lost":
    del monitor, optimizer, net
elif end == "raises":
    raise KeyError("as training does")
"""


def test_what_was_measured_is_written_when_the_program_ends(tmp_path):
    """Also into a directory beside an existing run, which is only opened with the first samples."""
    ends = ["lost", "raises", "plain"]
    for number in (1, 2):
        net = nn.Linear(3, 3)
        eq.watch(net, torch.optim.SGD(net.parameters()), log_dir=tmp_path / str(number)).close()
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), *ends]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for number, end in enumerate(ends):
        said = (tmp_path / f"{number}.txt").read_text()
        assert said.endswith("KeyError: 'as training does'\n") if end == "raises" else said == "", said
        assert "Warning" not in said
        run = read_record(tmp_path / f"{number}{'-2' if number >= 1 else ''}")
        assert run.samples()["step"].to_pylist() == list(range(20))
        assert run.sessions[-1].ended is not None


@pytest.mark.slow
def test_importing_it_draws_no_random_numbers():
    code = "import random; random.seed(0); import equilibria as eq; eq.watch; print(random.random())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == random.Random(0).random()


@pytest.mark.parametrize("several", [False, True])
def test_layers_come_in_the_order_of_the_model_whatever_the_order_of_groups_and_optimizers(several):
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    weights, extra = [layer.weight for layer in net], torch.nn.Parameter(torch.randn(4, 4))
    groups = [[extra, weights[3], weights[1]], [weights[2], weights[0]]]
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
    single = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    with eq.watch(net, optimizers if several else single, every=1) as monitor:
        for _ in range(3):
            (net(torch.randn(8, 4)).square().mean() + extra.square().sum()).backward()
            for optimizer in optimizers if several else [single]:
                optimizer.step()
        names = [layer.name for layer in monitor._diagnosed(monitor.samples())[0]]
    assert names == ["0.weight", "1.weight", "2.weight", "3.weight", "optimizer0.group0.0"]
