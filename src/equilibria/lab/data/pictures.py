"""Picture files in a folder per class, decoded when a batch needs them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.lab import import_extra
from equilibria.lab.data.windows import random_window

SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures of any size as images of one size: like a uint8 tensor (count, 3, size, size) that is read only in part.

    An index or a slice gives the middles: the shorter side is resized to ``shorter``, then ``size`` x ``size`` are cut
    out of the middle. Files are decoded by as many threads as the machine has processors.

    Attributes:
        paths: of the files.
        size: of the images.
        shorter: side of the resized pictures.
    """

    paths: tuple[Path, ...]
    size: int = 224
    shorter: int = 256
    dtype = torch.uint8
    device = torch.device("cpu")
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        return torch.Size((len(self.paths), 3, self.size, self.size))

    @property
    def digest(self) -> str:
        """The first 16 hex digits of a SHA-256 over folder and name of every file."""
        names = "\n".join(f"{path.parent.name}/{path.name}" for path in self.paths)
        return hashlib.sha256(names.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, places: slice | Tensor) -> Tensor:
        chosen = self.paths[places] if isinstance(places, slice) else [self.paths[place] for place in places.tolist()]
        return self._decoded(chosen, self._middle)

    def resized_windows(self, places: Tensor, numbers: Tensor, *, size: int) -> Tensor:
        """A random window of each of these pictures, resized; see `equilibria.lab.data.windows.resized_windows`."""
        drawn = dict(zip(range(len(places)), numbers.tolist(), strict=True))
        paths = [self.paths[place] for place in places.tolist()]
        return self._decoded(paths, lambda picture, place: _window(picture, drawn[place], size=size))

    def _decoded(self, paths: Sequence[Path], cut: Callable[[Any, int], Any]) -> Tensor:
        """The files as pixels, each cut by a function of the picture and its place among them."""
        image = import_extra("PIL.Image")

        def pixels(place: int) -> Tensor:
            try:
                with image.open(paths[place]) as picture:
                    array = np.array(cut(picture.convert("RGB"), place), dtype=np.uint8)
            except OSError as error:
                raise EquilibriaError(f"{paths[place]} cannot be read ({error}); expected a picture") from error
            return torch.from_numpy(array).permute(2, 0, 1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            decoded = list(pool.map(pixels, range(len(paths))))
        return torch.stack(decoded) if decoded else torch.empty(self.shape, dtype=self.dtype)[:0]

    def _middle(self, picture: Any, _place: int) -> Any:
        scale = self.shorter / min(picture.size)
        wide, high = (max(self.shorter, int(side * scale)) for side in picture.size)
        left, top = round((wide - self.size) / 2), round((high - self.size) / 2)
        return picture.resize((wide, high), _BILINEAR).crop((left, top, left + self.size, top + self.size))


_BILINEAR = 2  # PIL.Image.Resampling.BILINEAR


def _window(picture: Any, numbers: Sequence[float], *, size: int) -> Any:
    wide, high = picture.size
    top, left, height, width = random_window(numbers, height=high, width=wide)
    return picture.crop((left, top, left + width, top + height)).resize((size, size), _BILINEAR)


def class_folders(folder: Path) -> tuple[Pictures, Tensor, tuple[str, ...]]:
    """The pictures in the folders of a folder, their labels, and the names of the classes in alphabetic order.

    Raises:
        EquilibriaError: there are none.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    found = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise EquilibriaError(f"{folder} has no pictures in folders of classes; expected {folder}/NAME/*.JPEG")
    return Pictures(tuple(path for path, _ in found)), torch.tensor([label for _, label in found]), tuple(names)
