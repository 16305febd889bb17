"""ImageNet from arrays on disk, of which only the images of a batch are read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.lab.data.files import data_folder, label_array, missing
from equilibria.lab.data.image_set import ImageSet

PAGE = "https://www.image-net.org"
_CLASSES = 1000
_IMAGES, _LABELS = "imagenet_{}_x.npy", "imagenet_{}_y.npy"


def imagenet(folder: str | os.PathLike[str] | None = None) -> ImageSet:
    """ImageNet as four files of numpy: ``imagenet_train_x.npy``, ``imagenet_train_y.npy``, and the same for ``val``.

    x are pixels (count, 3, height, width), uint8, and y labels of 0 to 999, whole numbers; both as `numpy.save` writes
    them, made from the official images with any tool: shorter side to 256, then the middle 256x256 for training, of
    which batches take windows of random size, and the middle 224x224 for val. The pixels stay on disk.

    Args:
        folder: with the files; default: the environment variable EQUILIBRIA_DATA, else ~/.cache/equilibria/data.

    Returns:
        The images, uint8; the validation images are its test images.

    Raises:
        EquilibriaError: a file is missing (the message says how to make it), or has another form.
    """
    path = data_folder(folder)
    names = [form.format(part) for part in ("train", "val") for form in (_IMAGES, _LABELS)]
    if not all((path / name).exists() for name in names):
        raise missing(
            "ImageNet",
            path,
            looked_for=", ".join(names),
            get=f"the images from {PAGE} and make uint8 arrays of 3x256x256 pixels (val: 3x224x224) and of labels with "
            "numpy.save",
        )
    (train, labels), (val, val_labels) = (_pair(path, part) for part in ("train", "val"))
    count = int(max(labels.max(), val_labels.max())) + 1
    return ImageSet(train, labels, val, val_labels, tuple(map(str, range(count))), ", ".join(names))


def _pair(path: Path, part: str) -> tuple[Tensor, Tensor]:
    images = _array(path / _IMAGES.format(part))
    labels = label_array(_array(path / _LABELS.format(part)), file=path / _LABELS.format(part), classes=_CLASSES)
    right_form = images.dtype == np.uint8 and images.ndim == 4 and images.shape[1] == 3
    if not right_form or not labels.size or labels.shape != images.shape[:1]:
        raise EquilibriaError(
            f"{path / _IMAGES.format(part)} has {images.dtype} {images.shape} and labels of {labels.shape}; expected "
            "uint8 (count, 3, height, width) and (count,)"
        )
    return torch.from_numpy(images), torch.from_numpy(labels)


def _array(file: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(file, mode="c")  # copy on write: torch wants a writable array
    except (ValueError, OSError) as error:
        raise EquilibriaError(f"{file} cannot be read ({error}); expected an array from numpy.save") from None
