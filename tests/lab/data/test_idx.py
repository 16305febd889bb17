"""MNIST and Fashion-MNIST from idx files that the tests write."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from tests.helpers.official_files import IDX, write_idx

from equilibria.errors import EquilibriaError
from equilibria.lab.data import fashion_mnist, mnist

RNG = np.random.default_rng(0)
ARRAYS = [
    RNG.integers(0, 256, (30, 28, 28), np.uint8),
    RNG.permutation(30).astype(np.uint8) % 10,
    RNG.integers(0, 256, (10, 28, 28), np.uint8),
    RNG.permutation(10).astype(np.uint8),
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("where", ["", "mnist", "MNIST/raw"])
def test_the_arrays_are_read_wherever_they_are(where, compressed, tmp_path):
    write_idx(tmp_path / where, ARRAYS, compressed=compressed)
    found = mnist(tmp_path, verify=False)
    assert torch.equal(found.train_images, torch.from_numpy(ARRAYS[0]).unsqueeze(1))
    assert found.train_labels.tolist() == ARRAYS[1].tolist()
    assert torch.equal(found.test_images, torch.from_numpy(ARRAYS[2]).unsqueeze(1))
    assert found.test_labels.tolist() == ARRAYS[3].tolist()
    assert mnist(tmp_path, verify=False, size=14, classes=(3, 4)).train_images.shape == (6, 1, 14, 14)


def test_the_two_sets_can_share_a_folder_and_are_kept_apart(tmp_path):
    write_idx(tmp_path / "mnist", ARRAYS, compressed=True)
    write_idx(tmp_path / "fashion-mnist", [255 - ARRAYS[0], *ARRAYS[1:]], compressed=True)
    digits, clothes = mnist(tmp_path, verify=False), fashion_mnist(tmp_path, verify=False)
    assert torch.equal(255 - digits.train_images, clothes.train_images)
    assert clothes.class_names[9] == "ankle boot"
    with pytest.raises(EquilibriaError, match=r"train-images-idx3-ubyte\.gz has MD5 .*; expected f4a8712d"):
        fashion_mnist(tmp_path)


def test_missing_files_are_reported_once_with_where_to_get_them(tmp_path):
    for load, page in ((mnist, "yann.lecun.com"), (fashion_mnist, "zalandoresearch")):
        with pytest.raises(EquilibriaError) as caught:
            load(tmp_path)
        for part in (str(tmp_path), page, IDX[2], "EQUILIBRIA_DATA"):
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IDX[0], b"\x00\x00\x08", "begins with 000008; expected an idx file"),
        (IDX[0], b"\x1f\x8b\x08\x03" + bytes(12), "begins with 1f8b0803"),
        (IDX[1], b"\x00\x00\x08\x01\x00\x00\x00\x05" + bytes(4), "has 4 bytes of data; expected 5"),
        (IDX[1], b"\x00\x00\x08\x01\x00\x00\x00\x05" + bytes(5), r"images of \(30, 28, 28\) and labels of \(5,\)"),
        (IDX[3], b"\x00\x00\x08\x01\x00\x00\x00\x0a" + bytes(9) + b"\x0b", "labels of 0 to 9"),
        (IDX[0] + ".gz", gzip.compress(bytes(1000), mtime=0)[:-9], "cannot be read"),
    ],
    ids=["too short", "not idx", "data missing", "other count", "unknown label", "gzip cut off"],
)
def test_damaged_files(name, content, message, tmp_path):
    write_idx(tmp_path, ARRAYS, compressed=False)
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EquilibriaError, match=message):
        mnist(tmp_path, verify=False)
