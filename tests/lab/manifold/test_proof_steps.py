"""Steps of the proofs of sharpness reduction (appendices H to M) on a curved surface of minimisers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from tests.helpers.minimiser_worlds import curved, onto_curved, world

from equilibria.lab.manifold import grad_log_sharpness, project
from equilibria.theory.flow import projection_shift
from equilibria.theory.hamiltonian import rms_drift

START = onto_curved(np.random.default_rng(3).standard_normal(4))
START /= np.linalg.norm(START)


def limit(point):
    return project(world(curved, *point), None).point["w"].numpy() / np.linalg.norm(point)


def unit(vector):
    return vector / np.linalg.norm(vector)


def order(errors):
    """Of errors at steps that are halved; the last pair is nearest to the limit."""
    return math.log2(errors[-2] / errors[-1])


@pytest.fixture(scope="module")
def there():
    """Top eigenvector at the start, across the surface, and slope of log lambda1 along it."""
    found = grad_log_sharpness(world(curved, *START), None)
    return found.top_vector["w"].numpy(), found.gradient["w"].numpy()


def test_the_projection_moves_with_a_point_along_the_surface_and_to_second_order_across_it(there):
    """Lemmas I.4 and I.5: the latter's second derivative is not zero."""
    (top, slope), step = there, 0.02
    along = unit(slope)

    def moves(direction):
        return [limit(START + sign * step * direction) - START for sign in (1, -1)]

    ahead, behind = moves(along)
    assert (ahead - behind) / (2 * step) == pytest.approx(along, abs=5 * step**2)
    ahead, behind = moves(top)
    assert (ahead - behind) / (2 * step) == pytest.approx(np.zeros(4), abs=5 * step**2)
    assert (ahead + behind) / 2 == pytest.approx(projection_shift(slope, step), abs=5 * step**4)


def test_the_projection_in_the_plane_by_its_invariant():
    """Lemma I.2: of (1 + y^2) x^2/2 the flow keeps ln y + y^2/2 - x^2/2, and log lambda1 = ln(1 + y^2)."""
    y, x = 1.4, 1e-3
    end = brentq(lambda z: math.log(z) + z * z / 2 - (math.log(y) + (y * y - x * x) / 2), 1, 2, xtol=1e-15)
    assert end - y == pytest.approx(float(projection_shift([2 * y / (1 + y * y)], x)[0]), rel=1e-5)


def test_a_point_is_across_the_surface_from_its_projection_up_to_second_order(there):
    """Lemmas H.6, H.15, I.6: half the squared distance towards the centre, and the shift against the slope."""
    top, slope = there
    gap = START + 0.01 * top
    gap = unit(gap) - limit(gap)
    rest = np.linalg.norm(gap - top * (top @ gap))
    assert rest / (gap @ gap) == pytest.approx(math.hypot(1 / 2, np.linalg.norm(slope) / 4), rel=0.01)


def gradient(point):
    leaf = torch.tensor(point, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(curved(leaf), leaf)
    return slope.numpy()


def hidden(point, moment, eta):
    """phi, h, u of eq. (16), and the slope of log lambda1 at phi."""
    foot = limit(point)
    there = grad_log_sharpness(world(curved, *foot), None)
    across = there.top_vector["w"].numpy()
    across *= np.sign(across @ (point - foot))
    lr = 2 / there.sharpness
    return foot, across @ (point - foot) / eta, (lr**2 * moment - 1) / eta, there.gradient["w"].numpy()


def test_two_steps_at_the_edge_are_a_drift_transition(there):
    """Lemmas J.5, J.6, K.1, K.2 and H.20, eq. (23), (25), (26): projected descent with the RMSprop scheduler."""
    errors, (top, _), c_b = [], there, 1.5
    for eta in (0.01, 0.005):
        point = unit(START + 0.5 * eta * top)
        edge = 2 / grad_log_sharpness(world(curved, *limit(point)), None).sharpness
        moment = (1 + 0.7 * eta) / edge**2
        foot, h, u, slope = hidden(point, moment, eta)
        moved, v = point, moment
        for _ in range(2):
            slope_here = gradient(moved)
            moved = unit(moved - slope_here / math.sqrt(v))
            v += c_b * eta**2 * (slope_here @ slope_here / eta**2 - v)
        foot_after, h_after, u_after, _ = hidden(moved, v, eta)
        drift = rms_drift(h, u, pairs=1, eta=eta, grad_norm=np.linalg.norm(slope), c_b=c_b)
        errors.append(
            (
                abs(h_after - drift.displacement[1]),
                abs(u_after - drift.offset[1]),
                np.linalg.norm(foot_after - foot + drift.descent[0] * slope),
            )
        )
        assert np.linalg.norm(foot_after - foot) > 20 * eta * errors[-1][2]  # the drift itself is of second order
    orders = [order(column) for column in zip(*errors, strict=True)]
    assert orders[0] > 1.8 and orders[1] > 1.8 and orders[2] > 2.8
