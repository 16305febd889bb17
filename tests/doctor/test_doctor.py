"""The doctor: what it says of groups with known faults, its files, and bad input."""

from __future__ import annotations

import copy
import json
import math
from collections import OrderedDict
from dataclasses import asdict

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from equilibria.cli import app
from equilibria.doctor import compare_outputs, examine
from equilibria.doctor._examination import long_run_decay
from equilibria.doctor._setup import TrainingSetup, as_setup, default_loss, input_and_target
from equilibria.errors import EquilibriaError
from equilibria.theory import SGD
from equilibria.views._rich import Console
from equilibria.views.examination import print_examination


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 4), torch.randint(3, (16,)))]


def setup(make) -> TrainingSetup:
    net = net_of()
    return TrainingSetup(net, make(net), batches(), default_loss)


def sgd(net: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, **options})


def rows_of(make):
    return {row.name: row for row in examine(setup(make)).rows}


def test_the_table_of_plain_sgd():
    rows = rows_of(sgd)
    law = SGD(lr=0.1, weight_decay=5e-4, momentum=0.9).equilibrium()
    weight = rows["0.weight"]
    assert (weight.role, weight.shape, weight.invariant, weight.problem) == ("Linear weight", (8, 4), "rows", "")
    assert weight.angle == pytest.approx(float(law.angle))
    assert weight.time_constant == pytest.approx(law.time_constant)
    assert weight.decay_per_step == pytest.approx(0.1 * 5e-4 / (1 - 0.9), rel=1e-2)  # to first order
    assert "without effect: a later operation (a normalisation, a softmax) removes it" in rows["0.bias"].problem
    assert "decays BatchNorm scale, which is not invariant" in rows["1.weight"].problem
    assert rows["3.weight"].angle is None
    assert rows["3.weight"].problem == ""


def weights_without_gradient(steps: int, **settings) -> list[float]:
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], **settings)
    track = []
    for _ in range(steps):
        param.grad = torch.zeros_like(param)
        optimizer.step()
        track.append(param.item())
    return track


@pytest.mark.parametrize(
    ("lr", "options"),
    [
        (0.1, {}),
        (0.1, {"dampening": 0.6}),
        (0.1, {"nesterov": True}),
        (0.1, {"momentum": 0.0}),
        (3000.0, {"momentum": 0.0}),  # beyond zero and back
        (4100.0, {"momentum": 0.0}),  # and further each time
    ],
)
def test_long_run_decay_is_what_torch_does(lr, options):
    """Without a gradient, after steps enough for the faster root to be gone: 0.9^400 = 1e-18."""
    settings = {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4, **options}
    track = weights_without_gradient(500, **settings)
    measured = 1 - (abs(track[-1]) / abs(track[-101])) ** (1 / 100)
    # Every step rounds the weight by up to 1e-16, and a rate of 5e-5 is measured as a difference from one.
    assert long_run_decay(SGD(**settings)) == pytest.approx(measured, rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"dampening": 0.6}, {"nesterov": True}])
def test_long_run_decay_of_a_weight_that_swings_is_that_of_its_envelope(options):
    """Of r^t cos(a t + b) the determinant x[t+1]^2 - x[t] x[t+2] is r^2t times a constant."""
    settings = {"lr": 1.0, "momentum": 0.99, "weight_decay": 5e-3, **options}
    x = weights_without_gradient(500, **settings)
    early, late = (x[step + 1] ** 2 - x[step] * x[step + 2] for step in (10, 490))
    assert early > 0 and min(x) < 0  # it does swing
    # A determinant is a difference of numbers a thousand times larger.
    assert long_run_decay(SGD(**settings)) == pytest.approx(1 - (late / early) ** (1 / 960), rel=1e-9)


def test_the_decay_of_a_row_is_that_of_its_group():
    settings = {"lr": 1.0, "momentum": 0.99, "weight_decay": 5e-3}
    assert rows_of(lambda net: sgd(net, **settings))["0.weight"].decay_per_step == long_run_decay(SGD(**settings))


