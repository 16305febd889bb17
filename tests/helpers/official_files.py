"""Tiny data sets in the official formats, written byte by byte as the originals were."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

Batch = tuple[np.ndarray, np.ndarray]


def some_batches(count: int = 20, *, seed: int = 0) -> dict[str, Batch]:
    """Random pixels, and every class as often as any other in each batch, in random order."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(0, 256, (count, 3, 32, 32), np.uint8), rng.permutation(count).astype(np.uint8) % 10)
        for name in BATCHES
    }


def python2_pickle(images: np.ndarray, labels: np.ndarray, *, by_columns: bool = False) -> bytes:
    """What Python 2 wrote for {'data': uint8 array, 'labels': list} by protocol 2; its strings have no encoding."""

    def text(string: bytes) -> bytes:
        return b"U" + bytes([len(string)]) + string

    pixels = images.reshape(len(images), -1)
    unknown = 2 * b"J\xff\xff\xff\xff"
    data = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + b"J" + struct.pack("<i", pixels.shape[0]) + b"J" + struct.pack("<i", pixels.shape[1]) + b"\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + unknown
        + b"K\x00tb" + (b"\x88" if by_columns else b"\x89")
        + b"T" + struct.pack("<i", pixels.size) + pixels.tobytes("F" if by_columns else "C") + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"labels") + numbers + text(b"data") + data + b"u."


def python_files(batches: dict[str, Batch]) -> dict[str, bytes]:
    return {name: python2_pickle(*batch) for name, batch in batches.items()}


def official_meta() -> bytes:
    """The official ``batches.meta``, byte by byte: Python 2's protocol 2, each object with a number."""
    words = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

    def text(word: str, number: int) -> bytes:
        return b"U" + bytes([len(word)]) + word.encode() + b"q" + bytes([number])

    names = b"".join(text(word, number) for number, word in enumerate(words, start=5))
    count, pixels = text("num_cases_per_batch", 2) + b"M\x10'", text("num_vis", 15) + b"M\x00\x0c"
    return b"\x80\x02}q\x01(" + count + text("label_names", 3) + b"]q\x04(" + names + b"e" + pixels + b"u."


def binary_files(batches: dict[str, Batch]) -> dict[str, bytes]:
    records = {name: np.column_stack([y, x.reshape(len(x), -1)]).tobytes() for name, (x, y) in batches.items()}
    return {f"{name}.bin": content for name, content in records.items()}


def write_archive(path: Path, contents: dict[str, bytes], *, folder: str) -> None:
    """Backwards, and with a file that does not matter: the order inside an archive is nobody's promise."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [("readme.html", b"<html>"), *reversed(contents.items())]:
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_npz(folder: Path, batches: dict[str, Batch], *, numbers: tuple[int, ...] = (1, 2, 3, 4, 5)) -> None:
    for number in numbers:
        images, labels = batches[f"data_batch_{number}"]
        np.savez(folder / f"cifar10_train_{number}.npz", x=images, y=labels)
    np.savez(folder / "cifar10_test.npz", x=batches["test_batch"][0], y=batches["test_batch"][1])


def write_idx(folder: Path, arrays: list[np.ndarray], *, compressed: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX, arrays, strict=True):
        content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
