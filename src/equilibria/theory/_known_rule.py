"""The check that something is an optimizer rule at all."""

from __future__ import annotations

from typing import get_args

from equilibria.errors import EquilibriaError
from equilibria.theory.rules import Rule


def known_rule(rule: object) -> None:
    """Refuse what is not one of the rules.

    Example:
        >>> known_rule("sgd")
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: got rule='sgd'; expected one of: SGD, SGDW, AdamW, AdamL2, Lion, Muon
    """
    kinds = get_args(Rule)
    if not isinstance(rule, kinds):
        raise EquilibriaError(f"got rule={rule!r}; expected one of: {', '.join(kind.__name__ for kind in kinds)}")
