"""The Polyak-Lojasiewicz condition: a gradient large enough for the height above the minimum, and its consequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from equilibria.errors import EquilibriaError, positive, whole
from equilibria.theory._reals import Array, nonnegative_reals, positive_reals
from equilibria.theory.citations import law
from equilibria.theory.stability import stability_ratio


@law("sharp", "Definitions 4.2, D.2")
def pl_constant(loss_gap: ArrayLike, grad_sq: ArrayLike) -> float:
    """Largest ``mu`` that measured points allow: the least ``|grad L|^2 / (2 (L - L*))``.

    Args:
        loss_gap: ``L - L*`` at each point, positive.
        grad_sq: ``|grad L|^2`` there; on the unit sphere if the loss is scale-invariant.

    Returns:
        ``mu``; the points satisfy the condition with every constant up to it.

    Example:
        >>> pl_constant([0.5, 2.0], [1.0, 3.0])
        0.75
    """
    return float(np.min(nonnegative_reals("grad_sq", grad_sq) / (2 * positive_reals("loss_gap", loss_gap))))


@dataclass(frozen=True, slots=True)
class LocalConstant:
    """The constant of the Polyak-Lojasiewicz condition close to a manifold of minimisers.

    Attributes:
        limit: largest constant, in the limit of a small neighbourhood.
        printed: the proof's, in the same limit.
    """

    limit: float
    printed: float


@law(
    "sharp",
    "Theorems D.3, D.5",
    corrected="largest constant: the proof's lambda_min^2/(2 lambda_max) is at most half of it; for theorem D.5 the "
    "proof refers to D.5 itself where D.3 is meant",
)
def local_pl_constant(eigenvalues: ArrayLike, *, rank: int) -> LocalConstant:
    """Constant of the condition near minimisers whose Hessian has a given rank: its smallest non-zero eigenvalue.

    Args:
        eigenvalues: of the Hessian at a minimiser, in any order; at several, one minimiser per row.
        rank: of the Hessian, ``D - D_Gamma``; the other eigenvalues are zero up to rounding.

    Returns:
        The limit, over all rows, and the proof's constant.

    Raises:
        EquilibriaError: one of the ``rank`` largest eigenvalues is not positive.

    Example:
        >>> local_pl_constant([4.0, 1.0, 0.0], rank=2)
        LocalConstant(limit=1.0, printed=0.125)
    """
    values = np.sort(np.atleast_2d(np.asarray(eigenvalues, dtype=np.float64)))
    least = float(values[:, -min(whole("rank", rank, low=1), values.shape[1])].min())
    if rank > values.shape[1] or not least > 0:
        raise EquilibriaError(
            f"got rank={rank} with an eigenvalue of {least:g}; expected positive ones", argument="rank"
        )
    return LocalConstant(least, least**2 / (2 * float(values[:, -1].max())))


@law("sharp", "Theorems D.4, D.6")
def flow_length(loss_gap: ArrayLike, constant: float) -> Array:
    """Upper bound on the way of the gradient flow to its limit, if it stays where the condition holds.

    ``sqrt(2 (L - L*)/mu)``, so that it ends close to where it begins. On spheres of norm up to ``sqrt(2)`` a
    scale-invariant loss has at least half the constant of the unit sphere.

    Args:
        loss_gap: ``L - L*`` at the start.
        constant: ``mu`` of `pl_constant`.

    Returns:
        Length of the path; the distance from start to limit is no longer.

    Example:
        >>> float(flow_length(0.5 * 4.0 * 0.1**2, 4.0))  # straight into a quadratic valley of curvature 4
        0.1
    """
    return np.sqrt(2 * nonnegative_reals("loss_gap", loss_gap) / positive("constant", constant))


@law("sharp", "Lemma G.1")
def root_gap_drop(grad_norm: ArrayLike, *, effective_lr: ArrayLike, max_sharpness: ArrayLike, constant: float) -> Array:
    """Least decrease of ``sqrt(L - L*)`` in one step of gradient descent below the edge of stability.

    ``sqrt(mu/2) (1 - eta lambda_max/2) eta |grad L(theta)|``: summed over steps, it bounds the way that they go.

    Args:
        grad_norm: ``|grad L(theta)|``.
        effective_lr: ``eta``.
        max_sharpness: ``lambda_max`` of `stability.descent_bound`.
        constant: ``mu`` of `pl_constant`.

    Returns:
        The decrease; 0 or less from ``eta = 2/lambda_max`` on, where the lemma ends.

    Example:
        >>> float(root_gap_drop(0.4, effective_lr=0.25, max_sharpness=4.0, constant=2.0))
        0.05
    """
    slack = 1 - stability_ratio(effective_lr, max_sharpness)
    step = positive_reals("effective_lr", effective_lr) * nonnegative_reals("grad_norm", grad_norm)
    drop: Array = np.sqrt(positive("constant", constant) / 2) * slack * step
    return drop


@law(
    "sharp",
    "Lemma G.2",
    corrected="C_2 = 2 lambda_max, from a step of 1/lambda_max in the descent lemma; after eq. (14) the gradient is at "
    "most the root of C_2 (L - L*), printed without the root",
)
def grad_sq_bound(loss_gap: ArrayLike, max_sharpness: ArrayLike) -> Array:
    """Upper bound on the squared gradient close to the minimisers: ``2 lambda_max (L - L*)``.

    Args:
        loss_gap: ``L - L*``.
        max_sharpness: ``lambda_max``, as in `root_gap_drop`, along a step of ``1/lambda_max``.

    Returns:
        The bound on ``|grad L|^2``.

    Example:
        >>> float(grad_sq_bound(0.5, 4.0))
        4.0
    """
    return 2 * nonnegative_reals("max_sharpness", max_sharpness) * nonnegative_reals("loss_gap", loss_gap)
