"""The doctor: what it says of groups with known faults, its files, and bad input."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from equilibria._rich import Console
from equilibria.cli import app
from equilibria.doctor import compare_outputs, examine
from equilibria.doctor.factory import Patient, as_patient, usual_loss, usual_pair
from equilibria.doctor.terminal import print_examination
from equilibria.errors import EquilibriaError
from equilibria.theory import SGD


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 4), torch.randint(3, (16,)))]


def patient(make) -> Patient:
    net = net_of()
    return Patient(net, make(net), batches(), usual_loss)


def sgd(net: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, **options})


def rows_of(make):
    return {row.name: row for row in examine(patient(make)).rows}


def test_the_table_of_plain_sgd():
    rows = rows_of(sgd)
    law = SGD(lr=0.1, weight_decay=5e-4, momentum=0.9).equilibrium()
    weight = rows["0.weight"]
    assert (weight.role, weight.shape, weight.invariant, weight.problem) == ("Linear weight", (8, 4), "rows", "")
    assert weight.angle == pytest.approx(float(law.angle))
    assert weight.time_constant == pytest.approx(law.time_constant)
    assert weight.decay_per_step == pytest.approx(0.1 * 5e-4 / (1 - 0.9))
    assert "without effect: what follows takes it out" in rows["0.bias"].problem
    assert "decays BatchNorm scale, which is not invariant" in rows["1.weight"].problem
    assert rows["3.weight"].angle is None
    assert rows["3.weight"].problem == ""


@pytest.mark.parametrize("dampening", [0.0, 0.6])
def test_decay_per_step_is_what_torch_does(dampening):
    """With no gradient but that of decay, the norm shrinks at the rate of the slower root of the momentum recursion."""
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=5e-4, dampening=dampening)
    for _ in range(2000):
        before = param.item()
        param.grad = torch.zeros_like(param)
        optimizer.step()
    # The share is first order in lr wd / (1 - momentum)^2 = 0.5 %.
    said = rows_of(lambda net: sgd(net, dampening=dampening))["0.weight"].decay_per_step
    assert 1 - param.item() / before == pytest.approx(said, rel=1e-2)


def test_invariant_without_decay():
    row = rows_of(lambda net: sgd(net, weight_decay=0.0))["0.weight"]
    assert row.severity == "warning"
    assert "effective lr falls like t^-1/2" in row.problem
    assert row.angle is None


@pytest.mark.parametrize(
    ("lr", "weight_decay", "said"), [(0.1, 5e-4, ""), (0.2, 5e-4, "no common law"), (0.1, 1e-3, "no common law")]
)
def test_parameters_that_are_invariant_together_need_one_law(lr, weight_decay, said):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    groups = [{"params": [net[0].weight]}, {"params": [net[0].bias], "lr": lr, "weight_decay": weight_decay}]
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=5e-4)
    for row in examine(Patient(net, optimizer, batches(), usual_loss)).rows[:2]:
        assert said in row.problem
        assert row.severity == ("note" if said else "")


def test_a_parameter_in_no_group():
    row = rows_of(lambda net: torch.optim.SGD([net[0].weight], lr=0.1))["3.weight"]
    assert "never trained" in row.problem
    assert (row.group, row.lr) == (None, None)


def test_decay_that_rounding_swallows():
    net = net_of().to(torch.bfloat16)
    given = [(inputs.to(torch.bfloat16), targets) for inputs, targets in batches()]
    found = examine(Patient(net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1), given, usual_loss))
    assert "rounded away in torch.bfloat16" in {row.name: row for row in found.rows}["0.weight"].problem
    weight = torch.full((1000,), 1.0, dtype=torch.bfloat16).uniform_(0.1, 3.0)
    assert torch.equal(weight * (1 - 1e-4), weight)


def test_the_fix_is_code_that_leaves_no_warning():
    found = examine(patient(sgd))
    net = net_of()
    scope = {"model": net, "optimizer": sgd(net)}
    exec(found.fix, scope)
    again = examine(Patient(net, torch.optim.SGD(scope["groups"], lr=0.1, momentum=0.9), batches(), usual_loss))
    assert again.fix == ""
    assert [finding for finding in again.findings if finding.severity == "warning"] == []


def test_the_fix_keeps_what_groups_have():
    net = net_of()
    first, last = {"params": [*net[0].parameters(), *net[1].parameters()]}, {"params": list(net[3].parameters())}
    groups = [{**first, "lr": 0.1, "weight_decay": 0.0}, {**last, "lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.9)}]
    optimizer = torch.optim.AdamW(groups)
    scope = {"model": net, "optimizer": optimizer}
    exec(examine(Patient(net, optimizer, batches(), usual_loss)).fix, scope)
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


def test_the_usual_loss_of_maps_and_of_tokens():
    torch.manual_seed(0)
    maps, tokens = torch.randn(2, 5, 4, 4), torch.randn(2, 7, 5)
    pixels, words = torch.randint(5, (2, 4, 4)), torch.randint(5, (2, 7))
    assert usual_loss(maps, pixels) == nn.functional.cross_entropy(maps, pixels)
    assert usual_loss(maps[:, :, :, 0], pixels[:, :, 0]) == nn.functional.cross_entropy(maps[..., 0], pixels[..., 0])
    assert usual_loss(tokens, words) == nn.functional.cross_entropy(tokens.transpose(1, 2), words)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_optimizers_without_a_share_per_step(optimizer):
    row = rows_of(lambda net: optimizer(net.parameters(), lr=0.1, weight_decay=0.1))["0.weight"]
    assert row.decay_per_step is None


@pytest.mark.parametrize("width", [60, 100, 160])
def test_printed(width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_examination(examine(patient(sgd)), console=console)
    console.file.close()
    text = console.export_text()
    assert "0.weight" in text
    assert "no_decay = {" in text


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
        "number = 3\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_package\n")
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
        (("nowhere:make",), "got module 'nowhere', which is not found"),
        (("broken:make",), "module broken cannot be imported: ModuleNotFoundError"),
        (("doctored:nothing",), "which is not there; there are: make, fails, wrong"),
        (("doctored:number",), "which is not a function"),
        (("doctored:fails",), r"doctored:fails\(\) failed with RuntimeError: on purpose \(doctored.py, line 9\)"),
        (("doctored:wrong",), r"got a int from doctored:wrong; expected \(model, optimizer, batches\)"),
        (("--diff", "a.json", "b.json"), "got a.json, which is not there"),
        (("--diff", "doctored.py", "doctored.py"), "which is no output of equilibria doctor --json"),
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
    del changed["parameters"][-1]
    (project / "new.json").write_text(json.dumps(changed))
    found = compare_outputs(project / "old.json", project / "new.json")
    assert found == [
        {"name": "0.weight", "field": "weight_decay", "old": 5e-4, "new": 0.0},
        {"name": "3.bias", "field": "parameter", "old": "there", "new": "not there"},
    ]
    assert "0.weight: weight_decay 0.0005 -> 0.0" in run("--diff", "old.json", "new.json").output
    assert run("--diff", "old.json", "old.json").output == "no differences\n"
    assert json.loads(run("--diff", "old.json", "new.json", "--json").output) == found


def test_what_a_factory_may_return():
    net = net_of()
    made = {"model": net, "optimizer": sgd(net), "batches": batches()}
    assert as_patient(made, "make").loss is usual_loss
    assert as_patient({**made, "loss": nn.MSELoss()}, "make").loss is not usual_loss
    for bad in (
        {"model": net},
        (net, sgd(net)),
        ("net", sgd(net), []),
        (net, sgd(net), 3),
        (net, net, []),
        (net, sgd(net), [], 3),
    ):
        with pytest.raises(EquilibriaError):
            as_patient(bad, "make")


def test_usual_losses():
    logits, targets = torch.zeros(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64)
    assert usual_loss(logits, targets).item() == pytest.approx(math.log(4))
    assert usual_loss(torch.zeros(3), torch.ones(3)).item() == 1.0
    with pytest.raises(EquilibriaError, match="no usual loss"):
        usual_loss([1], 2)


def test_batches_may_be_dicts_with_labels():
    inputs, targets = torch.randn(4, 3), torch.arange(4)
    given, target = usual_pair({"x": inputs, "labels": targets})
    assert given["x"] is inputs and target is targets
    assert usual_pair((inputs, targets))[1] is targets
    with pytest.raises(EquilibriaError, match=r"got a batch with 'x'; expected \(input, target\)"):
        usual_pair({"x": inputs})


def test_a_file_may_be_named_in_place_of_its_module(project):
    assert run("./doctored.py:make").exit_code == run("doctored:make").exit_code == 0
