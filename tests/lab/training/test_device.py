"""Where a training runs. There is no GPU here: the meta device stands in, watched so that it does not mix."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from equilibria.errors import EquilibriaError
from equilibria.lab.training import Evaluation, FullBatch, Recipe, SharpnessMeasure, Training, measures, train
from equilibria.lab.training.recipe import named_device, present_device
from equilibria.lab.training.training import _random_state, _set_random_state

_MAY_MIX = (torch.Tensor.copy_, torch.Tensor.__deepcopy__, torch._has_compatible_shallow_copy_type)


class AsOnGPU(TorchFunctionMode):
    """Refuses what mixes tensors of two devices, but for copies; a meta tensor has no numbers: as a float it is 0."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        kinds = {tensor.device.type for tensor in tensors}
        if len(kinds) > 1 and func not in _MAY_MIX:
            raise RuntimeError(f"{func} mixes {sorted(kinds)}")
        if func is torch.Tensor.__float__ and args[0].is_meta:
            return 0.0
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch):
    """The meta device in its place."""
    for module in ("training", "run"):
        monkeypatch.setattr(
            f"equilibria.lab.training.{module}.present_device", lambda name: torch.device(name.replace("cuda", "meta"))
        )
    with AsOnGPU():
        yield


def made(**changes) -> Recipe:
    batch = torch.randn(8, 3, 6, 6), torch.zeros(8, dtype=torch.long)
    settings = {
        "model": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "data": FullBatch(*batch),
        "steps": 3,
        "measures": {"sets": Evaluation([batch[0]], test=batch)},
        "measure_every": 2,
        "device": "cuda",
        **changes,
    }
    return Recipe(**settings)


def test_devices_do_not_mix(gpu):
    """Else the tests below could not fail."""
    for net, inputs in ((nn.Linear(3, 2), torch.zeros(4, 3)), (nn.Conv2d(3, 2, 3), torch.zeros(4, 3, 6, 6))):
        with pytest.raises(RuntimeError, match=r"mixes \['cpu', 'meta'\]"):
            net.to("meta")(inputs)


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_training_is_on_its_device(gpu, chunk):
    trained = train(made(chunk=chunk))
    assert {tensor.device.type for tensor in trained.model.state_dict().values()} == {"meta"}
    buffers = [held["momentum_buffer"] for held in trained.state["optimizer"]["state"].values()]
    assert {buffer.device.type for buffer in buffers} == {"meta"}
    assert trained.curves["step"].tolist() == [0, 2, 3]


def test_the_random_numbers_of_the_device_are_kept(monkeypatch):
    found: list[tuple[torch.Tensor, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.full((1,), device.index))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: found.append(given))
    states = _random_state(torch.device("cuda:1"))
    _set_random_state(states, torch.device("cuda:0"))
    _set_random_state(states, torch.device("cpu"))
    _set_random_state(states[:1], torch.device("cuda:0"))  # of a training on the CPU
    assert found == [(torch.ones(1), torch.device("cuda:0"))]


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_state_of_the_cpu_resumes_there_with_the_state_of_its_measures(gpu):
    class Remembers:
        held = torch.zeros(4)

        def __call__(self, training):
            return {"sum": float((self.held + training.model[1].weight.detach()).sum())}

        def state_dict(self):
            return {"held": [self.held]}

        def load_state_dict(self, state):
            (self.held,) = state["held"]

    stem = train(made(steps=2, device="cpu", measures={"one": Remembers()}))
    measure = Remembers()
    trained = train(made(measures={"one": measure}), start=stem.state)
    assert measure.held.device.type == "meta"
    assert {tensor.device.type for tensor in trained.model.state_dict().values()} == {"meta"}


def test_sharpness_is_measured_there(gpu, monkeypatch):
    seen: list[torch.Tensor] = []

    class FoundError(Exception):
        pass

    def stop(loss, batch, **more):
        seen.extend(tensor for pair in batch for tensor in pair)
        raise FoundError

    monkeypatch.setattr(measures, "sharpness", stop)
    measure = SharpnessMeasure([(torch.zeros(2, 3, 6, 6), torch.zeros(2)), (torch.zeros(2, 3, 6, 6), torch.zeros(2))])
    with pytest.raises(FoundError):
        measure(Training(made()))
    assert [tensor.device.type for tensor in seen] == ["meta"] * 4


def test_the_first_weights_are_those_of_the_cpu(gpu):
    """They are drawn there and moved."""
    moved: list[torch.Tensor] = []

    class Net(nn.Linear):
        def to(self, device):
            moved.append(self.weight.detach().clone())
            return super().to(device)

    torch.manual_seed(0)
    first = nn.Linear(3, 2).weight
    Training(made(model=lambda: Net(3, 2)))
    assert len(moved) == 1 and torch.equal(moved[0], first)


def test_devices_that_do_not_exist_or_are_not_here_raise(monkeypatch):
    for name in ("gpu", "mps", "cuda:x", 3):
        with pytest.raises(EquilibriaError, match=f"got device={name!r}; expected 'cpu', 'cuda'"):
            made(device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EquilibriaError, match=r"got device='cuda', but torch \S+ finds no GPUs here; expected one"):
        train(made())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert present_device("cuda:0") == named_device("cuda:0")
    with pytest.raises(EquilibriaError, match=r"got device='cuda:1', but torch \S+ finds 1 GPU here"):
        present_device("cuda:1")
