"""The share of a weight's norm that decay takes per step in the long run, where nothing else moves it."""

from __future__ import annotations

import math

from equilibria.theory.rules import SGD, AdamL2, Rule


def decay_per_step(rule: Rule) -> float | None:
    """1 minus the factor per step; negative where the norm grows. None if it depends on the gradient (Adam with L2).

    Example:
        >>> decay_per_step(SGD(lr=0.1, weight_decay=5e-4, momentum=0.9))
        0.00050...
        >>> decay_per_step(SGD(lr=1.0, weight_decay=5e-3, momentum=0.99))  # the weight swings, in a shrinking envelope
        0.0050...
    """
    if isinstance(rule, SGD):  # coupled: decay passes through the momentum buffer, as the gradient does
        return _of_momentum(rule)
    return None if isinstance(rule, AdamL2) and rule.weight_decay else rule.decay_per_step


def _of_momentum(rule: SGD) -> float:
    """From the roots 1 - d of the recursion of weight and buffer.

    With mu the momentum and e = lr * weight_decay * (1 - dampening), without a gradient,

        b' = mu b + e w,    w' = w - b'                (heavy ball)
                            w' = w - e w - mu b'       (Nesterov)

    have the characteristic polynomials l^2 - (1 + mu - e) l + mu and l^2 - (1 + mu)(1 - e) l + mu (1 - e). In d = 1 - l
    both are d^2 - p d + e, so that a slow rate is not a difference of numbers near one.
    """
    mu, e = rule.momentum, rule.decay_per_step
    p, product = (1 - mu + e * (1 + mu), mu * (1 - e)) if rule.nesterov else (1 - mu + e, mu)
    discriminant = p * p - 4 * e
    if discriminant < 0:  # a pair of complex roots, whose squared size is the product
        return 1 - math.sqrt(product)
    large = (p + math.sqrt(discriminant)) / 2
    return min(min(d, 2 - d) for d in (e / large, large))  # 1 - |1 - d|
