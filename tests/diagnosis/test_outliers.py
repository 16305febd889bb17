"""Tensors unlike their siblings: planted ones are named, healthy and intended ones are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.report_helpers import table
from tests.helpers.sample_worlds import edited
from torch import nn

import equilibria as eq
from equilibria.diagnosis import diagnose
from equilibria.diagnosis.outliers import outliers
from equilibria.diagnosis.run import sampled_run
from equilibria.diagnosis.siblings import siblings
from equilibria.diagnosis.summary import summarise_run
from equilibria.records.tables import NO_GRADIENT

KINDS = {"attn.out": 0.004, "mlp.up": 0.003}  # angle per step
STEPS = np.arange(0, 200, 5)
BLOCKS = 6


def samples(changes=None, *, frozen=(), kind="AdamW", names=None, shape=(16, 16), dtype="float32"):
    """Six blocks whose tensors of a kind are alike up to 5 %, but for ``changes``: name -> column -> factor."""
    random = np.random.default_rng(0)
    names = names or [f"h.{block}.{each}.weight" for block in range(BLOCKS) for each in KINDS]
    size = len(STEPS), len(names)
    angle = np.array([next((v for k, v in KINDS.items() if k in name), 0.004) for name in names])
    columns = {
        "lr": np.full(size, 1e-3),
        "weight_decay": np.full(size, 0.1),
        "momentum": np.full(size, 0.9),
        "cosine": np.full(size, 0.3),
        "grad_norm": np.ones(size),
        "angle": angle * np.exp(random.normal(0, 0.05, size)),
        "norm": np.full(size, 10.0),
    }
    columns |= dict.fromkeys(
        ("angle_predicted", "angle_equilibrium", "norm_predicted", "norm_equilibrium"), np.full(size, np.nan)
    )
    columns["update_norm"] = columns["angle"] * columns["norm"]
    columns["relative_update"] = columns["angle"].copy()
    for name, factors in (changes or {}).items():
        for column, factor in factors.items():
            columns[column] = columns[column].copy()
            columns[column][:, names.index(name)] *= factor
    betas = {"betas": [0.9, 0.95]} if kind == "AdamW" else {"momentum": 0.9, "nesterov": False, "dampening": 0.0}
    rule = {"kind": kind, **betas}
    common = {"aliases": [], "shape": list(shape), "entries": 256, "dtype": dtype, "optimizer": 0, "group": 0}
    params = [{"name": name, **common, "law": kind, "rule": rule, "no_law": None, "invariant": False} for name in names]
    listed = [{"name": name, "shape": list(shape)} for name in frozen]
    return table(STEPS, names, columns), {"params": params, "optimizers": [], "frozen": listed}


def found(*args, **kwargs):
    rows, metadata = samples(*args, **kwargs)
    run = sampled_run(rows, metadata=metadata)
    return list(outliers(run, summarise_run(run)))


ONE = "h.3.mlp.up.weight"


@pytest.mark.parametrize(
    ("changes", "kind", "subject", "evidence"),
    [
        (
            {"lr": 5.0, "update_norm": 5.0},
            "other lr",
            f"{ONE} has lr 5e-3, its siblings 1e-3",
            "its steps per entry 5.1x theirs, its norm 1x theirs",
        ),
        (
            {"lr": 0.0, "update_norm": 0.0, "angle": 0.0},
            "other lr",
            f"{ONE} has lr 0, its siblings 1e-3",
            "at step 195, against 5 other h.*.mlp.up.weight",
        ),
        ({"weight_decay": 0.0}, "other weight decay", f"{ONE} has weight decay 0, its siblings 0.1", "against 5 other"),
        (
            {"update_norm": 0.2},
            "other steps",
            f"{ONE} takes steps unlike its siblings', at the same lr",
            "over steps 100-195, its steps per entry 0.21x theirs",
        ),
        (
            {"norm": 10.0},
            "other start",
            f"{ONE} started with another norm than its siblings",
            "had 10x the median norm per entry of 6",
        ),
        (
            {"angle": 1e-6, "grad_norm": 0.0, "update_norm": 1e-3},
            "at rest",
            f"{ONE} does not turn, its siblings do",
            "at none of 40 samples over steps 0-195; weight decay alone moves it; the median of 5 other",
        ),
    ],
    ids=["lr", "lr 0", "decay", "steps", "start", "rest"],
)
def test_a_planted_fault_is_the_only_finding_and_names_its_tensor(changes, kind, subject, evidence):
    (finding,) = found({ONE: changes})
    assert (finding.kind, finding.subject) == (kind, subject)
    assert evidence in finding.evidence


def test_several_tensors_with_another_lr_share_a_finding_that_says_whose_numbers_it_gives():
    other = f"{ONE.removesuffix('mlp.up.weight')}attn.out.weight"
    changes = {"lr": 5.0, "update_norm": 5.0}
    (finding,) = found({ONE: changes, other: changes})
    assert finding.subject == f"{other}, {ONE} have lr 5e-3, their siblings 1e-3"
    assert f"at step 195, {other} against 5 other h.*.attn.out.weight; " in finding.evidence
    assert "move them to the parameter group of their siblings" in finding.remedy


@pytest.mark.parametrize(("rests_from", "is_found"), [(0, True), (145, True), (155, False)])
def test_a_tensor_at_rest_is_named_for_ten_samples_in_all_even_with_fewer_in_its_window(rests_from, is_found):
    rows, metadata = samples()
    step = rows["step"].to_numpy()
    rests = (np.array(rows["param"].to_pylist()) == ONE) & (step >= rests_from)
    columns = {field: np.where(rests, 0.0, rows[field].to_numpy()) for field in ("angle", "grad_norm")}
    lr = np.where(step < 160, 1e-3, 1e-2)  # eight samples since it jumped
    run = sampled_run(edited(rows, lr=lr, **columns), metadata=metadata)
    findings = [finding.evidence for finding in outliers(run, summarise_run(run)) if finding.kind == "at rest"]
    assert len(findings) == is_found
    if is_found:
        assert f"at none of {(200 - rests_from) // 5} samples over steps {rests_from}-195" in findings[0]


def test_a_tensor_that_gets_no_gradient_any_more_is_not_compared_with_later_steps_of_its_siblings():
    """Its last samples have the lr of earlier steps: steps five times as long are none of another size."""
    rows, metadata = samples()
    step, name = rows["step"].to_numpy(), np.array(rows["param"].to_pylist())
    falls = np.where(step < 100, 1.0, 0.2)
    gone = (name == ONE) & (step >= 100)
    columns = {field: rows[field].to_numpy() * falls for field in ("lr", "angle", "relative_update", "update_norm")}
    for field in ("angle", "relative_update", "update_norm", "grad_norm"):
        columns[field] = np.where(gone, np.nan, columns.get(field, rows[field].to_numpy()))
    run = sampled_run(edited(rows, note=np.where(gone, NO_GRADIENT, None), **columns), metadata=metadata)
    summaries = summarise_run(run)
    assert not list(outliers(run, summaries))
    (kind,) = (kind for kind in siblings(summaries) if ONE in {member.name for member in kind.members})
    assert ONE not in kind.unlike("angle") and len(kind.of_one_window) == BLOCKS - 1


def test_a_frozen_tensor_among_trained_siblings_is_named():
    names = [f"h.{block}.{each}.weight" for block in range(BLOCKS) for each in KINDS if (block, each) != (3, "mlp.up")]
    (finding,) = found(names=names, frozen=[ONE])
    assert finding.subject == f"{ONE} is frozen, its 5 siblings are trained"


@pytest.mark.parametrize(
    "frozen",
    [
        [f"h.{block}.mlp.up.weight" for block in range(3)],  # half of a kind: a choice
        [f"h.9.{each}.weight" for each in KINDS],  # a whole block: a choice
        ["adapter.weight"],
    ],
)
def test_what_looks_like_a_choice_is_not_a_fault(frozen):
    names = [name for b in range(BLOCKS) for each in KINDS if (name := f"h.{b}.{each}.weight") not in frozen]
    assert found(names=names, frozen=frozen) == []


def test_a_healthy_run_has_no_finding():
    assert found() == []


def test_lr_that_falls_from_block_to_block_is_a_choice():
    """As in fine-tuning with layer-wise lr decay: no value is shared by two thirds."""
    changes = {f"h.{b}.{each}.weight": {"lr": 0.8**b, "update_norm": 0.8**b} for b in range(BLOCKS) for each in KINDS}
    assert found(changes) == []


def test_under_sgd_steps_follow_the_gradient_and_are_no_finding():
    assert found({ONE: {"update_norm": 5.0}}, kind="SGD") == []


def test_norms_of_a_pretrained_network_differ_and_are_no_finding():
    factors = [1.0, 1.3, 1.8, 0.6, 4.0, 0.8]
    changes = {f"h.{b}.{each}.weight": {"norm": factors[b]} for b in range(BLOCKS) for each in KINDS}
    assert found(changes) == []


def test_tensors_of_another_shape_start_and_step_otherwise_without_a_finding():
    rows, metadata = samples({ONE: {"norm": 4.0, "update_norm": 3.0}})
    metadata["params"][7]["shape"] = [64, 16]
    assert metadata["params"][7]["name"] == ONE
    run = sampled_run(rows, metadata=metadata)
    assert list(outliers(run, summarise_run(run))) == []


def test_rows_without_gradient_are_counted_with_what_decay_did_to_them():
    names = [f"embedding.weight[{row}]" for row in range(8)]
    rest = {"angle": 1e-7, "grad_norm": 0.0}
    (finding,) = found({names[2]: rest, names[5]: rest}, names=names)
    assert finding.severity == "note"
    assert finding.subject == "2 of 8 rows of embedding.weight did not turn at any sample"
    assert finding.evidence.startswith("[2], [5], at 40 samples over steps 0-195")
    (finding,) = found({names[2]: rest}, names=names, shape=(8, 16, 16))
    assert finding.severity == "warning"
    assert finding.subject == "1 of 8 matrices of embedding.weight did not turn at any sample"


def test_rounding_of_a_coarse_type_does_not_hide_a_tensor_at_rest():
    """Decay alone turns a bfloat16 weight by its rounding: the gradient of exactly 0 decides."""
    (finding,) = found({ONE: {"angle": 1.0, "grad_norm": 0.0}}, dtype="bfloat16")
    assert finding.kind == "at rest"
    assert found({ONE: {"angle": 1.0, "grad_norm": 0.0}}, dtype="float32") == []  # its momentum still moves it


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-6, 1e6), block=st.integers(0, BLOCKS - 1))
def test_the_unit_of_the_weights_and_the_block_do_not_matter(scale, block):
    """All norms and updates times a factor, which tensor has the fault: the same finding."""
    one = f"h.{block}.mlp.up.weight"
    rows, metadata = samples({one: {"update_norm": 3.0}})
    scaled = rows
    for name in ("norm", "update_norm"):
        place = scaled.column_names.index(name)
        scaled = scaled.set_column(place, scaled.schema.field(name), [(scaled[name].to_numpy() * scale)])
    kinds = [finding.subject for finding in diagnose(scaled, metadata=metadata) if finding.kind == "other steps"]
    assert kinds == [f"{one} takes steps unlike its siblings', at the same lr"]


# ---- through watch


class Experts(nn.Module):
    """Four stacked experts, one per input; the last one is never asked."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(0.1 * torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,bij->bj", x, self.up[torch.arange(len(x)) % 3])


def test_watch_splits_stacked_experts_and_names_the_one_without_tokens():
    torch.manual_seed(0)
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    monitor = eq.watch(model, optimizer, every=1)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(12, 8)).square().mean().backward()
        optimizer.step()
    (finding,) = [finding for finding in monitor.findings() if finding.kind.startswith("rows at rest")]
    assert finding.subject == "1 of 4 matrices of up did not turn at any sample"
    assert "[3]" in finding.evidence and "its norm is 0.971 of the first" in finding.evidence  # (1 - 1e-3)^29


def test_watch_tells_of_a_frozen_layer_in_one_block():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"a": b[0], "b": b[2]}) for b in blocks)})
    model.blocks[2].b.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    monitor = eq.watch(model, optimizer, every=1)
    for _ in range(12):
        optimizer.zero_grad()
        x = torch.randn(16, 8)
        for block in model.blocks:
            x = block.b(torch.tanh(block.a(x)))
        x.square().mean().backward()
        optimizer.step()
    (finding,) = [finding for finding in monitor.findings() if finding.kind == "frozen"]
    assert finding.subject == "blocks.2.b.weight is frozen, its 3 siblings are trained"
