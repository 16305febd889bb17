"""Norms of the weights in a folder of checkpoints, and how far they turned from one to the next.

A checkpoint is a file, or a folder of files with a part of the weights each, whose name holds the step. Tensors are
compared block by block in float64, with one pair of checkpoints open at a time: safetensors files and torch's own are
mapped, so that a large tensor never is in memory as a whole; of torch.distributed.checkpoint, two tensors are.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.errors import EquilibriaError, described
from equilibria.findings import counted
from equilibria.importing._distcp import METADATA, sharded
from equilibria.tensors.parameters import plain_name
from equilibria.theory.moments import angle_from_chord_sq, chord_sq

Array = NDArray[np.float64]

_SAFE = ".safetensors"
_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_BLOCK = 1 << 22  # numbers in float64: 32 MiB
_FORMATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # of safetensors; other kinds are no weights
_UNIT_ROUNDOFF = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LONGEST_HEADER = 100_000_000  # bytes; safetensors allows no more
_NO_WEIGHTS = re.compile(r"optim|scheduler|rng|training_args|scaler|random_states", flags=re.IGNORECASE)
_STATES = ("model", "state_dict", "model_state_dict", "module", "params", "weights", "net", "network")
_DEEPEST = 3  # dictionaries in dictionaries
_SHOWN = 3


class Weights(Protocol):
    """A tensor in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def kind(self) -> str:
        """One of `_FORMATS`."""

    @property
    def storage(self) -> object:
        """Equal for tied tensors."""

    def block(self, start: int, end: int) -> Array:
        """Some of its numbers, in float64."""


class Step(NamedTuple):
    """A weight in one checkpoint, and how it turned since the one before.

    Attributes:
        step: of the checkpoint.
        norm: ||w|| there.
        distance: steps since the checkpoint before; None in the first.
        angle: radians between the two; None in the first, and where it is below ``error``.
        error: the largest angle that rounding the stored weights can make.
    """

    step: int
    norm: float
    distance: int | None = None
    angle: float | None = None
    error: float = 0.0


@dataclass
class Stored:
    """A weight in all checkpoints.

    Attributes:
        shape: of the tensor.
        dtype: with which it is stored.
        aliases: its other names, if it is tied.
        steps: one per checkpoint.
    """

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpoints:
    """What a folder of checkpoints holds.

    Attributes:
        weights: by name.
        steps: of the checkpoints.
        notes: sentences about what was left out.
    """

    weights: Mapping[str, Stored]
    steps: tuple[int, ...]
    notes: tuple[str, ...]


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder holds a file of weights, itself or in a subfolder."""
    return bool(_files(folder)) or any(_files_within(path) for path in folder.iterdir())


def read_checkpoints(folder: Path, choose: Callable[[str, tuple[int, ...]], bool]) -> Checkpoints:
    """Compare every checkpoint of a folder with the one before.

    Args:
        folder: holds two or more.
        choose: whether to read a weight of this name and shape.

    Raises:
        EquilibriaError: if there are fewer than two, a name holds no step or two hold the same, a file cannot be read
            or is not a checkpoint, or no weight is in all of them.
    """
    found = _by_step(folder)
    if len(found) < 2:
        raise EquilibriaError(
            f"got source={folder} with {counted(len(found), 'checkpoint')}; expected two or more to compare",
            argument="source",
        )
    stored: dict[str, Stored] = {}
    everywhere: set[str] = set()
    reshaped: set[str] = set()
    before: Mapping[str, Weights] = {}
    last: int | None = None
    for step, files in found.items():
        weights, aliases = _untied(_open(files))
        chosen = {name: weight for name, weight in weights.items() if choose(name, weight.shape)}
        if last is None:
            stored = {name: Stored(w.shape, _DTYPES[w.kind], aliases.get(name, ())) for name, w in chosen.items()}
            everywhere = set(chosen)
        everywhere &= set(chosen)
        reshaped |= {name for name in everywhere if chosen[name].shape != stored[name].shape}
        for name in sorted(everywhere - reshaped):
            distance = None if last is None else step - last
            stored[name].steps.append(_compared(step, before.get(name), chosen[name], distance))
        before, last = chosen, step
    kept = {name: weight for name, weight in stored.items() if name in everywhere - reshaped}
    if not kept:
        raise EquilibriaError(
            f"got {len(found)} checkpoints without a common weight of one shape ({_example(stored, before)}); expected "
            "the same model in all, and matrices, or select= their names",
            argument="source",
        )
    return Checkpoints(kept, tuple(found), _notes(stored, kept, reshaped, before))


def _notes(
    stored: Mapping[str, Stored], kept: Mapping[str, Stored], reshaped: set[str], last: Mapping[str, Weights]
) -> tuple[str, ...]:
    missing = sorted((set(stored) | set(last)) - set(kept) - reshaped)
    pairs = ((sorted(reshaped), "differently shaped"), (missing, "missing from some checkpoints"))
    return tuple(
        f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN:,} more' if len(names) > _SHOWN else ''} "
        f"{'is' if len(names) == 1 else 'are'} {why}, and left out"
        for names, why in pairs
        if names
    )


def _example(first: Mapping[str, Stored], last: Mapping[str, Weights]) -> str:
    one, other = (next(iter(names), None) for names in (first, last))
    return f"the first has {one or 'no matrix'}, the last {other or 'no matrix'}"


# ---- files


def _files(folder: Path) -> list[Path]:
    """The files with weights; safetensors alone where there are both kinds."""
    if (folder / METADATA).is_file():
        return [folder / METADATA]
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not _NO_WEIGHTS.search(path.name) and path.suffix.lower() in (_SAFE, *_TORCH)
    ]
    return [path for path in files if path.suffix.lower() == _SAFE] or files


def _files_within(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder, or of its only subfolder with weights."""
    if not folder.is_dir():
        return []
    if own := _files(folder):
        return own
    below = [_files(path) for path in folder.iterdir() if path.is_dir() and not _NO_WEIGHTS.search(path.name)]
    with_weights = list(filter(None, below))
    return with_weights[0] if len(with_weights) == 1 else []


