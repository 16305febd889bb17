"""Checkpoints of torch.distributed.checkpoint: a folder with ``.metadata`` and files with pieces of every tensor.

The metadata are a pickle. It is read with an allowance for the classes that describe tensors and nothing else, so that
no code in it runs; the pieces are loaded as weights only.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, described

METADATA = ".metadata"
_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}
_DESCRIBING = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor: where it begins and how large it is, along every axis; and the bytes of a file."""

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    offset: int
    length: int

    def load(self) -> torch.Tensor:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            data = io.BytesIO(file.read(self.length))
        try:
            tensor: torch.Tensor = torch.load(data, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
            raise EquilibriaError(f"cannot read {self.file}: {described(error)[:300]}", argument="source") from error
        if tuple(tensor.shape) != self.sizes:
            raise EquilibriaError(
                f"got {self.file} with a piece of shape {tuple(tensor.shape)} where {METADATA} says {self.sizes}; "
                "expected the files of one checkpoint",
                argument="source",
            )
        return tensor


@dataclass(frozen=True, eq=False)
class Sharded:
    """A tensor in pieces; read as a whole, and kept until two others are."""

    shape: tuple[int, ...]
    kind: str
    storage: tuple[Path, str]
    pieces: tuple[_Piece, ...]

    def block(self, start: int, end: int) -> NDArray[np.float64]:
        return np.asarray(_whole(self)[start:end].double().numpy())


@lru_cache(maxsize=2)
def _whole(tensor: Sharded) -> torch.Tensor:
    first, *others = (piece.load() for piece in tensor.pieces)
    whole = torch.full(tensor.shape, torch.nan, dtype=first.dtype)
    for piece, part in zip(tensor.pieces, (first, *others), strict=True):
        whole[tuple(slice(begin, begin + size) for begin, size in zip(piece.begins, piece.sizes, strict=True))] = part
    return whole.reshape(-1)


def sharded(path: Path, kinds: dict[torch.dtype, str]) -> dict[str, Sharded]:
    """The floating-point tensors that a ``.metadata`` file describes, by the names under which they were saved."""
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        places = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        described_tensors = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")
        }
        return {
            name: Sharded(
                tuple(entry.size), kinds[entry.properties.dtype], (path, name), _pieces(path, name, entry, places)
            )
            for name, entry in described_tensors.items()
            if entry.properties.dtype in kinds
        }
    except (OSError, pickle.UnpicklingError, AttributeError, KeyError, TypeError, EOFError, IndexError) as error:
        raise EquilibriaError(
            f"cannot read {path} as the metadata of torch.distributed.checkpoint: {described(error)[:300]}",
            argument="source",
        ) from error


def _pieces(path: Path, name: str, entry: Any, places: dict[tuple[str, tuple[int, ...]], Any]) -> tuple[_Piece, ...]:
    pieces = []
    for chunk in entry.chunks:
        begins = tuple(chunk.offsets)
        info = places[name, begins]
        file = PurePosixPath(info.relative_path)
        if file.is_absolute() or ".." in file.parts or getattr(info, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"{name} lies in {file}, transformed or outside of the folder")
        pieces.append(_Piece(begins, tuple(chunk.sizes), path.parent / file, info.offset, info.length))
    return tuple(pieces)


class _Unpickler(pickle.Unpickler):
    """Builds descriptions of tensors, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it describes a tensor."""
        if module == "pathlib" and name.endswith("Path"):
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _PLAIN or name in _DESCRIBING.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} describes no tensor, and loading it could run code")
