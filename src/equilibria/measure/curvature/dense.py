"""Eigenpairs of a small matrix, all of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equilibria.measure.curvature.eigenpairs import Eigenpairs, relative
from equilibria.measure.curvature.lanczos import EXHAUSTED
from equilibria.measure.curvature.memory import BESIDE, Memory


def dense_eigenpairs(
    matrix: Tensor, *, k: int, end: str, tol: float, noise: float, asymmetry: float = 0.0
) -> Eigenpairs:
    """The k largest or smallest eigenvalues of a symmetric matrix, exact up to the rounding of its entries.

    Rounding inside the loss counts as far as it makes the matrix asymmetric; what it does symmetrically is not seen.

    Args:
        matrix: symmetric; every row counts as one product.
        k: how many.
        end: "top" or "bottom".
        tol: what the bounds of the relative errors must be within to call it converged.
        noise: relative error of a row.
        asymmetry: norm of what was not symmetric in the rows as they were computed: what rounding really did.

    Example:
        >>> dense_eigenpairs(torch.diag(torch.tensor([1.0, 3.0, 2.0])), k=2, end="top", tol=1e-2, noise=1e-7).values
        (3.0, 2.0)
    """
    wide = matrix.double()
    values, vectors = torch.linalg.eigh(wide if end == "top" else -wide)
    sign = 1.0 if end == "top" else -1.0
    values, rows = values.flip(0), vectors.flip(1).T
    residuals = torch.linalg.vector_norm(rows @ wide - sign * values[:, None] * rows, dim=1)
    rounding = noise * len(matrix) * float(values.abs().max()) + asymmetry
    age = np.zeros((min(k + BESIDE, len(matrix)),) * 2)
    bound = tuple(relative(rounding, value) for value in values[:k].tolist())
    return Eigenpairs(
        values=tuple(sign * value for value in values[:k].tolist()),
        vectors=rows[:k].to(matrix.dtype),
        residuals=tuple(residuals[:k].tolist()),
        bound=bound,
        hvps=len(matrix),
        converged=max(bound) <= tol,
        reason=EXHAUSTED,
        certified=True,
        followed=0,
        memory=Memory(rows[: k + BESIDE].to(matrix.dtype), np.diag(values[: k + BESIDE].numpy(force=True)), age),
    )
