"""CIFAR-10 from its official archives, the unpacked folder, or npz files; and the 2,000 images of CIFAR-10-2k."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equilibria.errors import EquilibriaError, warn_caller
from equilibria.lab.data.files import data_folder, label_array, missing, verify_md5, verify_sha256
from equilibria.lab.data.image_set import ImageSet

CLASSES = 10
_SIDE, _CHANNELS = 32, 3
_PIXELS = _CHANNELS * _SIDE * _SIDE
_IMAGES = ((_PIXELS,), (_CHANNELS, _SIDE, _SIDE))  # shapes of an image in a pickle


class _Recorded:
    """Stands for an object that a pickle wants to build: keeps the arguments, does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Array(_Recorded):
    """Stands for an array, which can be made from the arguments."""

    def make(self) -> np.ndarray:
        if self.state is None:  # pickle protocol 5
            content, kind, shape, order, *_ = self.arguments
        else:
            _, shape, kind, by_columns, content = self.state
            order = "F" if by_columns else "C"
        numbers = np.dtype(_text(kind.state[1]) + _text(kind.arguments[0]))  # byte order, then a type such as u1
        return np.frombuffer(content, numbers).reshape(shape, order=order)


def _encode(text: str, _: str = "latin1") -> bytes:
    """Decode bytes as Python 3 writes them into old pickles."""
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
    """Maps the few names that an array needs to stand-ins, and refuses all others: no code of a pickle runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[module, name]


def _unpickled(content: bytes, *keys: str) -> list[Any]:
    """The values of a pickled dict for these keys, which Python 2 wrote as bytes and Python 3 as text."""
    content_dict = _Reader(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(content_dict, dict):
        raise pickle.UnpicklingError(f"it is a {type(content_dict).__name__}")
    by_name = {_text(key): value for key, value in content_dict.items()}
    if not by_name.keys() >= set(keys):
        raise pickle.UnpicklingError(f"it has {', '.join(by_name) or 'nothing'}")
    values = (by_name[key] for key in keys)
    return [value.make() if isinstance(value, _Array) else value for value in values]


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


def read_batch(content: bytes, file: str, *, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (count, 3, 32, 32), uint8, and labels (count,), int64, of a file such as ``data_batch_1``.

    Args:
        content: of the file.
        file: its name, for messages.
        classes: number of classes.
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
        class_names = tuple(map(_text, names))
    except Exception as error:  # as above
        raise EquilibriaError(
            f"{file} has no names of classes ({type(error).__name__}: {error}); expected a pickled dict with "
            "'label_names', a list of words"
        ) from None
    return _different(class_names, file)


def read_lines(content: bytes, file: str) -> tuple[str, ...]:
    """The names of the classes in ``batches.meta.txt`` of the binary version: one per line."""
    lines = content.decode(errors="replace").splitlines()
    return _different((line.strip() for line in lines if line.strip()), file)


def _different(names: Iterable[str], file: str) -> tuple[str, ...]:
    classes = tuple(names)
    if not classes or len(set(classes)) < len(classes):
        raise EquilibriaError(f"{file} has the classes {', '.join(classes) or 'none'}; expected names that differ")
    return classes


def read_records(content: bytes, file: str, *, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Like `read_batch`, for a file of the binary version such as ``data_batch_1.bin``: label byte, then pixels."""
    if not content or len(content) % (1 + _PIXELS):
        raise EquilibriaError(f"{file} has {len(content)} bytes; expected a multiple of {1 + _PIXELS}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE), label_array(records[:, 0], file=file, classes=classes)


def write_records(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """The content of the binary version's file with these images, which `read_records` reads."""
    return np.column_stack([labels.astype(np.uint8), pixels.reshape(len(labels), _PIXELS)]).tobytes()


CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

# MD5 of the files inside cifar-10-python.tar.gz, and of the binary archive as its page gives it.
PYTHON_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
META_MD5 = "5ff9c542aee3614f3951f8cda6e48888"
BINARY_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

_META, _META_TEXT = "batches.meta", "batches.meta.txt"
_FOLDER, _ARCHIVE, _BINARY = "cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar-10-binary.tar.gz"
_TRAIN_NPZ, _TEST_NPZ, _2K_NPZ = "cifar10_train_{}.npz", "cifar10_test.npz", "cifar10_2k.npz"
_2K_PER_CLASS = 200
_TRAIN_IMAGES = 50_000

# SHA-256 of the binary version's data_batch_1.bin to data_batch_5.bin and test_batch.bin, which have the images of the
# npz files, however these were written; that of the 2,000 images was computed from the first ones.
NPZ_SHA256 = {
    "cifar10_train_1.npz": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "cifar10_train_2.npz": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "cifar10_train_3.npz": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "cifar10_train_4.npz": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "cifar10_train_5.npz": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "cifar10_test.npz": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    "cifar10_2k.npz": "85e1bcd937bff4e1a96822ecf457c7d8b520eb14496e76876f04aadd1e5205d3",
}

_Batch = tuple[np.ndarray, np.ndarray]


def cifar10(
    folder: str | os.PathLike[str] | None = None,
    *,
    size: int = 32,
    classes: Sequence[int | str] | None = None,
    verify: bool = True,
) -> ImageSet:
    """CIFAR-10: 50,000 training and 10,000 test images in colour, of ten classes.

    It is read from the first of these in the folder: the unpacked ``cifar-10-batches-py`` (or the folder is that
    one), ``cifar-10-python.tar.gz``, ``cifar-10-binary.tar.gz``, or ``cifar10_train_1.npz`` to ``cifar10_train_5.npz``
    and ``cifar10_test.npz`` with the images of the five official batches and of the test batch: pixels ``x`` of uint8
    (count, 3, 32, 32) and labels ``y``, whole numbers. The last npz files may be missing: then there are fewer training
    images, which a warning, ``source`` and `ImageSet.counts` report.

    Data of your own in one of these formats are read with ``verify=False``. The names of their classes, which need not
    be ten, are taken from ``label_names`` in a pickled ``batches.meta``, in the binary archive from the lines of
    ``batches.meta.txt``; where there is no such file, and in npz files, the classes are CIFAR-10's.

    Args:
        folder: with the files; default: the environment variable EQUILIBRIA_DATA, else ~/.cache/equilibria/data.
        size: height and width: 32, or smaller by average pooling.
        classes: labels or names of the classes to keep, such as (3, 5) or ("cat", "dog"), renumbered in this order;
            default: all.
        verify: whether the files must have the official MD5, and the images of npz files the official SHA-256; False
            for data of your own in their format.

    Returns:
        The images, uint8 (float32 where pooled); `ImageSet.standardised` makes them ready for a network.

    Raises:
        EquilibriaError: it is not there (the message says where to get it), incomplete, damaged, or not the official
            one.
    """
    return _shaped(_read(folder, verify=verify), size, classes)


def cifar10_2k(
    folder: str | os.PathLike[str] | None = None,
    *,
    size: int = 32,
    classes: Sequence[int | str] | None = None,
    verify: bool = True,
) -> ImageSet:
    """CIFAR-10-2k of the sharpness-reduction paper (appendix Q.1): the first 200 training images of each class.

    They stay in the order of CIFAR-10; the 10,000 test images are all there. It is made from what `cifar10` reads, or
    read from ``cifar10_2k.npz`` (``x`` and ``y``) and ``cifar10_test.npz`` where there is nothing else. Arguments and
    errors are those of `cifar10`.
    """
    return _shaped(_read(folder, or_2k=True, verify=verify).per_class(_2K_PER_CLASS), size, classes)


def _shaped(images: ImageSet, size: int, classes: Sequence[int | str] | None) -> ImageSet:
    return (images if classes is None else images.select_classes(classes)).pooled(size)


def _read(folder: str | os.PathLike[str] | None, *, or_2k: bool = False, verify: bool) -> ImageSet:
    """Read the first form that the folder has; the file of 2,000 images only if no more are needed."""
    path = data_folder(folder)
    for unpacked in (path, path / _FOLDER):
        if (unpacked / "data_batch_1").exists():
            return _from_unpacked(unpacked, verify=verify)
    if (path / _ARCHIVE).exists():
        return _from_python_archive(path / _ARCHIVE, verify=verify)
    if (path / _BINARY).exists():
        return _from_binary_archive(path / _BINARY, verify=verify)
    train = _full_npz(path) or [file for file in [path / _2K_NPZ] if or_2k and file.exists()]
    if train:
        *batches, test = (_npz(file, verify=verify) for file in [*train, path / _TEST_NPZ])
        images = _image_set(batches, test, ", ".join(file.name for file in train))
        if not or_2k:
            _warn_of_missing(images, train)
        return images
    npz = f"{_TRAIN_NPZ.format(1)} or {_2K_NPZ}" if or_2k else _TRAIN_NPZ.format(1)
    raise missing(
        "CIFAR-10",
        path,
        looked_for=f"{_FOLDER}, {_ARCHIVE}, {_BINARY}, or {npz} with {_TEST_NPZ}",
        get=f"{_ARCHIVE} from {PAGE}",
    )


def _from_unpacked(folder: Path, *, verify: bool) -> ImageSet:
    absent = [name for name in PYTHON_MD5 if not (folder / name).exists()]
    if absent:
        raise EquilibriaError(
            f"{folder} has data_batch_1 but not {', '.join(absent)}; expected {', '.join(PYTHON_MD5)}"
        )
    names = [*PYTHON_MD5, *([_META] if (folder / _META).exists() else [])]
    return _from_python_files({name: (folder / name).read_bytes() for name in names}, folder, verify=verify)


def _from_python_archive(archive: Path, *, verify: bool) -> ImageSet:
    return _from_python_files(_members(archive, list(PYTHON_MD5), also=_META), archive, verify=verify)


def _from_python_files(contents: dict[str, bytes], where: Path, *, verify: bool) -> ImageSet:
    meta = contents.pop(_META, None)
    if verify and meta is not None:
        verify_md5(meta, META_MD5, file=where / _META)
    class_names = CLASS_NAMES if meta is None else read_names(meta, str(where / _META))
    batches = []
    for name, expected in PYTHON_MD5.items():
        content = contents.pop(name)  # frees its memory once it is read
        if verify:
            verify_md5(content, expected, file=where / name)
        batches.append(read_batch(content, str(where / name), classes=len(class_names)))
    return _image_set(batches[:-1], batches[-1], where.name, class_names)


def _from_binary_archive(archive: Path, *, verify: bool) -> ImageSet:
    if verify:
        verify_md5(archive.read_bytes(), BINARY_MD5, file=archive)
    contents = _members(archive, [f"{name}.bin" for name in PYTHON_MD5], also=_META_TEXT)
    meta = contents.pop(_META_TEXT, None)
    class_names = CLASS_NAMES if meta is None else read_lines(meta, str(archive / _META_TEXT))
    batches = [
        read_records(content, str(archive / name), classes=len(class_names)) for name, content in contents.items()
    ]
    return _image_set(batches[:-1], batches[-1], archive.name, class_names)


def _members(archive: Path, names: list[str], *, also: str) -> dict[str, bytes]:
    """The contents of some files of an archive, by their name without folder; nothing is unpacked to disk.

    Args:
        archive: the file.
        names: of required files.
        also: name of an optional file, which comes last.
    """
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as members:
            for member in members:
                name = member.name.rpartition("/")[2]
                if name in (*names, also):
                    content = members.extractfile(member) if member.isfile() else None
                    if content is None:
                        raise EquilibriaError(f"{archive} has {name} as a link or a folder; expected a file")
                    contents[name] = content.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise EquilibriaError(f"{archive} cannot be read ({error}); expected a whole archive: get it again") from None
    absent = [name for name in names if name not in contents]
    if absent:
        raise EquilibriaError(f"{archive} has no {', '.join(absent)}; expected {', '.join(names)}")
    return {name: contents[name] for name in (*names, also) if name in contents}


def _full_npz(path: Path) -> list[Path]:
    """The existing training files; a gap between them would change the order of the images, and raises."""
    files = [path / _TRAIN_NPZ.format(number) for number in range(1, 6)]
    there = [file.exists() for file in files]
    if any(there) and not all(there[: sum(there)]):
        names = ", ".join(file.name for file in files if file.exists())
        raise EquilibriaError(f"{path} has {names}; expected no gap before the last: images must keep their order")
    return files[: sum(there)]


def _warn_of_missing(images: ImageSet, files: list[Path]) -> None:
    absent = [_TRAIN_NPZ.format(number) for number in range(len(files) + 1, 6)]
    if absent:
        warn_caller(
            f"CIFAR-10 has only {len(images.train_images):,} of its {_TRAIN_IMAGES:,} training images: "
            f"{files[0].parent} has no {', '.join(absent)}",
            UserWarning,
        )


def _npz(file: Path, *, verify: bool) -> _Batch:
    if not file.exists():
        raise EquilibriaError(f"{file.parent} has training images but no {file.name}; expected both")
    try:
        with file.open("rb") as opened:  # numpy would leave a file open that is not an archive
            arrays = np.load(opened, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            images, labels = (
                np.asarray(arrays["x"]),
                np.asarray(arrays["y"]),
            )  # an entry that is not an array comes as bytes
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise EquilibriaError(f"{file} cannot be read ({error}); expected an npz file with x and y") from None
    if images.dtype != np.uint8 or images.shape[1:] != (3, 32, 32) or labels.shape != images.shape[:1]:
        raise EquilibriaError(
            f"{file} has x of {images.dtype} {images.shape} and y of {labels.shape}; expected x of uint8 "
            "(count, 3, 32, 32) and y of (count,)"
        )
    labels = label_array(labels, file=file, classes=CLASSES)
    if verify:
        verify_sha256(write_records(images, labels), NPZ_SHA256[file.name], file=file)
    return images, labels


def _image_set(train: list[_Batch], test: _Batch, source: str, class_names: tuple[str, ...] = CLASS_NAMES) -> ImageSet:
    pixels, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return ImageSet(
        torch.from_numpy(pixels),
        torch.from_numpy(labels),
        torch.from_numpy(test[0].copy()),
        torch.from_numpy(test[1]),
        class_names,
        source,
    )
