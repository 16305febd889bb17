"""Checkpoints of a real training: norms, angles between them, and files that are not what they seem."""

from __future__ import annotations

import io
import json
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.importing import _checkpoints
from equilibria.importing._checkpoints import read_checkpoints

MATRICES = ["0.weight", "2.weight", "4.weight"]


def matrices(_name, shape):
    return len(shape) >= 2


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ck").mkdir()
    return tmp_path / "ck"


def save(folder, states, kind):
    """The states in one of the forms that trainers write."""
    for step, state in states.items():
        if kind == "torch":
            torch.save(state, folder / f"step-{step}.pt")
        elif kind == "dict":
            beside = {"state": {0: {"exp_avg": torch.ones(3, 3)}}}
            torch.save({"optimizer": beside, "model": state}, folder / f"{step}.ckpt")
        elif kind == "prefixes":
            prefix = "_orig_mod.module." if step else "module."
            wrapped = {f"{prefix}{name}": tensor for name, tensor in state.items()}
            torch.save({"state_dict": wrapped}, folder / f"model_{step:06}.pth")
        elif kind == "legacy":
            torch.save(state, folder / f"{step}.bin", _use_new_zipfile_serialization=False)
        elif kind == "distcp":
            states = {f"{name}.exp_avg": tensor for name, tensor in state.items()}
            saved = {"model": state, "optim": {"state": states}, "step": step}
            dcp.save(saved, checkpoint_id=folder / f"step-{step}", no_dist=True)
        elif kind == "safetensors":
            save_file(state, folder / f"step-{step}.safetensors")
        else:  # in two parts, beside what a trainer saves too
            sub = folder / f"checkpoint-{step}"
            sub.mkdir()
            names = sorted(state)
            save_file({name: state[name] for name in names[:2]}, sub / "model-00001-of-00002.safetensors")
            save_file({name: state[name] for name in names[2:]}, sub / "model-00002-of-00002.safetensors")
            torch.save({"lr": 0.1}, sub / "optimizer.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["torch", "dict", "prefixes", "legacy", "distcp", "safetensors", "parts"])
def test_norms_are_the_watched_ones_and_angles_those_of_the_vectors(kind, training, folder, tmp_path):
    save(folder, training.states, kind)
    run = eq.import_run(folder, log_dir=tmp_path / "run")
    assert list(run.params) == MATRICES
    watched = {(row["step"], row["param"]): row["norm"] for row in training.watched.samples().to_pylist()}
    for row in run.samples().to_pylist():
        assert row["norm"] == pytest.approx(watched[row["step"], row["param"]], rel=1e-6)
        assert row["angle"] is None
        assert row["update_norm"] is None
    rows = run.diffusion().to_pylist()
    assert len(rows) == len(MATRICES) * (len(training.states) - 1)
    for row in rows:
        one, other = (training.states[row["step"] + more] for more in (0, row["distance"]))
        one, other = (state[row["param"]].double().flatten() for state in (one, other))
        cosine = float(one @ other / (one.norm() * other.norm()))
        assert np.exp(-row["turned"]) == pytest.approx(cosine, rel=1e-12)


def test_blocks_of_a_tensor_give_what_the_whole_gives(training, folder, monkeypatch):
    save(folder, training.states, "safetensors")
    whole = read_checkpoints(folder, matrices)
    monkeypatch.setattr(_checkpoints, "_BLOCK", 7)
    parts = read_checkpoints(folder, matrices)
    for name, weight in whole.weights.items():
        for one, other in zip(weight.steps, parts.weights[name].steps, strict=True):
            assert one.norm == pytest.approx(other.norm, rel=1e-14)
            assert one.angle == (None if other.angle is None else pytest.approx(other.angle, rel=1e-12))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_every_floating_point_type_is_read(dtype, kind, folder):
    torch.manual_seed(1)
    states = {step: {"w": torch.randn(5, 6).to(dtype), "count": torch.arange(6).reshape(2, 3)} for step in (0, 10)}
    save(folder, states, kind)
    found = read_checkpoints(folder, matrices)
    (weight,) = found.weights.values()
    one, other = (state["w"].double().flatten() for state in states.values())
    assert weight.dtype == str(dtype).removeprefix("torch.")
    assert weight.steps[1].norm == pytest.approx(float(other.norm()), rel=1e-12)
    assert np.cos(weight.steps[1].angle) == pytest.approx(float(one @ other / one.norm() / other.norm()), rel=1e-12)


def test_a_small_angle_keeps_its_digits_and_one_below_rounding_is_left_out(folder, tmp_path):
    one = torch.randn(40, 40, dtype=torch.float64)
    aside = torch.randn(40, 40, dtype=torch.float64)
    aside -= one * (one * aside).sum() / (one * one).sum()
    aside *= one.norm() / aside.norm()
    save(folder, {0: {"w": one}, 7: {"w": one + 1e-9 * aside}}, "torch")
    (row,) = eq.import_run(folder, log_dir=tmp_path / "a").diffusion().to_pylist()
    assert 2 * np.arcsin(np.sqrt(-np.expm1(-row["turned"]) / 2)) == pytest.approx(1e-9, rel=1e-6)
    save(folder, {0: {"w": one.bfloat16()}, 7: {"w": (one + 1e-3 * aside).bfloat16()}}, "torch")
    run = eq.import_run(folder, log_dir=tmp_path / "b")
    assert not run.diffusion().num_rows
    assert any("too small for the stored digits" in note for note in run.notes)


def test_a_right_angle_is_null(folder, tmp_path):
    save(folder, {0: {"w": torch.eye(2)}, 5: {"w": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}}, "torch")
    assert eq.import_run(folder, log_dir=tmp_path / "run").diffusion().to_pylist() == [
        {"step": 0, "param": "w", "distance": 5, "turned": None}
    ]


def test_what_checkpoints_cannot_tell_is_said(training, folder, tmp_path):
    save(folder, training.states, "safetensors")
    settings = {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "invariant": ["2.weight"]}
    run = eq.import_run(folder, log_dir=tmp_path / "run", **settings)
    assert "later steps pull back, so that it cannot be worked out" in run.notes[0]
    assert any("lr and weight decay count as constant" in note for note in run.notes)
    text = str(run.table())
    assert "No angle was measured" in text
    assert "turned: between the last two checkpoints, 50 steps apart" in " ".join(text.split())
    page = run.report(tmp_path / "a.html").read_text()
    assert "Between checkpoints" in page
    assert run.findings() == ()
    with pytest.raises(EquilibriaError, match="no step whose angle was measured"):
        eq.forecast(run, schedule=1e-3, steps=800)


def test_the_law_of_invariant_weights_gives_equilibrium_and_norm(folder, tmp_path):
    """A random walk under AdamW: the norms of checkpoints follow the recursion from the first one."""
    torch.manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    states = {}
    for step in range(401):
        if step % 100 == 0:
            states[step] = {"w": weight.detach().clone()}
        gradient = torch.randn(64, 64)
        flat = weight.detach()
        weight.grad = (gradient - flat * (flat * gradient).sum() / (flat * flat).sum()) / flat.norm()
        optimizer.step()
    save(folder, states, "torch")
    run = eq.import_run(folder, log_dir=tmp_path / "run", optimizer="adamw", lr=1e-2, weight_decay=0.1, invariant=["w"])
    rows = run.samples().to_pylist()
    for row in rows:
        assert row["norm"] == pytest.approx(row["norm_predicted"], rel=0.01)
        assert row["angle_equilibrium"] == pytest.approx(np.sqrt(2 * 1e-2 * 0.1 * 0.1 / 1.9), rel=0.01)
        assert row["state"] is None
    assert rows[0]["norm_equilibrium"] == pytest.approx(64 * np.sqrt(1e-2 / 0.2), rel=0.01)


def test_the_equilibrium_angle_of_sgd_needs_no_gradient(training, folder, tmp_path):
    save(folder, training.states, "torch")
    rule = eq.theory.SGD(lr=0.1, weight_decay=5e-3, momentum=0.9)
    run = eq.import_run(folder, log_dir=tmp_path / "run", optimizer=rule, invariant=["2.weight"])
    rows = [row for row in run.samples().to_pylist() if row["param"] == "2.weight"]
    assert {round(row["angle_equilibrium"], 6) for row in rows} == {round(rule.equilibrium().angle, 6)}
    assert {row["norm_predicted"] for row in rows} == {None}


def test_checkpoints_beside_a_log_of_the_trainer_are_what_is_imported(training, folder, tmp_path):
    """As in the output folder of a Hugging Face trainer."""
    save(folder, training.states, "parts")
    (folder / "runs" / "host").mkdir(parents=True)
    (folder / "runs" / "host" / "events.out.tfevents.1.host").write_bytes(b"")
    run = eq.import_run(folder, log_dir=tmp_path / "run")
    assert run.metadata["imported"]["kind"] == "checkpoints"


def test_tied_tensors_count_once(folder, tmp_path):
    for step in (0, 5):
        shared = torch.randn(4, 4)
        torch.save({"wte.weight": shared, "lm_head.weight": shared}, folder / f"{step}.pt")
    run = eq.import_run(folder, log_dir=tmp_path / "run")
    assert run.params == ("wte.weight",)
    assert run.metadata["params"][0]["aliases"] == ["lm_head.weight"]


def test_tensors_of_another_shape_or_name_are_left_out_and_said(folder, tmp_path):
    torch.save({"a": torch.randn(3, 3), "b": torch.randn(3, 3), "c": torch.randn(3, 3)}, folder / "0.pt")
    torch.save({"a": torch.randn(3, 3), "b": torch.randn(3, 4), "d": torch.randn(3, 3)}, folder / "9.pt")
    run = eq.import_run(folder, log_dir=tmp_path / "run")
    assert run.params == ("a",)
    assert "b is differently shaped, and left out" in run.notes
    assert "c, d are missing from some checkpoints, and left out" in run.notes


# ---- bad input


def refuse(folder, tmp_path, message, **arguments):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(EquilibriaError, match=message):
        eq.import_run(folder, log_dir=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def described(names, module, tensor):
    """Metadata of torch.distributed.checkpoint with one tensor in two pieces, and the file with both."""
    properties = names.TensorProperties(dtype=tensor.dtype)
    chunks = [names.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    data, places = b"", {}
    for chunk in chunks:
        buffer = io.BytesIO()
        torch.save(tensor[chunk.offsets[0] :][:2].clone(), buffer)
        places[names.MetadataIndex("a.weight", chunk.offsets)] = module._StorageInfo(
            "0.distcp", len(data), buffer.tell()
        )
        data += buffer.getvalue()
    entry = names.TensorStorageMetadata(properties, tensor.shape, chunks)
    return names.Metadata({"a.weight": entry}, storage_data=places), data


def test_pieces_of_several_processes_are_put_together(folder):
    tensors = {step: torch.randn(4, 3) for step in (0, 10)}
    for step, tensor in tensors.items():
        metadata, data = described(dcp.metadata, dcp.filesystem, tensor)
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / ".metadata").write_bytes(pickle.dumps(metadata))
        (folder / f"step-{step}" / "0.distcp").write_bytes(data)
    steps = read_checkpoints(folder, matrices).weights["a.weight"].steps
    assert [each.norm for each in steps] == pytest.approx([each.double().norm().item() for each in tensors.values()])
    (folder / "step-10" / "0.distcp").write_bytes(data[:-400])
    with pytest.raises(EquilibriaError, match=r"cannot read .*0\.distcp"):
        read_checkpoints(folder, matrices)


class Harmful:
    def __reduce__(self):
        return print, ("this must not be printed",)


@pytest.mark.parametrize("content", [pickle.dumps(Harmful()), b"", b"no pickle", pickle.dumps({"a": 1})])
def test_metadata_that_are_no_description_run_no_code(content, folder, capsys):
    for step in (0, 10):
        (folder / f"step-{step}").mkdir()
        (folder / f"step-{step}" / ".metadata").write_bytes(content)
    with pytest.raises(EquilibriaError, match=r"as the metadata of torch\.distributed\.checkpoint"):
        read_checkpoints(folder, matrices)
    assert capsys.readouterr().out == ""


def test_an_optimizers_state_is_no_model(folder):
    for step in (0, 10):
        state = {"0.weight": {"exp_avg": torch.randn(3, 3)}}
        torch.save({"state": state, "param_groups": []}, folder / f"step-{step}.pt")
    with pytest.raises(EquilibriaError, match="no state dict of a model"):
        read_checkpoints(folder, matrices)


def test_a_checkpoint_that_is_not_finite_is_said(folder, tmp_path):
    for step in (0, 10, 20):
        torch.save({"a": torch.full((2, 2), float("nan") if step == 10 else 1.0)}, folder / f"step-{step}.pt")
    notes = eq.import_run(folder, log_dir=tmp_path / "run").notes
    assert any("not finite in some checkpoints" in note and "a at step 10" in note for note in notes)
    assert not any("too small" in note for note in notes)


def test_one_checkpoint_is_too_few(folder, tmp_path):
    torch.save({"a": torch.randn(3, 3)}, folder / "0.pt")
    refuse(folder, tmp_path, "with 1 checkpoint; expected two or more")


def test_nothing_in_common(folder, tmp_path):
    torch.save({"a": torch.randn(3, 3)}, folder / "0.pt")
    torch.save({"b": torch.randn(3, 3)}, folder / "1.pt")
    refuse(folder, tmp_path, "without a common weight of one shape.*the first has a, the last b")


def test_a_name_without_a_step_and_a_step_twice(folder, tmp_path):
    torch.save({"a": torch.randn(3, 3)}, folder / "last.pt")
    torch.save({"a": torch.randn(3, 3)}, folder / "step-1.pt")
    refuse(folder, tmp_path, "without a step in its name")
    (folder / "last.pt").rename(folder / "again-1.pt")
    refuse(folder, tmp_path, "both of step 1")


class NotATensor:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (NotATensor(), "it holds more than tensors, and loading it could run code"),
        ([1, 2, 3], "which holds no state dict"),
        ({"epoch": 3}, "which holds no state dict"),
    ],
)
def test_a_pickle_that_is_no_state_dict(content, message, folder, tmp_path):
    for step in (0, 1):
        torch.save(content, folder / f"{step}.pt")
    refuse(folder, tmp_path, message)


