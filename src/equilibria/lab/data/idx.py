"""MNIST and Fashion-MNIST from their idx files, compressed or not."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from equilibria.errors import EquilibriaError
from equilibria.lab.data.files import data_folder, missing, verify_md5
from equilibria.lab.data.image_set import ImageSet

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A data set of these files.

    Attributes:
        name: what people call it.
        page: the official one.
        folders: below the data folder, where its files may be; they may also be right in it.
        class_names: in the order of the labels.
        md5: of the files, uncompressed, in the order of `_FILES`: a file that was compressed again is still the same.
    """

    name: str
    page: str
    folders: tuple[str, ...]
    class_names: tuple[str, ...]
    md5: tuple[str, ...]


MNIST = _Kind(
    "MNIST",
    "http://yann.lecun.com/exdb/mnist/",
    ("mnist", "MNIST/raw"),
    tuple("0123456789"),
    (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
)
FASHION_MNIST = _Kind(
    "Fashion-MNIST",
    "https://github.com/zalandoresearch/fashion-mnist",
    ("fashion-mnist", "FashionMNIST/raw"),
    ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
)


def mnist(
    folder: str | os.PathLike[str] | None = None,
    *,
    size: int = 28,
    classes: Sequence[int | str] | None = None,
    verify: bool = True,
) -> ImageSet:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits.

    It is read from ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and
    ``t10k-labels-idx1-ubyte``, each with or without ``.gz``, in the folder's ``mnist`` or ``MNIST/raw`` or right in it.

    Args:
        folder: where the files are; default: the environment variable EQUILIBRIA_DATA, else ~/.cache/equilibria/data.
        size: height and width: 28, or smaller by average pooling (14, 7).
        classes: labels or names of the classes to keep, renumbered in this order; default: all.
        verify: whether the files, uncompressed, must have their official MD5; False for data of your own in their
            format.

    Returns:
        The images of one channel, uint8 (float32 where pooled); `ImageSet.standardised` makes them ready for a network.

    Raises:
        EquilibriaError: it is not there (the message says where to get it), damaged, or not the official one.
    """
    return _load(MNIST, folder, size, classes, verify=verify)


def fashion_mnist(
    folder: str | os.PathLike[str] | None = None,
    *,
    size: int = 28,
    classes: Sequence[int | str] | None = None,
    verify: bool = True,
) -> ImageSet:
    """Fashion-MNIST: 60,000 training and 10,000 test images of ten kinds of clothes.

    Its files have the names of MNIST's, in the folder's ``fashion-mnist`` or ``FashionMNIST/raw`` or right in it.
    Arguments and errors are those of `mnist`.
    """
    return _load(FASHION_MNIST, folder, size, classes, verify=verify)


def _load(
    kind: _Kind, folder: str | os.PathLike[str] | None, size: int, classes: Sequence[int | str] | None, *, verify: bool
) -> ImageSet:
    files = _find(kind, data_folder(folder))
    arrays = []
    for name, expected in zip(_FILES, kind.md5, strict=True):
        content = _content(files[name])
        if verify:
            verify_md5(content, expected, file=files[name])
        arrays.append(_parse(content, files[name]))
    images = _image_set(arrays, kind, files)
    return (images if classes is None else images.select_classes(classes)).pooled(size)


def _find(kind: _Kind, place: Path) -> dict[str, Path]:
    for folder in [*(place / name for name in kind.folders), place]:
        plain = {name: folder / name for name in _FILES}
        files = {name: path if path.exists() else path.with_name(f"{name}.gz") for name, path in plain.items()}
        if all(path.exists() for path in files.values()):
            return files
    raise missing(
        kind.name,
        place,
        looked_for=f"{', '.join(_FILES)}, with or without .gz, in {', '.join(kind.folders)} and right there",
        get=f"these four files from {kind.page}",
    )


def _content(file: Path) -> bytes:
    content = file.read_bytes()
    if file.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise EquilibriaError(f"{file} cannot be read ({error}); expected a whole gzip file: get it again") from None


def _parse(content: bytes, file: Path) -> np.ndarray:
    """The array of unsigned bytes in an idx file: 0, 0, 8, number of axes; their lengths as big-endian; the bytes."""
    axes = content[3] if len(content) > 3 else 0
    start = 4 + 4 * axes
    if content[:3] != b"\x00\x00\x08" or not axes or len(content) < start:
        raise EquilibriaError(
            f"{file} begins with {content[:4].hex()}; expected an idx file of unsigned bytes (000008..)"
        )
    shape = tuple(int(length) for length in np.frombuffer(content[4:start], ">u4"))
    if len(content) - start != math.prod(shape):
        raise EquilibriaError(
            f"{file} has {len(content) - start} bytes of data; expected {math.prod(shape)} for {shape}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _image_set(arrays: Sequence[np.ndarray], kind: _Kind, files: Mapping[str, Path]) -> ImageSet:
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 3 or labels.shape != (len(images),) or labels.max(initial=0) >= len(kind.class_names):
            raise EquilibriaError(
                f"{kind.name} has images of {images.shape} and labels of {labels.shape}; expected (count, height, "
                f"width) and (count,), and labels of 0 to {len(kind.class_names) - 1}"
            )
    train_images, train_labels, test_images, test_labels = (torch.from_numpy(array.copy()) for array in arrays)
    return ImageSet(
        train_images.unsqueeze(1),
        train_labels.to(torch.int64),
        test_images.unsqueeze(1),
        test_labels.to(torch.int64),
        kind.class_names,
        ", ".join(files[name].name for name in _FILES),
    )
