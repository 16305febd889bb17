"""The one exception people need to catch, the checks that raise it, and warnings that point at the caller's own line.

Every message shows what was received, what is allowed and, where it helps, what to do.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from types import FrameType

_NOT_THE_CALLER = ("equilibria", "torch", "contextlib")  # hooks run below torch, and with-statements below contextlib


class EquilibriaError(ValueError):
    """Bad input or an impossible request; the message says what was received and what is allowed."""


class WatchWarning(UserWarning):
    """Watching has stopped or lost something; training goes on."""


def number(name: str, value: object) -> float:
    """``value`` as a finite float, or an error that names it.

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
        raise EquilibriaError(f"got {name}={value!r}; expected a finite number") from None
    if not math.isfinite(result):
        raise EquilibriaError(f"got {name}={result}; expected a finite number")
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
    """``value`` as a finite float inside an interval: ``low``/``high`` closed, ``above``/``below`` open ends.

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
        raise EquilibriaError(f"got {name}={result:g}; expected {left}{name}{right}")
    return result


def positive(name: str, value: object) -> float:
    """``value`` as a finite float greater than zero."""
    return within(name, value, above=0)


def whole(name: str, value: object, *, low: int = 0) -> int:
    """``value`` as an integer of at least ``low``; a float with a fraction is refused, not rounded, and so is True."""
    if isinstance(value, bool):
        raise EquilibriaError(f"got {name}={value}; expected a whole number")
    result = within(name, value, low=low)
    if not result.is_integer():
        raise EquilibriaError(f"got {name}={value}; expected a whole number")
    return int(result)


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """``value`` if it is one of the allowed words.

    Example:
        >>> one_of("optimizer", "sdg", ["sgd", "adamw"])
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got optimizer='sdg'; expected one of: sgd, adamw
    """
    words = list(allowed)
    if value not in words:
        raise EquilibriaError(f"got {name}={value!r}; expected one of: {', '.join(words)}")
    return str(value)


def warn_caller(message: str, kind: type[Warning]) -> None:
    """Warn at the line that led here: the nearest one outside of this library and of torch, which calls its hooks."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)
