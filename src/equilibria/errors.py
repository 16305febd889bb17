"""The library's one exception, the argument checks that raise it, and warnings that point at the caller's own line.

Every message shows the value received, the values allowed and, where it helps, what to do.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import TypeVar

_Word = TypeVar("_Word", bound=str)
_NOT_THE_CALLER = ("equilibria", "torch", "contextlib")  # hooks run below torch, and with-statements below contextlib


class EquilibriaError(ValueError):
    """Bad input or an impossible request; the message gives the value received and the values allowed.

    Args:
        message: the sentence for the user.
        argument: name of the argument at fault, where the error is about a single one.

    Attributes:
        argument: that name, or None; kept when the error is pickled.
    """

    def __init__(self, message: str = "", *, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class WatchWarning(UserWarning):
    """Watching has stopped or lost data; training goes on."""


def number(name: str, value: object) -> float:
    """Return ``value`` as a finite float, or raise an error that names the argument.

    Example:
        >>> number("lr", 1)
        1.0
        >>> number("lr", float("nan"))
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got lr=nan; expected a finite number
    """
    try:
        if isinstance(value, str | bytes):  # float() would read "0.1", and the caller would go on with the text
            raise TypeError
        result = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise EquilibriaError(f"got {name}={value!r}; expected a finite number", argument=name) from None
    if not math.isfinite(result):
        raise EquilibriaError(f"got {name}={result}; expected a finite number", argument=name)
    return result


def within(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return ``value`` as a finite float inside an interval: ``low``/``high`` closed, ``above``/``below`` open ends.

    Example:
        >>> within("momentum", 1.2, low=0, below=1)
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got momentum=1.2; expected 0 <= momentum < 1
    """
    result = number(name, value)
    too_low = (low is not None and result < low) or (above is not None and result <= above)
    too_high = (high is not None and result > high) or (below is not None and result >= below)
    if too_low or too_high:
        left = f"{low:g} <= " if low is not None else f"{above:g} < " if above is not None else ""
        right = f" <= {high:g}" if high is not None else f" < {below:g}" if below is not None else ""
        raise EquilibriaError(f"got {name}={result:g}; expected {left}{name}{right}", argument=name)
    return result


def positive(name: str, value: object) -> float:
    """Return ``value`` as a finite float greater than zero."""
    return within(name, value, above=0)


def scale_number(name: str, value: object) -> float:
    """Return ``value`` as a positive float far enough from the ends of float64 for its squares and ratios."""
    return within(name, positive(name, value), low=1e-100, high=1e100)


def whole(name: str, value: object, *, low: int = 0) -> int:
    """Return ``value`` as an integer of at least ``low``; a fraction raises instead of being rounded, as does True."""
    result = math.nan if isinstance(value, bool) else within(name, value, low=low)
    if not result.is_integer():
        raise EquilibriaError(f"got {name}={value}; expected a whole number", argument=name)
    return int(result)


def one_of(name: str, value: _Word, allowed: Iterable[str]) -> _Word:
    """Return ``value`` if it is one of the allowed words; its static type, such as a ``Literal``, is kept.

    Example:
        >>> one_of("optimizer", "sdg", ["sgd", "adamw"])
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got optimizer='sdg'; expected one of: sgd, adamw
    """
    words = list(allowed)
    if value not in words:
        raise EquilibriaError(f"got {name}={value!r}; expected one of: {', '.join(words)}", argument=name)
    return value


def described(error: BaseException) -> str:
    """The kind and the text of an exception, of anybody's class: one whose text cannot be formed keeps its kind.

    Example:
        >>> described(KeyError("a"))
        "KeyError: 'a'"
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def warn_caller(message: str, kind: type[Warning]) -> None:
    """Warn at the user's own line: the nearest frame outside this library and torch, which calls its hooks."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)


def warn_in_training(message: str, kind: type[Warning]) -> None:
    """Warn at the user's own line, and never raise.

    Where a filter such as ``-W error`` turns warnings into exceptions, this one would leave `optimizer.step` and end
    the training: the sentence goes to the standard error stream instead.
    """
    try:
        warn_caller(message, kind)
    except Warning:
        _print_warning(f"{kind.__name__}: {message}")


def _print_warning(sentence: str) -> None:
    print(sentence, file=sys.stderr)  # noqa: T201  # a warning's own place
