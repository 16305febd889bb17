"""Weights that are not quite scale-invariant: a gradient with a component along the weight shifts the equilibrium."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from equilibria.theory._reals import Array, intrinsic_rate, reals
from equilibria.theory.citations import law


@law("smd", "Thm. 1", derived="balance of decay, radial pull and turning: y^2 + k y = 1")
def radial_strength(cosine: ArrayLike, *, decay_in_force: ArrayLike) -> Array:
    """How strongly a radial gradient disturbs the balance with weight decay: k = c sqrt(2 / (lr wd)).

    "Scale-invariant enough" is a statement about |k|, not about the cosine: below 0.1 norm and angle are within 5 % of
    the invariant law.

    Args:
        cosine: the mean cosine of weight and gradient as the optimizer uses it before momentum (g for SGD, g/sqrt(v)
            for Adam); the mean, not the root mean square: noise along the weight averages out.
        decay_in_force: lr wd per step; lr wd/(1-momentum) where weight decay is coupled to a gradient with momentum.

    Example:
        >>> float(radial_strength(1e-3, decay_in_force=1e-4).round(4))
        0.1414
    """
    return np.asarray(reals("cosine", cosine, low=-1, high=1) * np.sqrt(2 / intrinsic_rate(decay_in_force)))


@law("smd", "Thm. 1", derived="the positive root of y^2 + k y = 1")
def radial_balance(strength: ArrayLike) -> Array:
    """The equilibrium y over that of the invariant law: y^2 + k y = 1.

    y is (|w|/w0)^2 under SGD, whose gradients shrink as 1/|w|, and |w|/w0 where updates have a constant size (AdamW,
    Lion, Muon), with w0 the norm of the invariant law. The angle is 1/y times the law's.

    Args:
        strength: k of `radial_strength`; positive where the gradient step shrinks the weight.

    Example:
        >>> radial_balance([0.0, 0.1414, -0.1414]).round(3).tolist()
        [1.0, 0.932, 1.073]
    """
    k = reals("strength", strength)
    # 2 / (k + sqrt(k^2 + 4)) for k > 0, its mirror for k < 0: nothing cancels
    root = 2 / (np.abs(k) + np.sqrt(k**2 + 4))
    return np.asarray(np.where(k >= 0, root, 1 / root))