class DeadNorm(nn.Module):
    """A normalisation behind which all units are dead, beside a layer that works."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.beside = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.beside(inputs) + (self.norm(inputs) - 100).relu()[:, :3]


def test_an_undecided_parameter_is_not_called_wrong():
    torch.manual_seed(0)
    net = DeadNorm()
    examination = examine(TrainingSetup(net, sgd(net), batches(), default_loss))
    rows = {row.name: row for row in examination.rows}
    for name in ("norm.weight", "norm.bias"):
        assert rows[name].invariant == "undecided"
        assert (rows[name].severity, rows[name].problem[:20]) == ("note", "hardly any gradient ")
        assert name not in examination.fix


def test_invariant_without_decay():
    row = rows_of(lambda net: sgd(net, weight_decay=0.0))["0.weight"]
    assert row.severity == "warning"
    assert "effective lr falls like t^-1/2" in row.problem
    assert row.angle is None


@pytest.mark.parametrize(
    ("lr", "weight_decay", "problem"), [(0.1, 5e-4, ""), (0.2, 5e-4, "no common law"), (0.1, 1e-3, "no common law")]
)
def test_parameters_that_are_invariant_together_need_one_law(lr, weight_decay, problem):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    groups = [{"params": [net[0].weight]}, {"params": [net[0].bias], "lr": lr, "weight_decay": weight_decay}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=5e-4)
    for row in examine(TrainingSetup(net, optimizer, batches(), default_loss)).rows[:2]:
        assert problem in row.problem
        assert row.severity == ("note" if problem else "")


class PreNorm(nn.Module):
    """A residual stream, in which stem and branch are invariant together, biases included."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        features = self.stem(inputs)
        features = features + self.down(torch.relu(self.up(self.norm(features))))
        return self.head(self.last(features))


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_invariance_without_decay_is_that_of_the_whole_set(weight_decay):
    """The usual groups, matrices decay and vectors do not: no bias is then called invariant by itself."""
    torch.manual_seed(0)
    net = PreNorm()
    matrices, vectors = ([p for p in net.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    rows = examine(TrainingSetup(net, torch.optim.AdamW(groups, lr=1e-3), batches(), default_loss)).rows
    bare = {row.name for row in rows if "invariant but not decayed" in row.problem}
    assert {"stem.weight", "stem.bias"} <= bare if weight_decay == 0 else not bare
    assert not [row.name for row in rows if row.severity == "warning" and weight_decay]


def test_a_parameter_in_no_group():
    row = rows_of(lambda net: torch.optim.SGD([net[0].weight], lr=0.1))["3.weight"]
    assert "never trained" in row.problem
    assert (row.group, row.lr) == (None, None)


def test_decay_that_rounding_swallows():
    net = net_of().to(torch.bfloat16)
    coarse = [(inputs.to(torch.bfloat16), targets) for inputs, targets in batches()]
    examination = examine(
        TrainingSetup(net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1), coarse, default_loss)
    )
    assert "rounded away in torch.bfloat16" in {row.name: row for row in examination.rows}["0.weight"].problem
    weight = torch.full((1000,), 1.0, dtype=torch.bfloat16).uniform_(0.1, 3.0)
    assert torch.equal(weight * (1 - 1e-4), weight)


def test_the_fix_is_code_that_leaves_no_warning():
    examination = examine(setup(sgd))
    net = net_of()
    scope = {"model": net, "optimizer": sgd(net)}
    exec(examination.fix, scope)
    again = examine(TrainingSetup(net, torch.optim.SGD(scope["groups"], lr=0.1, momentum=0.9), batches(), default_loss))
    assert again.fix == ""
    assert [finding for finding in again.findings if finding.severity == "warning"] == []


def test_the_fix_keeps_what_groups_have():
    net = net_of()
    first, last = {"params": [*net[0].parameters(), *net[1].parameters()]}, {"params": list(net[3].parameters())}
    groups = [{**first, "lr": 0.1, "weight_decay": 0.0}, {**last, "lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.9)}]
    optimizer = torch.optim.AdamW(groups)
    scope = {"model": net, "optimizer": optimizer}
    exec(examine(TrainingSetup(net, optimizer, batches(), default_loss)).fix, scope)
    names = {id(param): name for name, param in net.named_parameters()}
    now = {
        names[id(param)]: (group["lr"], group["weight_decay"], group["betas"])
        for group in torch.optim.AdamW(scope["groups"]).param_groups
        for param in group["params"]
    }
    usual = (0.9, 0.999)
    assert now == {
        "0.weight": (0.1, 0.2, usual),  # invariant: it has to decay
        "0.bias": (0.1, 0.0, usual),
        "1.weight": (0.1, 0.0, usual),
        "1.bias": (0.1, 0.0, usual),
        "3.weight": (0.03, 0.2, (0.8, 0.9)),
        "3.bias": (0.03, 0.0, (0.8, 0.9)),
    }


class ReturnsItsLoss(nn.Module):
    """(logits, loss), as nanoGPT's models return."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net_of()

    def forward(self, inputs, targets=None):
        logits = self.net(inputs)
        return logits, None if targets is None else nn.functional.cross_entropy(logits, targets)


def test_a_model_that_returns_its_loss():
    model = ReturnsItsLoss()
    rows = examine(TrainingSetup(model, sgd(model), batches(), None)).rows
    expected = rows_of(sgd)
    assert {row.name: (row.invariant, row.problem) for row in rows} == {
        f"net.{name}": (row.invariant, row.problem) for name, row in expected.items()
    }
    with pytest.raises(
        EquilibriaError, match=r"output of type tuple .*or None there if the model returns its loss"
    ) as e:
        examine(TrainingSetup(model, sgd(model), batches(), default_loss))
    assert e.value.argument == "loss"


def test_the_default_loss_of_maps_and_of_tokens():
    torch.manual_seed(0)
    maps, tokens = torch.randn(2, 5, 4, 4), torch.randn(2, 7, 5)
    pixels, words = torch.randint(5, (2, 4, 4)), torch.randint(5, (2, 7))
    assert default_loss(maps, pixels) == nn.functional.cross_entropy(maps, pixels)
    assert default_loss(maps[:, :, :, 0], pixels[:, :, 0]) == nn.functional.cross_entropy(maps[..., 0], pixels[..., 0])
    assert default_loss(tokens, words) == nn.functional.cross_entropy(tokens.transpose(1, 2), words)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_optimizers_without_a_share_per_step(optimizer):
    row = rows_of(lambda net: optimizer(net.parameters(), lr=0.1, weight_decay=0.1))["0.weight"]
    assert row.decay_per_step is None


@pytest.mark.parametrize("width", [60, 100, 160])
def test_printed(width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_examination(examine(setup(sgd)), console=console)
    console.file.close()
    text = console.export_text()
    assert "0.weight" in text
    assert "groups = regroup(optimizer, model=model, weight_decay={" in text


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a training script, as the current folder."""
    (tmp_path / "doctored.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=5e-4)\n"
        "    return net, optimizer, [(torch.randn(16, 4), torch.randint(3, (16,)))]\n"
        "def fails():\n    raise RuntimeError('on purpose')\n"
        "def wrong():\n    return 3\n"
        "def leaves():\n    import argparse\n    argparse.ArgumentParser().parse_args(['--unknown'])\n"
        "def talks():\n    print('loading')\n    return make()\n"
        "number = 3\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('no arguments')\n")
    (tmp_path / "rows.json").write_text('{"parameters": [{"name": "w", "role": ""}]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(*line: str):
    return CliRunner().invoke(app, ["doctor", *line])


def test_the_command(project):
    assert "0.weight" in run("doctored:make").output
    result = json.loads(run("doctored:make", "--json").output)
    assert {row["name"] for row in result["parameters"]} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }
    assert set(result) == {"parameters", "findings", "fix", "symmetries"}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ((), "expected package.module:factory"),
        (("doctored",), "expected package.module:factory"),
        (("nowhere:make",), "got module 'nowhere'; expected one in"),
        (("broken:make",), "module broken cannot be imported: ModuleNotFoundError"),
        (("doctored:nothing",), "which does not exist; expected one of: make, fails, wrong"),
        (("doctored:number",), "which is not a function"),
        (("doctored:fails",), r"doctored:fails\(\) failed with RuntimeError: on purpose \(doctored.py, line 9\)"),
        (("doctored:wrong",), r"got a int from doctored:wrong; expected \(model, optimizer, batches\)"),
        (("doctored:leaves",), r"doctored:leaves\(\) ended the program \(exit status 2\); expected it to return"),
        (("leaving:make",), r"importing leaving ended the program \(exit status no arguments\)"),
        (("--diff", "a.json", "b.json"), "got a.json, which does not exist"),
        (("--diff", ".", "."), "which is a folder; expected a saved output"),
        (("--diff", "rows.json", "rows.json"), "whose row w has no 'shape'"),
        (
            ("--diff", "doctored.py", "doctored.py"),
            "got doctored.py; expected a saved output of equilibria doctor",
        ),
        (("--diff", "rows.json", "rows.json", "--save", "x.json"), "expected it with TARGET only"),
        (("doctored:make", "--save", "."), "expected the name of a file"),
        (("doctored:make", "--save", "nowhere/x.json"), "in a folder that exists"),
    ],
)
def test_bad_input_of_the_command(project, line, shown):
    error = run(*line).exception
    assert isinstance(error, EquilibriaError)
    with pytest.raises(EquilibriaError, match=shown):
        raise error


def test_differences(project):
    first = run("doctored:make", "--json").output
    (project / "old.json").write_text(first)
    changed = json.loads(first)
    changed["parameters"][0]["weight_decay"] = 0.0
    changed["parameters"][1]["problem"] = ""
    del changed["parameters"][-1]
    (project / "new.json").write_text(json.dumps(changed))
    changes = compare_outputs(project / "old.json", project / "new.json")
    assert changes == [
        {"name": "0.weight", "field": "weight_decay", "old": 5e-4, "new": 0.0},
        {"name": "0.bias", "field": "problem", "old": json.loads(first)["parameters"][1]["problem"], "new": ""},
        {"name": "3.bias", "field": "parameter", "old": "there", "new": "not there"},
    ]
    shown = run("--diff", "old.json", "new.json").output
    assert "0.weight: weight_decay 0.0005 -> 0.0\n" in shown and "or it is unused -> none\n" in shown
    assert run("--diff", "old.json", "old.json").output == "no differences\n"
    assert json.loads(run("--diff", "old.json", "new.json", "--json").output) == changes


def test_what_is_saved_is_what_json_prints(project):
    result = run("doctored:make", "--save", "saved.json", "--json")
    assert json.loads((project / "saved.json").read_text()) == json.loads(result.stdout)


@pytest.mark.parametrize("changed", [{"momentum": 0.8}, {"nesterov": True}])
def test_another_momentum_is_a_difference(tmp_path, changed):
    files = tmp_path / "old.json", tmp_path / "new.json"
    for file, options in zip(files, ({}, changed), strict=True):
        rows = examine(setup(lambda net, options=options: sgd(net, **options))).rows
        file.write_text(json.dumps({"parameters": [asdict(row) for row in rows]}))
    fields = {change["field"] for change in compare_outputs(*files) if change["name"] == "0.weight"}
    assert fields == {"decay_per_step", "angle", "time_constant"}


def test_rounding_is_no_difference(project):
    first = json.loads(run("doctored:make", "--json").stdout)
    (project / "old.json").write_text(json.dumps(first))
    first["parameters"][0]["angle"] *= 1 + 1e-12
    (project / "new.json").write_text(json.dumps(first))
    assert compare_outputs(project / "old.json", project / "new.json") == []


def test_what_a_factory_prints_is_not_in_the_answer(project):
    result = run("doctored:talks", "--json")
    assert set(json.loads(result.stdout)) == {"parameters", "findings", "fix", "symmetries"}
    assert result.stderr.startswith("loading\n")


def test_what_a_factory_may_return():
    net = net_of()
    made = {"model": net, "optimizer": sgd(net), "batches": batches()}
    assert as_setup(made, "make").loss is default_loss
    assert as_setup({**made, "loss": nn.MSELoss()}, "make").loss is not default_loss
    assert as_setup({**made, "loss": None}, "make").loss is None
    for bad in (
        {"model": net},
        (net, sgd(net)),
        ("net", sgd(net), []),
        (net, sgd(net), 3),
        (net, net, []),
        (net, sgd(net), [], 3),
    ):
        with pytest.raises(EquilibriaError):
            as_setup(bad, "make")


def test_default_losses():
    logits, targets = torch.zeros(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64)
    assert default_loss(logits, targets).item() == pytest.approx(math.log(4))
    assert default_loss(torch.zeros(3), torch.ones(3)).item() == 1.0
    with pytest.raises(EquilibriaError, match="no default loss"):
        default_loss([1], 2)


def test_batches_may_be_dicts_with_labels():
    inputs, targets = torch.randn(4, 3), torch.arange(4)
    inner, target = input_and_target({"x": inputs, "labels": targets})
    assert inner["x"] is inputs and target is targets
    assert input_and_target((inputs, targets))[1] is targets
    with pytest.raises(EquilibriaError, match=r"got a batch with 'x'; expected \(input, target\)"):
        input_and_target({"x": inputs})


def test_a_file_may_be_named_in_place_of_its_module(project):
    assert run("./doctored.py:make").exit_code == run("doctored:make").exit_code == 0


def test_a_tensor_with_other_settings_than_its_siblings_is_named():
    torch.manual_seed(0)
    up = nn.Linear(4, 4)
    blocks = [nn.Sequential(OrderedDict(up=copy.deepcopy(up), activation=nn.Tanh())) for _ in range(4)]
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks)))
    odd = model.blocks[2].up.weight
    groups = [{"params": [p for p in model.parameters() if p is not odd]}, {"params": [odd], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    batch = torch.randn(8, 4), torch.randint(4, (8,))
    setup = TrainingSetup(model, optimizer, [batch], nn.functional.cross_entropy)
    findings = {finding.subject: finding.evidence for finding in examine(setup).findings}
    assert findings["blocks.2.up.weight"] == "weight decay 0, but 0.1 for the other 3 of its kind"


def test_a_matrix_that_is_not_invariant_has_a_time_constant_and_no_angle():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    setup = TrainingSetup(model, optimizer, [(torch.randn(8, 4), torch.randint(3, (8,)))], nn.functional.cross_entropy)
    weight, bias = examine(setup).rows
    assert (weight.angle, weight.time_constant) == (None, pytest.approx(1 / (2 * 1e-3 * 0.1)))
    assert bias.time_constant is None


@pytest.mark.parametrize("held", [list, lambda several: dict(zip("ab", several, strict=True))])
def test_several_optimizers_are_examined_as_one_with_their_groups(held):
    """As `watch` takes them; the fix makes groups for each that needs them."""
    net = net_of()
    adamw = torch.optim.AdamW([*net[1].parameters(), *net[3].parameters()], lr=1e-3, weight_decay=0.1)
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, weight_decay=5e-4)
    made = as_setup((net, held([first, adamw]), batches()), "train:make")
    examination = examine(made)
    rows = {row.name: row for row in examination.rows}
    assert [(rows[name].group, rows[name].lr) for name in ("0.weight", "1.weight")] == [(0, 0.1), (1, 1e-3)]
    assert rows["0.weight"].angle == pytest.approx(float(SGD(lr=0.1, weight_decay=5e-4).equilibrium().angle))
    scope = {"model": net, "optimizers": [first, adamw]}
    exec(examination.fix, scope)
    assert "regroup(optimizers[1]" in examination.fix
    decays = {id(param): group["weight_decay"] for group in scope["groups"] for param in group["params"]}
    assert decays[id(net[1].weight)] == 0 and decays[id(net[3].weight)] == 0.1


def test_where_there_is_no_law_it_says_so():
    net = net_of()
    optimizer = torch.optim.Rprop(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    (finding,) = (
        one
        for one in examine(TrainingSetup(net, optimizer, batches(), default_loss)).findings
        if "no angle and no time to settle are stated: " in one.evidence
    )
    assert finding.severity == "note" and "0.weight" in finding.subject and "Rprop" in finding.evidence
