"""ImageNet from its pictures or from arrays on disk, of which only the images of a batch are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.lab.data.files import data_folder, label_array, missing
from equilibria.lab.data.image_set import ImageSet
from equilibria.lab.data.pictures import Pictures, class_folders

PAGE = "https://www.image-net.org"
_CLASSES = 1000
_IMAGES, _LABELS = "imagenet_{}_x.npy", "imagenet_{}_y.npy"
_PICTURES = "imagenet"
_DECODED_AT_ONCE = 1000


def imagenet(folder: str | os.PathLike[str] | None = None) -> ImageSet:
    """ImageNet as its official pictures, ``imagenet/train/CLASS/*.JPEG`` and ``imagenet/val/CLASS/*.JPEG``.

    Training pictures stay on disk; batches take windows of random size from the whole picture, or else its middle. The
    validation pictures (shorter side to 256, the middle 224x224) are decoded once, into ``imagenet_val_x.npy``, 7.5 GB.

    In place of the pictures there may be four files of numpy: ``imagenet_train_x.npy``, ``imagenet_train_y.npy``, and
    the same for ``val``: pixels (count, 3, height, width), uint8, and labels of 0 to 999 as `numpy.save` writes them.

    Args:
        folder: with the files; default: the environment variable EQUILIBRIA_DATA, else ~/.cache/equilibria/data.

    Returns:
        The images, uint8; the validation images are its test images.

    Raises:
        EquilibriaError: a file is missing (the message says how to make it), or has another form.
    """
    path = data_folder(folder)
    if (path / _PICTURES / "train").is_dir() and (path / _PICTURES / "val").is_dir():
        return _pictures(path)
    names = [form.format(part) for part in ("train", "val") for form in (_IMAGES, _LABELS)]
    if not all((path / name).exists() for name in names):
        raise missing(
            "ImageNet",
            path,
            looked_for=f"{_PICTURES}/train, {_PICTURES}/val, or {', '.join(names)}",
            get=f"the pictures from {PAGE}, in a folder per class below {_PICTURES}/train and {_PICTURES}/val, or make "
            "uint8 arrays of 3x256x256 pixels (val: 3x224x224) and of labels with numpy.save",
        )
    (train, labels), (val, val_labels) = (_pair(path, part) for part in ("train", "val"))
    count = int(max(labels.max(), val_labels.max())) + 1
    return ImageSet(train, labels, val, val_labels, tuple(map(str, range(count))), ", ".join(names))


def _pictures(path: Path) -> ImageSet:
    train, labels, names = class_folders(path / _PICTURES / "train")
    val, val_labels, val_names = class_folders(path / _PICTURES / "val")
    if names != val_names:
        raise EquilibriaError(
            f"{path / _PICTURES} has {len(names)} classes in train and {len(val_names)} in val; expected the same names"
        )
    file = path / _IMAGES.format("val")
    if not file.exists():
        _decode(val, file)
    pixels = _array(file)
    if pixels.shape != tuple(val.shape):
        raise EquilibriaError(f"{file} has {pixels.shape}; expected {tuple(val.shape)}: remove it to decode it again")
    return ImageSet(cast(Tensor, train), labels, torch.from_numpy(pixels), val_labels, names, f"{_PICTURES}/*.JPEG")


def _decode(pictures: Pictures, file: Path) -> None:
    """Write the middles of pictures as an array; a kill leaves no file of that name."""
    partial = file.with_name(f".{file.name}-{os.getpid()}.tmp")
    array = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=tuple(pictures.shape))
    for first in range(0, len(pictures), _DECODED_AT_ONCE):
        array[first : first + _DECODED_AT_ONCE] = pictures[first : first + _DECODED_AT_ONCE].numpy()
    array.flush()
    partial.replace(file)


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
