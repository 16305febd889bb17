"""A training set-up from a function that the user names: ``package.module:factory``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from equilibria.errors import EquilibriaError
from equilibria.tensors.parameters import unwrap_optimizers

_LABELS = ("labels", "label", "targets", "target")
_EXPECTED = (
    "expected (model, optimizer, batches), and optionally a loss(output, target) as the fourth value, None if the "
    "model returns its loss"
)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSetup:
    """A model, the optimizer that trains it, and data to examine them on.

    Attributes:
        model: the network.
        optimizer: its optimizer, or several of them (a list, or the values of a dict).
        batches: (input, target) pairs, or dicts with labels.
        loss: ``loss(output, target)``; None if the model returns its loss: a batch is then the model's input.
    """

    model: nn.Module
    optimizer: Any
    batches: Iterable[Any]
    loss: Callable[[Any, Any], Tensor] | None


def load_setup(target: str) -> TrainingSetup:
    """Import a module, call the function in it, and check what it returns.

    Args:
        target: such as ``train:make`` or ``package.module:factory``; the current folder is searched too.

    Raises:
        EquilibriaError: a wrong path, an error in the module or the function, or a wrong result.
    """
    module_name, colon, function_name = target.partition(":")
    if not (colon and module_name and function_name):
        raise EquilibriaError(f"got {target!r}; expected package.module:factory, such as train:make", argument="target")
    factory = _function(_import(_as_module(module_name)), function_name)
    _refuse_arguments(factory, target)
    try:
        result = factory()
    except SystemExit as error:
        raise _exited(f"{target}()", error) from error
    except Exception as error:
        raise EquilibriaError(f"{target}() failed with {_where(error)}") from error
    return as_setup(result, target)


def as_setup(result: object, source: str) -> TrainingSetup:
    """Check what a factory returned."""
    if isinstance(result, Mapping):
        wanted = ("model", "optimizer", "batches")
        if not set(wanted) <= set(result):
            raise EquilibriaError(f"got a dict with {', '.join(map(str, result))} from {source}; {_EXPECTED}")
        result = tuple(result[key] for key in (*wanted, "loss") if key in result)
    if not isinstance(result, tuple | list) or len(result) not in (3, 4):
        size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise EquilibriaError(f"got a {type(result).__name__}{size} from {source}; {_EXPECTED}")
    model, optimizer, batches = result[:3]
    loss = result[3] if len(result) == 4 else default_loss
    if not isinstance(model, nn.Module):
        raise EquilibriaError(f"got {type(model).__name__} as the model from {source}; {_EXPECTED}", argument="model")
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor):
        raise EquilibriaError(
            f"got {type(batches).__name__} as the batches from {source}; {_EXPECTED}", argument="batches"
        )
    if loss is not None and not callable(loss):
        raise EquilibriaError(f"got {type(loss).__name__} as the loss from {source}; {_EXPECTED}", argument="loss")
    return TrainingSetup(model, unwrap_optimizers(optimizer), batches, loss)


def input_and_target(batch: Any) -> Any:
    """A batch as (input, target); of a dict, as Hugging Face data sets yield, the labels are the target."""
    if isinstance(batch, Mapping):
        key = next((name for name in _LABELS if name in batch), None)
        if key is None:
            raise EquilibriaError(
                f"got a batch with {', '.join(map(repr, batch))}; expected (input, target), where input may be a dict "
                f"of keyword arguments, or a dict with one of: {', '.join(_LABELS)}"
            )
        return {name: value for name, value in batch.items() if name != key}, batch[key]
    return batch


def default_loss(output: Any, target: Any) -> Tensor:
    """Cross-entropy for integer targets, the mean squared error for others.

    Classes are in the last axis of the logits (tokens), or in axis 1 where targets are maps (segmentation).
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or not isinstance(target, Tensor):
        raise EquilibriaError(
            f"got a model output of type {type(output).__name__} and a target of type {type(target).__name__}, for "
            "which there is no default loss; expected the factory to return a loss(output, target) as its fourth "
            "value, or None there if the model returns its loss",
            argument="loss",
        )
    if target.is_floating_point():
        return functional.mse_loss(logits, target)
    maps = target.ndim >= 3 or logits.shape[:-1] != target.shape
    if logits.ndim == target.ndim + 1 and maps and logits.shape[2:] == target.shape[1:]:
        return functional.cross_entropy(logits, target)
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _as_module(name: str) -> str:
    """The name of a module, from its name or the path of its file: ``./train.py`` is the module ``train``."""
    if not name.endswith(".py"):
        return name
    path = Path(name)
    inside = path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path
    return ".".join(part for part in inside.with_suffix("").parts if part not in (".", "/"))


def _refuse_arguments(factory: Callable[..., object], target: str) -> None:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise EquilibriaError(
            f"got {target}, which cannot be called without arguments ({error}); expected a function without arguments "
            "that returns (model, optimizer, batches)"
        ) from error
    except ValueError:  # compiled functions may have no signature
        return


def _import(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise EquilibriaError(
                f"got module {name!r}; expected one in {here} or among the installed packages"
            ) from error
        raise EquilibriaError(f"module {name} cannot be imported: {_where(error)}") from error
    except SystemExit as error:
        raise _exited(f"importing {name}", error) from error
    except Exception as error:
        raise EquilibriaError(f"module {name} cannot be imported: {_where(error)}") from error


def _function(module: Any, name: str) -> Callable[[], object]:
    function: Callable[[], object] | None = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if _is_own_function(value, module)]
        near = difflib.get_close_matches(name, own, n=3) or own[:8]
        what = "is not a function" if function is not None else "does not exist"
        raise EquilibriaError(
            f"got {module.__name__}:{name}, which {what}; expected one of: {', '.join(near) or 'none'}"
        )
    return function


def _is_own_function(value: object, module: Any) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__


def _exited(what: str, error: SystemExit) -> EquilibriaError:
    return EquilibriaError(
        f"{what} ended the program (exit status {error.code}); expected it to return: argparse would read the command "
        "line of equilibria, so pass it a list, parse_args([]), and call main() below if __name__ == '__main__'"
    )


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
