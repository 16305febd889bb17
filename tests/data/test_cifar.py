"""CIFAR-10 in all the forms in which people have it: the same tensors from each, and clear words where it is not."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch
from official_files import (
    binary_files,
    python2_pickle,
    python_files,
    some_batches,
    write_archive,
    write_npz,
)

from equilibria.data import cifar, cifar10, cifar10_2k
from equilibria.data.cifar_formats import read_batch
from equilibria.errors import EquilibriaError

BATCHES = some_batches()


def write(form: str, folder) -> None:
    files = python_files(BATCHES)
    if form == "python archive":
        write_archive(folder / "cifar-10-python.tar.gz", files, folder="cifar-10-batches-py")
    elif form == "binary archive":
        write_archive(folder / "cifar-10-binary.tar.gz", binary_files(BATCHES), folder="cifar-10-batches-bin")
    elif form == "npz":
        write_npz(folder, BATCHES)
    else:
        inner = folder / "cifar-10-batches-py" if form == "unpacked" else folder
        inner.mkdir(exist_ok=True)
        for name, content in files.items():
            (inner / name).write_bytes(content)


@pytest.mark.parametrize("form", ["python archive", "binary archive", "unpacked", "the unpacked folder itself", "npz"])
def test_every_form_gives_the_same_tensors(form, tmp_path):
    write(form, tmp_path)
    found = cifar10(tmp_path, verify=False)
    images, labels = (np.concatenate([BATCHES[f"data_batch_{n}"][part] for n in range(1, 6)]) for part in (0, 1))
    assert torch.equal(found.train_images, torch.from_numpy(images))
    assert torch.equal(found.train_labels, torch.from_numpy(labels).long())
    assert torch.equal(found.test_images, torch.from_numpy(BATCHES["test_batch"][0]))
    assert found.test_labels.tolist() == BATCHES["test_batch"][1].tolist()
    assert (found.train_images.dtype, found.train_labels.dtype) == (torch.uint8, torch.int64)
    assert found.class_names[3] == "cat" and str(tmp_path.parent) not in found.source


@pytest.mark.parametrize("form", ["python archive", "binary archive", "unpacked"])
def test_official_files_are_verified(form, tmp_path, monkeypatch):
    """A stand-in is refused, with both checksums; with its own checksums it passes; one changed bit does not."""
    write(form, tmp_path)
    with pytest.raises(
        EquilibriaError, match=r"(data_batch_1|binary.tar.gz) has MD5 [0-9a-f]{32}; expected [0-9a-f]{32}"
    ):
        cifar10(tmp_path)
    known = {name: hashlib.md5(content).hexdigest() for name, content in python_files(BATCHES).items()}
    monkeypatch.setattr(cifar, "PYTHON_MD5", known)
    if form == "binary archive":
        archive = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
        monkeypatch.setattr(cifar, "BINARY_MD5", hashlib.md5(archive).hexdigest())
    assert len(cifar10(tmp_path).train_images) == 100
    if form == "unpacked":
        file = tmp_path / "cifar-10-batches-py" / "test_batch"
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        with pytest.raises(EquilibriaError, match=f"test_batch has MD5 .*; expected {known['test_batch']}"):
            cifar10(tmp_path)


def test_fewer_npz_files_are_fewer_images_but_a_gap_is_refused(tmp_path):
    write_npz(tmp_path, BATCHES, numbers=(1, 2))
    found = cifar10(tmp_path)
    assert len(found.train_images) == 40 and found.source == "cifar10_train_1.npz, cifar10_train_2.npz"
    write_npz(tmp_path, BATCHES, numbers=(4,))
    with pytest.raises(EquilibriaError, match=r"has .*train_2.npz, cifar10_train_4.npz; expected no gap"):
        cifar10(tmp_path)


def test_2k_is_the_first_200_of_each_class_in_order(tmp_path):
    batches = some_batches(500, seed=1)
    write_npz(tmp_path, batches)
    found = cifar10_2k(tmp_path)
    images, labels = (np.concatenate([batches[f"data_batch_{n}"][part] for n in range(1, 6)]) for part in (0, 1))
    seen, taken = [0] * 10, []
    for index, label in enumerate(labels):
        if seen[label] < 200:
            taken.append(index)
        seen[label] += 1
    assert len(taken) == 2000
    assert torch.equal(found.train_images, torch.from_numpy(images[taken]))
    assert found.train_labels.tolist() == labels[taken].tolist()
    assert len(found.test_images) == 500

    for number in range(1, 6):
        (tmp_path / f"cifar10_train_{number}.npz").unlink()
    np.savez(tmp_path / "cifar10_2k.npz", x=images[taken], y=labels[taken], index=taken)
    again = cifar10_2k(tmp_path, size=16, classes=(5, 2))
    assert torch.equal(again.train_images, found.select_classes((5, 2)).pooled(16).train_images)
    with pytest.raises(EquilibriaError, match="was not found"):  # 2,000 images are not CIFAR-10
        cifar10(tmp_path)


def test_what_is_missing_is_said_once_with_where_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(EquilibriaError) as caught:
        cifar10(tmp_path)
    for part in (str(tmp_path), "cifar-10-python.tar.gz", "cs.toronto.edu", "EQUILIBRIA_DATA", "folder="):
        assert part in str(caught.value)
    assert "cifar10_2k.npz" not in str(caught.value)
    with pytest.raises(EquilibriaError, match=r"looked for .* or cifar10_2k\.npz with cifar10_test\.npz"):
        cifar10_2k(tmp_path)
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(EquilibriaError, match="elsewhere"):
        cifar10()
    monkeypatch.delenv("EQUILIBRIA_DATA")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(EquilibriaError, match=r"home/\.cache/equilibria/data"):
        cifar10()


def test_the_environment_variable_is_used_and_an_argument_wins(tmp_path, monkeypatch):
    write_npz(tmp_path, BATCHES)
    monkeypatch.setenv("EQUILIBRIA_DATA", str(tmp_path))
    assert len(cifar10().test_images) == 20
    with pytest.raises(EquilibriaError, match="was not found"):
        cifar10(tmp_path / "other")


def test_incomplete_and_damaged_files(tmp_path):
    write("unpacked", tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(EquilibriaError, match="has data_batch_1 but not data_batch_4"):
        cifar10(tmp_path, verify=False)
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").unlink()
    write("python archive", tmp_path)
    archive = tmp_path / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-3000])
    with pytest.raises(EquilibriaError, match="cannot be read"):
        cifar10(tmp_path, verify=False)
    write_archive(archive, {"data_batch_1": b""}, folder="x")
    with pytest.raises(EquilibriaError, match="has no data_batch_2"):
        cifar10(tmp_path, verify=False)
    with pytest.raises(EquilibriaError, match="is a file; expected the folder"):
        cifar10(archive)


def test_bad_npz(tmp_path):
    write_npz(tmp_path, BATCHES)
    np.savez(tmp_path / "cifar10_test.npz", x=np.zeros((2, 32, 32, 3), np.uint8), y=np.zeros(2))
    with pytest.raises(EquilibriaError, match=r"x of uint8 \(2, 32, 32, 3\)"):
        cifar10(tmp_path)
    (tmp_path / "cifar10_test.npz").unlink()
    with pytest.raises(EquilibriaError, match=r"no cifar10_test\.npz"):
        cifar10(tmp_path)
    np.savez(tmp_path / "cifar10_test.npz", x=np.zeros((1, 3, 32, 32), np.uint8), y=np.array([10], np.uint8))
    with pytest.raises(EquilibriaError, match="label of 10"):
        cifar10(tmp_path)


@pytest.mark.parametrize("by_columns", [False, True])
def test_pickles_of_python_2_in_either_order(by_columns):
    images, labels = BATCHES["data_batch_1"]
    found = read_batch(python2_pickle(images, labels, by_columns=by_columns), "file")
    assert np.array_equal(found[0], images) and np.array_equal(found[1], labels)
    reference = pickle.loads(python2_pickle(images, labels, by_columns=by_columns), encoding="bytes")  # our own bytes
    assert np.array_equal(reference[b"data"].reshape(images.shape), images)


@pytest.mark.parametrize("protocol", [2, 4])
def test_pickles_of_python_3(protocol):
    images, labels = BATCHES["data_batch_1"]
    content = pickle.dumps({b"data": images.reshape(len(images), -1), b"labels": labels.tolist()}, protocol)
    assert np.array_equal(read_batch(content, "file")[0], images)


def test_a_pickle_runs_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    with pytest.raises(EquilibriaError, match=r"file is no batch .* asks for (_?io|builtins)\.open"):
        read_batch(pickle.dumps({b"data": Evil(), b"labels": []}, 2), "file")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", b"text", pickle.dumps({b"data": 1, b"labels": [1]})])
def test_what_is_no_batch(content):
    with pytest.raises(EquilibriaError, match="file is no batch"):
        read_batch(content, "file")