@pytest.mark.parametrize("cut", [0, 5, 40, -3])
def test_a_truncated_safetensors_file(cut, folder, tmp_path):
    for step in (0, 1):
        save_file({"a": torch.randn(3, 3)}, folder / f"{step}.safetensors")
    whole = (folder / "1.safetensors").read_bytes()
    (folder / "1.safetensors").write_bytes(whole[:cut])
    refuse(folder, tmp_path, "as safetensors")


@pytest.mark.parametrize("header", [
    [1, 2],
    {"a": {"dtype": "F32", "shape": [3, 3], "data_offsets": [0, 99999]}},
    {"a": {"dtype": "F32", "shape": [3, 3], "data_offsets": [-8, 28]}},
    {"a": {"dtype": "F32", "shape": [-3, -3], "data_offsets": [0, 36]}},
    {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 36]}},
    {"a": {"dtype": "F32"}},
    {"a": 3},
])  # fmt: skip
def test_a_safetensors_header_that_is_wrong(header, folder, tmp_path):
    text = json.dumps(header).encode()
    for step in (0, 1):
        (folder / f"{step}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(36))
    refuse(folder, tmp_path, "as safetensors")


def test_a_torch_file_that_is_cut_off(folder, tmp_path):
    for step in (0, 1):
        torch.save({"a": torch.randn(30, 30)}, folder / f"{step}.pt")
    (folder / "1.pt").write_bytes((folder / "1.pt").read_bytes()[:900])
    refuse(folder, tmp_path, "cannot read .*1.pt")


def test_metrics_cannot_be_the_settings_of_checkpoints(training, folder, tmp_path):
    save(folder, training.states, "torch")
    refuse(folder, tmp_path, "checkpoints have no metrics", lr="optim/learning_rate")
    refuse(folder, tmp_path, "without lr", optimizer="adamw", weight_decay=0.1)
    refuse(folder, tmp_path, r"which matches no parameter; there are: 0\.weight", select=["conv*"])
