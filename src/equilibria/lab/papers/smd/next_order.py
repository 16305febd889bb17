"""How far first-order rates reach, for the tolerances of claims about them."""

from __future__ import annotations

from equilibria.theory.rules import SGD


def next_order(rule: SGD) -> float:
    """What first-order rates leave out, relative: the second term of their series in lr*wd."""
    a, eps = rule.momentum, rule.lr * rule.weight_decay
    return abs(7 * a**2 + 10 * a - 1) * eps / (2 * (1 - a) ** 2 * (1 + a))
