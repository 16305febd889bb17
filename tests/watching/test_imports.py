"""`watch` imports what it needs when it needs it, and works without numba."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

LATER = ("numba", "scipy", "rich", "plotly", "matplotlib", "pandas", "sklearn")

WATCH = """
import sys, torch
net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
before = set(sys.modules)
import equilibria as eq
monitor = eq.watch(net, optimizer)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_watching_imports_nothing_heavy_before_the_first_step():
    command = [sys.executable, "-c", WATCH]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    imported = done.stdout.split()
    assert "equilibria" in imported
    assert not set(LATER) & set(imported)


TRAIN = """
import pickle, sys, warnings
if sys.argv[2] == "without":
    sys.modules["numba"] = None
import torch, equilibria as eq
from torch import nn
torch.set_num_threads(1)
warnings.simplefilter("error")

MAKE = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-3),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
}
found = {}
for name, make in MAKE.items():
    for granularity in ("tensor", "row"):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(30, 20, bias=False), nn.BatchNorm1d(20), nn.Linear(20, 5)).to(dtype)
            optimizer = make(net.parameters())
            with eq.watch(net, optimizer, every=1, granularity=granularity) as monitor:
                for _ in range(12):
                    optimizer.zero_grad()
                    (net(torch.randn(16, 30, dtype=dtype)) * torch.randn(16, 5, dtype=dtype)).mean().backward()
                    optimizer.step()
            assert monitor.failure is None, monitor.failure
            found[name, granularity, str(dtype)] = monitor.samples().to_pydict()
assert ("numba" in sys.modules and sys.modules["numba"] is not None) == (sys.argv[2] == "with")
pickle.dump(found, open(sys.argv[1], "wb"))
"""


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    found = {}
    for numba in ("with", "without"):
        path = folder / numba
        command = [sys.executable, "-c", TRAIN, str(path), numba]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        found[numba] = pickle.loads(path.read_bytes())
    return found


NUMBERS = ("norm", "grad_norm", "update_norm", "angle", "effective_lr", "angle_predicted", "norm_equilibrium")


def test_without_numba_the_samples_are_the_same_to_rounding(samples):
    assert samples["with"].keys() == samples["without"].keys()
    for case, compiled in samples["with"].items():
        by_torch = samples["without"][case]
        for name in ("step", "param", "lr", "state", "note"):
            assert by_torch[name] == compiled[name], (case, name)
        for name in NUMBERS:
            both = list(zip(compiled[name], by_torch[name], strict=True))
            assert all((first is None) == (second is None) for first, second in both), (case, name)
            known = [pair for pair in both if pair[0] is not None]
            assert [second for _, second in known] == pytest.approx([first for first, _ in known], rel=1e-9), (
                case,
                name,
            )


ADVICE = """
import sys, warnings
sys.modules["numba"] = None
import torch, equilibria as eq
net = torch.nn.Linear(1000, int(sys.argv[1]), bias=False)
optimizer = torch.optim.AdamW(net.parameters())
with warnings.catch_warnings(record=True) as caught, eq.watch(net, optimizer, every=1) as monitor:
    warnings.simplefilter("always")
    for _ in range(3):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
assert monitor.failure is None
print(len(caught), *(warning.message for warning in caught))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "count"), [(10, 0), (1100, 1)])
def test_without_numba_one_sentence_recommends_it_for_large_networks(rows, count):
    command = [sys.executable, "-c", ADVICE, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert int(done.stdout.split()[0]) == count
    assert ("pip install 'equilibria[fast]'" in done.stdout) == bool(count)


LOOPS = """
import sys
sys.modules["numba"] = None
import numpy as np
from equilibria.forecasting import _paths
from equilibria._compiled import compiled

@compiled("void(float64[::1])")
def double(values):
    for place in range(values.size):
        values[place] *= 2

values = np.ones(3)
double(values)
assert type(double).__name__ == "function" and values.tolist() == [2.0, 2.0, 2.0]
assert type(_paths._integrate_adam).__name__ == "function"
"""


def test_without_numba_compiled_loops_are_plain_functions():
    subprocess.run([sys.executable, "-c", LOOPS], check=True, timeout=600)
