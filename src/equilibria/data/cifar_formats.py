"""The file formats of CIFAR-10; its pickles are read without running anything they ask for."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import numpy as np

from equilibria.data.labels import label_array
from equilibria.errors import EquilibriaError

CLASSES = 10
_SIDE, _CHANNELS = 32, 3
_PIXELS = _CHANNELS * _SIDE * _SIDE
_IMAGES = ((_PIXELS,), (_CHANNELS, _SIDE, _SIDE))  # what an image may be in a pickle


class _Recorded:
    """Stands for whatever a pickle wants to build: keeps what it is given, does nothing."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Array(_Recorded):
    """Stands for an array, which can be made of what it keeps."""

    def made(self) -> np.ndarray:
        if self.state is None:  # by the fifth protocol
            content, kind, shape, order, *_ = self.given
        else:
            _, shape, kind, by_columns, content = self.state
            order = "F" if by_columns else "C"
        numbers = np.dtype(_text(kind.state[1]) + _text(kind.given[0]))  # the order of the bytes, then such as u1
        return np.frombuffer(content, numbers).reshape(shape, order=order)


def _encode(text: str, _: str = "latin1") -> bytes:
    """How Python 3 writes bytes into old pickles."""
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _Array,
    ("numpy._core.numeric", "_frombuffer"): _Array,
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


def _unpickled(content: bytes, *keys: str) -> list[Any]:
    """What a pickled dict has of these names, which Python 2 wrote as bytes and Python 3 as text."""
    found = _Reader(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
    by_name = {_text(key): value for key, value in found.items()}
    if not by_name.keys() >= set(keys):
        raise pickle.UnpicklingError(f"it has {', '.join(by_name) or 'nothing'}")
    values = (by_name[key] for key in keys)
    return [value.made() if isinstance(value, _Array) else value for value in values]


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


def read_batch(content: bytes, file: str, *, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (count, 3, 32, 32), uint8, and labels (count,), int64, of a file such as ``data_batch_1``.

    Args:
        content: of the file.
        file: its name, for messages.
        classes: how many there are.
    """
    try:
        pixels, labels = (np.asarray(value) for value in _unpickled(content, "data", "labels"))
    except Exception as error:  # a pickle that is not one may raise anything
        raise _no_batch(file, f"{type(error).__name__}: {error}") from None
    if pixels.dtype != np.uint8 or pixels.shape[1:] not in _IMAGES:
        raise _no_batch(file, f"it has data of {pixels.dtype} {pixels.shape}")
    labels = label_array(labels, file=file, classes=classes)
    if len(labels) != len(pixels):
        raise _no_batch(file, f"it has {len(pixels)} images and {len(labels)} labels")
    return pixels.reshape(-1, _CHANNELS, _SIDE, _SIDE), labels


def _no_batch(file: str, cause: str) -> EquilibriaError:
    return EquilibriaError(
        f"{file} is no batch of CIFAR-10's python version ({cause}); expected a pickled dict with 'data', uint8 of "
        f"(count, {_PIXELS}), and 'labels', as many whole numbers in a list"
    )


def read_names(content: bytes, file: str) -> tuple[str, ...]:
    """The names of the classes in a file such as ``batches.meta``.

    Args:
        content: of the file.
        file: its name, for messages.
    """
    try:
        (names,) = _unpickled(content, "label_names")
        if not isinstance(names, list | tuple) or not all(isinstance(name, str | bytes) for name in names):
            raise pickle.UnpicklingError(f"its label_names are {names!r:.60}")
        found = tuple(map(_text, names))
    except Exception as error:  # as above
        raise EquilibriaError(
            f"{file} has no names of classes ({type(error).__name__}: {error}); expected a pickled dict with "
            "'label_names', a list of words"
        ) from None
    return _different(found, file)


def read_lines(content: bytes, file: str) -> tuple[str, ...]:
    """The same of ``batches.meta.txt`` in the binary version: a name in each line."""
    lines = content.decode(errors="replace").splitlines()
    return _different((line.strip() for line in lines if line.strip()), file)


def _different(names: Iterable[str], file: str) -> tuple[str, ...]:
    found = tuple(names)
    if not found or len(set(found)) < len(found):
        raise EquilibriaError(f"{file} has the classes {', '.join(found) or 'none'}; expected names that differ")
    return found


def read_records(content: bytes, file: str, *, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """As `read_batch`, of a file of the binary version, such as ``data_batch_1.bin``: a byte of label, then pixels."""
    if not content or len(content) % (1 + _PIXELS):
        raise EquilibriaError(f"{file} has {len(content)} bytes; expected a multiple of {1 + _PIXELS}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE), label_array(records[:, 0], file=file, classes=classes)


def write_records(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The file of the binary version that has these images: what `read_records` reads."""
    return np.column_stack([labels.astype(np.uint8), pixels.reshape(len(labels), _PIXELS)]).tobytes()