def _by_step(folder: Path) -> dict[int, list[Path]]:
    """The files of every checkpoint by its step, in order."""
    own = _files(folder)
    named = [(path.stem, [path]) for path in own]
    if not own:
        named = [(path.name, files) for path in sorted(folder.iterdir()) if (files := _files_within(path))]
    steps: dict[int, list[Path]] = {}
    for name, files in named:
        numbers = re.findall(r"\d+", name)
        if not numbers:
            raise EquilibriaError(
                f"got {files[0]} without a step in its name; expected names such as step-1000.pt or "
                "checkpoint-1000/model.safetensors",
                argument="source",
            )
        step = int(numbers[-1])
        if step in steps:
            raise EquilibriaError(
                f"got {steps[step][0]} and {files[0]}, both of step {step:,}; expected one checkpoint per step, or the "
                "parts of one in a folder of its own",
                argument="source",
            )
        steps[step] = files
    return dict(sorted(steps.items()))


def _open(files: list[Path]) -> dict[str, Weights]:
    weights: dict[str, Weights] = {}
    for path in files:
        if path.name == METADATA:
            weights |= _model_of(sharded(path, _NAMES))
        else:
            weights |= _safetensors(path) if path.suffix.lower() == _SAFE else _torch_file(path)
    return weights


def _model_of(tensors: Mapping[str, Weights]) -> dict[str, Weights]:
    """The weights among tensors of nested dictionaries, whose names dots join: no optimizer, without the dictionary."""
    weights = {name: tensor for name, tensor in tensors.items() if not _NO_WEIGHTS.search(name.partition(".")[0])}
    tops = {name.partition(".")[0] for name in weights}
    nested = len(tops) == 1 and tops <= set(_STATES)
    return {name.partition(".")[2]: tensor for name, tensor in weights.items()} if nested else weights


def _untied(weights: Mapping[str, Weights]) -> tuple[dict[str, Weights], dict[str, tuple[str, ...]]]:
    """Each tensor once, by its first plain name, and its further names."""
    names: dict[object, list[str]] = {}
    plain = {plain_name(name): weight for name, weight in weights.items()}
    for name, weight in plain.items():
        names.setdefault((weight.storage, weight.shape), []).append(name)
    first = {own[0]: tuple(own[1:]) for own in names.values()}
    return {name: plain[name] for name in first}, {name: others for name, others in first.items() if others}


# ---- safetensors


@dataclass(frozen=True)
class _Mapped:
    """A tensor of a safetensors file."""

    shape: tuple[int, ...]
    kind: str
    storage: tuple[Path, int]
    numbers: NDArray[Any]

    def block(self, start: int, end: int) -> Array:
        part = self.numbers[start:end]
        if self.kind == "BF16":  # the upper half of a float32 number
            part = (part.astype(np.uint32) << 16).view(np.float32)
        return part.astype(np.float64)


