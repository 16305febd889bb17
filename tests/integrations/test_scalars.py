"""Samples as scalars: which tags there are, how many, and that every step is sent once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.logged import assert_logged, expected, sgd
from tests.helpers.watched_worlds import make_net, train

import equilibria as eq
from equilibria.errors import EquilibriaError, WatchWarning
from equilibria.integrations import scalars
from equilibria.integrations.scalars import METRICS, ScalarSink, Tags, require
from equilibria.records.tables import NOTES, STATES

OTHERS = {"lightning", "pytorch_lightning", "transformers", "accelerate", "tensorboard", "wandb", "mlflow"}


class Kept(ScalarSink):
    """Keeps what it is given."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps, self.finished = [], 0

    def write(self, scalars, step):
        self.steps.append((step, dict(scalars)))

    def finish(self):
        self.finished += 1

    def by_tag(self):
        tags = {}
        for step, values in self.steps:
            for tag, value in values.items():
                assert step not in tags.setdefault(tag, {}), "logged twice"
                tags[tag][step] = value
        return tags


def rows(step, angles, predicted=None):
    """A step of as many layers as there are angles."""
    count = len(angles)
    columns = {name: np.ones(count) for name in ("norm", "relative_update", "effective_lr", "angle_equilibrium")}
    columns |= {"angle": np.array(angles), "angle_predicted": np.array(predicted or [0.01] * count, dtype=object)}
    names = [f"layer{number}" for number in range(count)]
    return columns | {
        "step": np.full(count, step),
        "param": names,
        "state": ["settled"] * count,
        "note": [None] * count,
    }


def test_a_small_network_is_logged_layer_by_layer_and_over_layers():
    net, sink = make_net(), Kept()
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, sinks=[sink]) as monitor:
        train(net, optimizer, 7)
        assert [step for step, _ in sink.steps] == list(range(7))  # at once, not at the end
    assert sink.finished == 1
    assert_logged(sink.by_tag(), expected(monitor.samples()))


def test_what_is_asked_for_is_logged_and_nothing_else():
    net, sink = make_net(), Kept(metrics=["cosine"], layers=0)
    optimizer = sgd(net)
    with eq.watch(net, optimizer, every=1, sinks=[sink]) as monitor:
        train(net, optimizer, 2)
    cosines = monitor.samples()["cosine"].to_numpy()[:3]
    step, found = sink.steps[0]
    assert step == 0
    assert found["equilibria/cosine/median"] == np.median(cosines)
    assert {tag.split("/")[1] for tag in found} == {"cosine", "layers"}
    assert {tag.split("/")[2] for tag in found if "/cosine/" in tag} == {"median", "min", "max"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": ["angel"]}, "got metric='angel'; expected one of: lr, weight_decay"),
        ({"metrics": ["param"]}, "got metric='param'"),
        ({"layers": -1}, "got layers=-1"),
        ({"layers": 1.5}, "got layers=1.5"),
    ],
)
def test_bad_options_are_refused(given, message):
    with pytest.raises(EquilibriaError, match=message):
        Tags(**given)


@given(
    layers=st.integers(0, 12),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    metrics=st.lists(st.sampled_from(METRICS), unique=True, min_size=1),
)
def test_there_are_never_more_tags_than_said_and_places_are_kept(layers, count, seed, metrics):
    draw, tags, seen, named = np.random.default_rng(seed), Tags(metrics=metrics, layers=layers), set(), []
    for step in range(30):
        columns = rows(step, np.exp(draw.normal(-4, 1, count)))
        columns["state"] = list(draw.choice([*STATES], count))
        columns["note"] = list(draw.choice([None, *NOTES], count))
        found = tags.of(columns)
        now = {word for word in (tag.rpartition("/")[2] for tag in found) if word.startswith("layer")}
        assert set(named) <= now
        named = now
        seen |= set(found)
    assert len(named) <= layers
    assert len(seen) <= len(metrics) * (3 + layers) + 10
    if count <= layers:
        assert len(named) == count


def test_with_many_layers_the_places_go_to_those_that_are_far_off():
    tags = Tags(layers=2)
    angles = [0.01] * 20
    angles[7], angles[13], angles[3] = 0.02, 0.004, 0.011
    for step in range(6):
        found = tags.of(rows(step, angles))
        named = {tag.rpartition("/")[2] for tag in found if tag.rpartition("/")[2].startswith("layer")}
        assert named == (set() if step < 4 else {"layer7", "layer13"})
    assert found["equilibria/angle_vs_predicted/layer7"] == pytest.approx(2)


def test_a_layer_that_is_off_for_one_step_gets_no_place():
    tags = Tags(layers=2)
    for step in range(40):
        angles = [0.01] * 20
        angles[5] = 0.02 if step == 20 else 0.01  # its mean of logarithms is then 0.2 * log 2, below log 1.25
        found = tags.of(rows(step, angles))
        assert not [tag for tag in found if tag.endswith("layer5")]


