"""The compiled loop of the engine: every gradient and every optimizer step, trial by trial.

All of it is in one file, because what the compiler keeps on disk is renewed when this file changes, not when another
one does. A trial never sees its neighbours, so its numbers do not depend on how many of them there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibria._compiled import compiled, inner

Array = NDArray[Any]

# What a problem is to the loop, and what its row of data holds:
QUOTIENT = 0  # noise, eigenvalues
SPHERE3D = 1  # rotation, row by row
SPHERE_VALLEY = 2  # a, b, rotation
VALLEY = 3  # nothing
LOGISTIC = 4  # 1.0 if normalised
REGRESSION = 5  # samples, std of the targets, standardised targets, centred inputs row by row
COMPLETION = 6  # dimension, observations, scale, targets, rows, columns

# Positions in the settings of an optimizer:
MOMENTUM, KEPT, NESTEROV, PROJECTED, ADAPTIVE, MOMENT_DECAY = range(6)


@inner
def _inverse(x: float) -> float:
    """1/x; not a number at 0, where compiled code would raise an error that names no step."""
    return 1.0 / x if x != 0.0 else np.nan


@inner
def _dot(x: Array, y: Array) -> float:
    total = 0.0
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@inner
def _quotient(w: Array, draws: Array, data: Array, g: Array) -> None:
    """(P A x + noise P e)/|w| with x = w/|w|: of w'Aw/(2 w'w) + noise e'w/|w|."""
    spectrum = data[1:]
    norm_sq = quadratic = 0.0
    for i in range(w.size):
        norm_sq += w[i] * w[i]
        quadratic += spectrum[i] * w[i] * w[i]
    inverse = _inverse(norm_sq)
    if draws.size == 0:
        for i in range(w.size):
            g[i] = (spectrum[i] - quadratic * inverse) * inverse * w[i]
        return
    noise = data[0] * np.sqrt(inverse)
    level = (quadratic * inverse + noise * _dot(draws, w)) * inverse
    for i in range(w.size):
        g[i] = (spectrum[i] * inverse - level) * w[i] + noise * draws[i]


@inner
def _rotated(rotation: Array, w: Array, u: Array) -> None:
    for i in range(3):
        u[i] = rotation[3 * i] * w[0] + rotation[3 * i + 1] * w[1] + rotation[3 * i + 2] * w[2]


@inner
def _rotated_back(rotation: Array, u: Array, w: Array) -> None:
    for i in range(3):
        w[i] = rotation[i] * u[0] + rotation[3 + i] * u[1] + rotation[6 + i] * u[2]


@inner
def _sphere3d(w: Array, rotation: Array, scratch: Array, g: Array) -> None:
    """Of 2 - (x+y)/sqrt(q), q = x^2 - xy + y^2."""
    u, own = scratch[:3], scratch[3:6]
    _rotated(rotation, w, u)
    x, y = u[0], u[1]
    q = x * x - x * y + y * y
    inverse = _inverse(q)
    pull, root = 0.5 * (x + y) * inverse, np.sqrt(inverse)
    own[0], own[1], own[2] = (pull * (2 * x - y) - 1) * root, (pull * (2 * y - x) - 1) * root, 0.0
    _rotated_back(rotation, own, g)


@inner
def _sphere_valley(w: Array, data: Array, scratch: Array, g: Array) -> None:
    """Of (x/r)^2 (a + b (y/r)^2)/2."""
    a, b, rotation = data[0], data[1], data[2:]
    u, own = scratch[:3], scratch[3:6]
    _rotated(rotation, w, u)
    inverse = _inverse(u[0] * u[0] + u[1] * u[1] + u[2] * u[2])
    across, along = u[0] * u[0] * inverse, u[1] * u[1] * inverse
    height, side = a + b * along, b * across
    radial = height * across + side * along
    for i in range(3):
        own[i] = -radial * u[i] * inverse
    own[0] += height * u[0] * inverse
    own[1] += side * u[1] * inverse
    _rotated_back(rotation, own, g)


@inner
def _valley(w: Array, g: Array) -> None:
    """Of (1 + y^2) x^2/2."""
    x, y = w[0], w[1]
    g[0], g[1] = (1 + y * y) * x, y * x * x


@inner
def _logistic(w: Array, x: Array, normalised: bool, g: Array) -> None:
    """Of ln(1 + exp(-label u)) on one sample x, label sign(x_1), u = x.w or x.w/|w|."""
    label = 1.0 if x[0] >= 0 else -1.0
    along = _dot(x, w)
    inverse = _inverse(_dot(w, w)) if normalised else 1.0
    root = np.sqrt(inverse)
    push = -label * _inverse(1.0 + np.exp(label * along * root)) * root
    shared = push * along * inverse if normalised else 0.0
    for i in range(w.size):
        g[i] = push * x[i] - shared * w[i]


@inner
def _standardised_residual(a: Array, scale: float, targets: Array) -> None:
    """In place of pre-activations a: the gradient of mean((scale a/s - targets)^2), s = sqrt(mean(a^2)), in them."""
    n = a.size
    inverse = _inverse(np.sqrt(_dot(a, a) / n))
    along = 0.0
    for i in range(n):
        a[i] *= inverse
        along += a[i] * (scale * a[i] - targets[i])
    along /= n
    factor = 2 * scale / n * inverse
    for i in range(n):
        a[i] = factor * (scale * a[i] - targets[i] - along * a[i])