def _safetensors(path: Path) -> dict[str, Weights]:
    """The floating-point tensors of a file: eight bytes with the length of a JSON header, the header, the numbers."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError("the header does not fit into the file")
            header = json.loads(file.read(length))
        begin, tensors = 8 + length, dict[str, Weights]()
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in _FORMATS:
                continue
            first, end = (begin + int(offset) for offset in entry["data_offsets"])
            shape, format_ = tuple(map(int, entry["shape"])), np.dtype(_FORMATS[entry["dtype"]])
            count = int(np.prod(shape, dtype=np.int64))
            if end > size or first < begin or min(shape, default=0) < 0 or end - first != count * format_.itemsize:
                raise ValueError(f"{name} does not fit into the file: it is cut off, or damaged")
            numbers = np.memmap(path, format_, "r", first, (count,)) if count else np.zeros(0, format_)
            tensors[name] = _Mapped(shape, entry["dtype"], (path, first), numbers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EquilibriaError(f"cannot read {path} as safetensors: {error}", argument="source") from error
    return tensors


# ---- torch


@dataclass(frozen=True)
class _Loaded:
    """A tensor of a torch file."""

    shape: tuple[int, ...]
    kind: str
    storage: int
    tensor: torch.Tensor

    def block(self, start: int, end: int) -> Array:
        flat = self.tensor.reshape(-1)  # a copy only if it is not contiguous
        return np.asarray(flat[start:end].double().numpy())


def _torch_file(path: Path) -> dict[str, Weights]:
    """The floating-point tensors of the state dict in a file."""
    state = _state_dict(_load(path))
    if state is None:
        raise EquilibriaError(
            f"got {path}, which holds no state dict of a model; expected tensors by name, or such a dict under one of: "
            f"{', '.join(_STATES)}",
            argument="source",
        )
    return {
        name: _Loaded(tuple(tensor.shape), _NAMES[tensor.dtype], tensor.data_ptr(), tensor.detach())
        for name, tensor in state.items()
        if tensor.dtype in _NAMES and tensor.layout == torch.strided and tensor.device.type == "cpu"
    }


def _load(path: Path) -> Any:
    options = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            return torch.load(path, mmap=True, **options)  # type: ignore[arg-type]
        except RuntimeError:  # a file of torch before 1.6 cannot be mapped
            return torch.load(path, **options)  # type: ignore[arg-type]
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError, AttributeError) as error:
        why = "it holds more than tensors, and loading it could run code" if _has_code(error) else described(error)
        raise EquilibriaError(
            f"cannot read {path}: {why[:300]}; expected a state dict, saved by torch.save(model.state_dict(), path)",
            argument="source",
        ) from error


def _has_code(error: Exception) -> bool:
    return isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error).lower()


def _state_dict(loaded: Any, depth: int = 0) -> dict[str, torch.Tensor] | None:
    """The tensors by name: those of the outermost dictionary that has any, optimizers left out."""
    if not isinstance(loaded, Mapping) or depth > _DEEPEST or loaded.keys() >= {"state", "param_groups"}:
        return None
    own = {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, torch.Tensor)}
    if any(tensor.ndim > 1 for tensor in own.values()):
        return own
    inner = [name for name in _STATES if name in loaded]
    inner += [name for name in loaded if isinstance(name, str) and name not in inner and not _NO_WEIGHTS.search(name)]
    found = (_state_dict(loaded[name], depth + 1) for name in inner)
    return next((state for state in found if state), own or None)


# ---- comparison


def _compared(step: int, before: Weights | None, after: Weights, distance: int | None) -> Step:
    """The norm of a weight, and the angle to the one before, as in `_angles`."""
    first = second = moved = 0.0
    for one, other in _blocks(before, after):
        second += float(np.dot(other, other))
        if one is not None:
            first += float(np.dot(one, one))
            difference = other - one
            moved += float(np.dot(difference, difference))
    norm = float(np.sqrt(second))
    if before is None or not (first > 0 and second > 0 and np.isfinite(moved)):
        return Step(step, norm, distance)
    angle = float(angle_from_chord_sq(chord_sq(first, second, moved)))
    error = _UNIT_ROUNDOFF[before.kind] + _UNIT_ROUNDOFF[after.kind]
    return Step(step, norm, distance, angle if angle > error else None, error)


def _blocks(before: Weights | None, after: Weights) -> Iterator[tuple[Array | None, Array]]:
    count = int(np.prod(after.shape, dtype=np.int64))
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        yield None if before is None else before.block(start, end), after.block(start, end)
