"""Nearly invariant weights: the balance, and simulated trainings with a radial gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibria.errors import EquilibriaError
from equilibria.theory.radial import radial_balance, radial_strength


@given(st.floats(-50, 50))
def test_the_balance_is_the_positive_root(k):
    y = float(radial_balance(k))
    assert y > 0
    assert y**2 + k * y == pytest.approx(1, abs=1e-9)
    assert y * float(radial_balance(-k)) == pytest.approx(1)


def simulated_norm_sq(cosine: float, *, lr: float, decay: float, dim: int = 400, steps: int = 40_000) -> float:
    """Mean ||w||^2 of plain SGD whose unit gradients have this cosine with the weight."""
    draw = np.random.default_rng(0)
    norm_sq, total, count = lr / np.sqrt(2 * decay), 0.0, 0
    for step in range(steps):
        # only the norm is followed: |w'|^2 = (1-eps)^2 |w|^2 - 2 (1-eps) lr <w, g> + lr^2 |g|^2, |g| = |u| / |w|
        unit_sq = draw.chisquare(dim) / dim
        along = cosine * np.sqrt(unit_sq)
        norm_sq = (1 - decay) ** 2 * norm_sq - 2 * (1 - decay) * lr * along + lr**2 * unit_sq / norm_sq
        if step > steps // 4:
            total, count = total + norm_sq, count + 1
    return total / count


@pytest.mark.parametrize("cosine", [-3e-3, 1e-3, 3e-3])
def test_simulated_norms_are_the_balance(cosine):
    lr, decay = 0.1, 1e-4
    invariant = simulated_norm_sq(0.0, lr=lr, decay=decay)
    y = float(radial_balance(radial_strength(cosine, decay_in_force=decay)))
    assert simulated_norm_sq(cosine, lr=lr, decay=decay) / invariant == pytest.approx(y, rel=0.01)


def test_a_decay_of_zero_is_refused():
    with pytest.raises(EquilibriaError, match="intrinsic_lr"):
        radial_strength(0.1, decay_in_force=0.0)