@inner
def _regression(w: Array, data: Array, scratch: Array, g: Array) -> None:
    n, size = int(data[0]), w.size
    targets, inputs = data[2 : 2 + n], data[2 + n :]
    a = scratch[:n]
    for i in range(n):
        a[i] = _dot(inputs[i * size : (i + 1) * size], w)
    _standardised_residual(a, data[1], targets)
    for j in range(size):
        g[j] = 0.0
    for i in range(n):
        row, weight = inputs[i * size : (i + 1) * size], a[i]
        for j in range(size):
            g[j] += weight * row[j]


@inner
def _completion(w: Array, data: Array, places: Array, scratch: Array, g: Array) -> None:
    """Only the products of observed entries are formed; ``places``: where their rows of U and V begin in w."""
    dim, n = int(data[0]), int(data[1])
    a = scratch[:n]
    for k in range(n):
        a[k] = _dot(w[places[0, k] : places[0, k] + dim], w[places[1, k] : places[1, k] + dim])
    _standardised_residual(a, data[2], data[3 : 3 + n])
    for j in range(w.size):
        g[j] = 0.0
    for k in range(n):
        left, right, weight = places[0, k], places[1, k], a[k]
        u, v = w[left : left + dim], w[right : right + dim]
        gu, gv = g[left : left + dim], g[right : right + dim]
        for j in range(dim):
            gu[j] += weight * v[j]
        for j in range(dim):
            gv[j] += weight * u[j]


@inner
def _places(data: Array) -> Array:
    dim, n = int(data[0]), int(data[1])
    places = np.empty((2, n), np.int64)
    for k in range(n):
        places[0, k] = int(data[3 + n + k]) * dim
        places[1, k] = dim * dim + int(data[3 + 2 * n + k]) * dim
    return places


@inner
def _gradient(kind: int, w: Array, draws: Array, data: Array, places: Array, scratch: Array, g: Array) -> None:
    if kind == SPHERE3D:
        _sphere3d(w, data, scratch, g)
    elif kind == SPHERE_VALLEY:
        _sphere_valley(w, data, scratch, g)
    elif kind == VALLEY:
        _valley(w, g)
    elif kind == LOGISTIC:
        _logistic(w, draws, data[0] != 0, g)
    elif kind == REGRESSION:
        _regression(w, data, scratch, g)
    elif kind == COMPLETION:
        _completion(w, data, places, scratch, g)


@inner
def _descend(
    w: Array,
    buffer: Array,
    g: Array,
    lr: float,
    decay: float,
    fresh: bool,
    momentum: float,
    kept: float,
    nesterov: bool,
) -> None:
    """One step of torch.optim.SGD with coupled weight decay; a fresh buffer takes the first gradient undamped."""
    if momentum == 0:
        for i in range(w.size):
            w[i] -= lr * (g[i] + decay * w[i])
        return
    for i in range(w.size):
        push = g[i] + decay * w[i]
        held = push if fresh else momentum * buffer[i] + kept * push
        buffer[i] = held
        w[i] -= lr * (push + momentum * held if nesterov else held)


@inner
def _adapt(w: Array, moment: Array, g: Array, lr: float, kept: float) -> None:
    """One step of scalar RMSprop; the old moment is used."""
    rate = lr * _inverse(np.sqrt(moment[0]))
    moment[0] = kept * moment[0] + (1 - kept) * _dot(g, g)
    for i in range(w.size):
        w[i] -= rate * g[i]


@inner
def _scale_to(w: Array, norm: float) -> None:
    factor = norm * _inverse(np.sqrt(_dot(w, w)))
    for i in range(w.size):
        w[i] *= factor


@compiled(
    "void(int64, float64[:, ::1], float64[:, ::1], float64[:, ::1], "
    "float64[:, :, ::1], float64[:, ::1], float64[::1], float64[::1], int64, int64, boolean, float64[::1], int64)"
)
def take_steps(
    kind: int,
    weights: Array,
    buffers: Array,
    moments: Array,
    draws: Array,
    data: Array,
    lrs: Array,
    decays: Array,
    begin: int,
    end: int,
    fresh: bool,
    settings: Array,
    room: int,
) -> None:
    """Take steps ``begin`` to ``end`` of a block with every trial.

    Args:
        kind: which problem; one of the constants above.
        weights: (trials, size); changed.
        buffers: momentum, of the same shape; changed.
        moments: (trials, 1) second moments of adaptive steps; changed.
        draws: (trials, steps of the block, draws) standard normal numbers.
        data: (trials or 1, k).
        lrs: learning rate of each step of the block.
        decays: weight decay likewise.
        begin: first step of the block to take.
        end: the step after the last.
        fresh: whether the momentum buffers are empty.
        settings: of the optimizer, by the positions above.
        room: numbers of scratch that the problem needs.
    """
    momentum, kept, nesterov = settings[MOMENTUM], settings[KEPT], settings[NESTEROV] != 0
    projected, adaptive = settings[PROJECTED] != 0, settings[ADAPTIVE] != 0
    g, scratch, places = np.empty(weights.shape[1]), np.empty(room), np.empty((2, 0), np.int64)
    for trial in range(weights.shape[0]):
        w, buffer, moment = weights[trial], buffers[trial], moments[trial]
        own = data[trial if data.shape[0] > 1 else 0]
        if kind == COMPLETION:
            places = _places(own)
        for step in range(begin, end):
            norm = np.sqrt(_dot(w, w)) if projected else 0.0
            if kind == QUOTIENT:  # so short that it feels the call of the others
                _quotient(w, draws[trial, step], own, g)
            else:
                _gradient(kind, w, draws[trial, step], own, places, scratch, g)
            if adaptive:
                _adapt(w, moment, g, lrs[step], settings[MOMENT_DECAY])
            else:
                first = fresh and step == begin
                _descend(w, buffer, g, lrs[step], decays[step], first, momentum, kept, nesterov)
            if projected:
                _scale_to(w, norm)