def test_without_predictions_layers_are_compared_with_each_other():
    tags = Tags(layers=1)
    angles = [0.01 + 1e-4 * number for number in range(9)] + [0.05]
    for step in range(5):
        found = tags.of(rows(step, angles, predicted=[None] * 10))
    assert found["equilibria/angle/layer9"] == 0.05
    assert not [tag for tag in found if "predicted" in tag]


def test_what_is_not_finite_or_not_there_is_left_out():
    found = Tags().of(rows(0, [np.nan, 0.01, np.inf], predicted=[None, 0.01, 0.01]))
    assert [found[f"equilibria/angle/{word}"] for word in ("median", "min", "max")] == [0.01] * 3
    assert {tag for tag in found if tag.startswith("equilibria/angle/layer")} == {"equilibria/angle/layer1"}
    assert np.isfinite(list(found.values())).all()


def test_steps_of_two_optimizers_are_sent_together():
    net, sink = make_net(), Kept()
    optimizers = [
        torch.optim.SGD(net[:4].parameters(), lr=0.1, weight_decay=5e-3),
        torch.optim.SGD(net[4:].parameters(), lr=0.05, weight_decay=5e-3),
    ]

    class Both:
        def zero_grad(self):
            net.zero_grad()

        def step(self):
            for each in optimizers:
                each.step()

    with eq.watch(net, optimizers, every=1, sinks=[sink]) as monitor:
        train(net, Both(), 5)
        assert [step for step, _ in sink.steps] == list(range(5))
    assert_logged(sink.by_tag(), expected(monitor.samples()))


def test_optimizers_in_turn_are_sent_step_by_step():
    sink = Kept(metrics=["angle"])
    parts = rows(0, [0.01, 0.02]), {**rows(0, [0.03]), "param": ["other"]}
    sink.append(parts[0])
    sink.append({**parts[0], "step": [1, 1]})
    assert [step for step, _ in sink.steps] == [0, 1]  # the second one brings nothing new
    sink.append({**parts[1], "step": [2]})
    assert len(sink.steps) == 2  # who knows who else there is
    sink.append({**parts[0], "step": [3, 3]})
    assert [step for step, _ in sink.steps] == [0, 1, 2]
    sink.append({**parts[1], "step": [3]})
    assert [step for step, _ in sink.steps] == [0, 1, 2, 3]
    sink.append({**parts[1], "step": [4]})
    sink.close()
    assert [step for step, _ in sink.steps] == [0, 1, 2, 3, 4]
    assert sink.steps[3][1]["equilibria/angle/median"] == 0.02


def test_a_single_sample_is_sent_at_the_end():
    sink = Kept()
    sink.append(rows(0, [0.01]))
    assert sink.steps == []
    sink.close()
    assert [step for step, _ in sink.steps] == [0]


def test_only_the_first_process_sends(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for rank, count in ((1, 0), (0, 1)):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        sink = Kept()
        sink.append(rows(0, [0.01]))
        sink.close()
        assert len(sink.steps) == count


def test_a_logger_that_fails_is_dropped_and_watching_goes_on():
    class Broken(ScalarSink):
        def write(self, scalars, step):
            raise OSError("no space left")

    net, kept = make_net(), Kept()
    optimizer = sgd(net)
    monitor = eq.watch(net, optimizer, every=1, sinks=[Broken(), kept])
    with monitor, pytest.warns(WatchWarning, match="Broken takes no more samples: OSError: no space left; watching"):
        train(net, optimizer, 4)
    assert monitor.samples().num_rows == 12
    assert [step for step, _ in kept.steps] == list(range(4))


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(
        EquilibriaError, match=r"nowhere_to_be is not installed; install it: pip install 'equilibria\[x\]'"
    ):
        require("nowhere_to_be.found", extra="x")


def test_what_a_package_itself_lacks_is_not_blamed_on_it(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import nowhere_to_be\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be"):
        require("half_there", extra="x")


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from equilibria.integrations.lightning import EquilibriaCallback", "lightning"),
        ("from equilibria.integrations.transformers import EquilibriaCallback", "transformers"),
        ("from equilibria.integrations.tensorboard import TensorBoardSink; TensorBoardSink('x')", "tensorboard"),
        ("from equilibria.integrations.wandb import WandbSink; WandbSink()", "wandb"),
        ("from equilibria.integrations.mlflow import MLflowSink; MLflowSink()", "mlflow"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_without_the_package_there_is_the_command(code, extra, monkeypatch):
    plain = scalars.importlib.import_module

    def absent(name):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return plain(name)

    monkeypatch.setattr(scalars.importlib, "import_module", absent)
    for module in ("lightning", "transformers"):
        monkeypatch.delitem(sys.modules, f"equilibria.integrations.{module}", raising=False)
    with pytest.raises(EquilibriaError, match=rf"pip install 'equilibria\[{extra}\]'"):
        exec(code, {})


@pytest.mark.parametrize(
    "more",
    [
        "equilibria.integrations",
        pytest.param(
            "equilibria.watching, equilibria.integrations.tensorboard, equilibria.integrations.wandb, "
            "equilibria.integrations.mlflow",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_library_imports_none_of_them(more):
    code = (
        f"import sys, equilibria, {more}\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        f"unwanted = roots & {OTHERS}\n"
        "assert not unwanted, unwanted\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
