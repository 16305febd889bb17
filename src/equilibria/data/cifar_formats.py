"""The file formats of CIFAR-10; its pickles are read without running anything they ask for."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from equilibria.data.labels import label_array
from equilibria.errors import EquilibriaError

CLASSES = 10
_SIDE, _CHANNELS = 32, 3
_PIXELS = _CHANNELS * _SIDE * _SIDE


class _Recorded:
    """Stands for whatever a pickle wants to build: keeps what it is given, does nothing."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: str, _: str = "latin1") -> bytes:
    """How Python 3 writes bytes into old pickles."""
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Recorded,
    ("numpy._core.multiarray", "_reconstruct"): _Recorded,
    ("numpy", "ndarray"): _Recorded,
    ("numpy", "dtype"): _Recorded,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    """Knows the few names that an array needs, none of which is the real thing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[module, name]


def read_batch(content: bytes, file: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (count, 3, 32, 32), uint8, and labels (count,), int64, of a file such as ``data_batch_1``.

    Args:
        content: of the file.
        file: its name, for messages.
    """
    try:
        found = _Reader(io.BytesIO(content), encoding="bytes").load()
        _, shape, _, by_columns, content = found[b"data"].state  # what numpy needs to build an array
        pixels = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")
        labels = np.array(found[b"labels"])
        pixels = pixels.reshape(len(labels), _CHANNELS, _SIDE, _SIDE)
    except Exception as error:  # a pickle that is not one may raise anything
        raise EquilibriaError(
            f"{file} is no batch of CIFAR-10's python version ({type(error).__name__}: {error}); expected a pickled "
            f"dict with 'data', uint8 of (count, {_PIXELS}), and 'labels'"
        ) from None
    return pixels, label_array(labels, file=file, classes=CLASSES)


def read_records(content: bytes, file: str) -> tuple[np.ndarray, np.ndarray]:
    """The same of a file of the binary version, such as ``data_batch_1.bin``: a byte of label, then the pixels."""
    if not content or len(content) % (1 + _PIXELS):
        raise EquilibriaError(f"{file} has {len(content)} bytes; expected a multiple of {1 + _PIXELS}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE), label_array(records[:, 0], file=file, classes=CLASSES)


def write_records(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The file of the binary version that has these images: what `read_records` reads."""
    return np.column_stack([labels.astype(np.uint8), pixels.reshape(len(labels), _PIXELS)]).tobytes()
