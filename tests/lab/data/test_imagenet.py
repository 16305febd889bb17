"""ImageNet from arrays: its labels and files are checked before a network sees them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from equilibria.errors import EquilibriaError
from equilibria.lab.data import imagenet

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3, 6, 5), np.uint8)
LABELS = np.array([1, 0, 2, 1])


def write(folder, **changed: np.ndarray) -> None:
    for part in ("train", "val"):
        arrays = {f"{part}_x": PIXELS, f"{part}_y": LABELS}
        for name, array in arrays.items():
            np.save(folder / f"imagenet_{name}.npy", changed.get(name, array))


@pytest.mark.parametrize("kind", [np.uint8, np.dtype(">i4"), np.int64])
def test_the_arrays_are_read(kind, tmp_path):
    write(tmp_path, train_y=LABELS.astype(kind))
    found = imagenet(tmp_path)
    assert torch.equal(found.train_images, torch.from_numpy(PIXELS))
    assert found.train_labels.tolist() == [1, 0, 2, 1] and found.train_labels.dtype == torch.int64
    assert found.classes == 3 and found.counts == "4 training and 4 test images"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_y": LABELS - 1}, r"train_y\.npy has a label of -1; expected labels of 0 to 999"),
        ({"val_y": LABELS + 998}, r"val_y\.npy has a label of 1000"),
        ({"val_y": LABELS / 2}, r"val_y\.npy has labels of float64 \(4,\)"),
        ({"val_y": np.array("cat")}, r"val_y\.npy has labels of <U3 \(\)"),
        ({"train_y": LABELS[:3]}, r"train_x\.npy has uint8 \(4, 3, 6, 5\) and labels of \(3,\)"),
        ({"train_x": PIXELS / 255}, r"train_x\.npy has float64"),
        ({"val_x": PIXELS[:0], "val_y": LABELS[:0]}, r"val_x\.npy has uint8 \(0, 3, 6, 5\)"),
        ({"val_x": np.array(3, np.uint8)}, r"val_x\.npy has uint8 \(\)"),
    ],
)
def test_bad_arrays(changed, message, tmp_path):
    write(tmp_path, **changed)
    with pytest.raises(EquilibriaError, match=message):
        imagenet(tmp_path)


@pytest.mark.parametrize("name", ["imagenet_train_x.npy", "imagenet_val_y.npy"])
def test_what_is_no_array(name, tmp_path):
    write(tmp_path)
    archive = io.BytesIO()
    np.savez(archive, x=PIXELS)
    for content in (archive.getvalue(), archive.getvalue()[:-100], b"", b"text"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(EquilibriaError, match=rf"{name} cannot be read .*; expected an array from numpy\.save"):
            imagenet(tmp_path)
