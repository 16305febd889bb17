"""The reading of one optimizer step: inner products of weight, gradient, momentum buffer and move.

There are two ways to learn how a step moves a weight.

torch's SGD moves it by a fixed combination of three tensors that exist before the step (`sgd_combination`),

    w' - w = a g + b v - s w,      g: gradient, v: momentum buffer, s: share that weight decay removes,

so six inner products of w, g and v, formed before the step, give the norm, the angle and the length of the update.
Nothing is copied and nothing is read after the step.

Every other optimizer computes its update from state that this package does not model entry by entry (second moments,
signs, orthogonalised momentum, or anything at all in an unknown optimizer). There the weight is copied before the step
and compared with its copy after it (`CopyProbe`). The difference of two nearly equal float32 numbers is exact, so the
move loses no digits; the angle could not be recovered from the two norms, whose rounding errors exceed a small turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibria.errors import EquilibriaError
from equilibria.monitor.half_precision import Intended
from equilibria.monitor.settings_log import SettingsLog
from equilibria.monitor.step_memory import Pull
from equilibria.optimizers.controllers import StandsFor
from equilibria.optimizers.rules import GroupRule
from equilibria.tensors.device_queue import Sent, is_on_device, mark, seconds_between, sent_to_host
from equilibria.tensors.inner_products import CopyPass, MovesPass, ProductsPass
from equilibria.tensors.layout import aligned, as_real, copy_of, densify, flat, local
from equilibria.tensors.parameters import Watched

Array = NDArray[np.float64]

PRODUCTS = 9  # inner products per row of a reading
_COMPARED = 64  # entries that are compared to see whether a weight is what it was
_FEW_ROUNDINGS = 16  # in units of the type's eps: swapping weights by interpolation and back rounds them


@dataclass(slots=True)
class StepReading:
    """One sampled step of one optimizer; the inner products are still on the device that formed them.

    The lists have one entry per watched tensor.

    Attributes:
        count: steps that the optimizer had taken before this one.
        step: number of the step in the samples, shared by all watched optimizers.
        laws: the law of each parameter group.
        settings: settings of each parameter group at this step and at all steps since the previous reading; added last.
        combinations: the update as a combination of weight, gradient and buffer, as far as it is known.
        combined: whether the products are ww, wg, gg, wv, gv, vv of weight, gradient and buffer, from which the update
            follows; otherwise they are ww, wg, gg, we, ee, 0 with the measured move e.
        copied: whether the tensor was copied before the step, for the comparison after it.
        products: the inner products, (rows, 9): the six above; where a prediction starts, <w, m>, <m, m> and the sum
            of the second moments of the optimizer's state. Anything where there is nothing to read.
        missing: whether the tensor has no gradient, or is no longer in the optimizer.
        removed: whether it is no longer in the optimizer.
        late: whether the gradient is read after the step, together with the move.
        unread: whether the gradient could not be read: a closure computes it and the step may overwrite it.
        changed: whether the tensor was changed outside of the optimizer since the last step.
        starts: whether the prediction of this tensor starts at this step.
        promised: radians by which a controller turns this tensor in this step, NaN if it does not say; None for a
            tensor that no controller turns.
        stands_for: by parameter group, the run that its stored weights stand for.
        rescalings: what controllers multiplied the tensors by since the previous reading (what they stand for, if they
            stand for others): the count of the step that followed, and one factor per tensor; added last.
        grown: whether parameters were added to the optimizer since the previous reading.
        counters: step counts in the optimizer's own state, where predictions start; those on a device are sent.
        found_inf: not 0 if a fused optimizer skips the step; None if it cannot skip.
        grad_scale: factor that the gradients still contain; None if they are unscaled.
        pull: <g, last move> and Adam's <g, g/sqrt(v)>, from a few coordinates (`StepMemory`); None if they are unknown.
        intended: the squared length of the update without rounding (`IntendedUpdates`); None without 16-bit weights.
        marks: in the device's queue, before and after the work of reading; the last one follows the copies to the host.
    """

    count: int
    step: int
    laws: list[GroupRule]
    settings: list[SettingsLog]
    combinations: list[Combination]
    combined: list[bool]
    copied: list[bool]
    products: Tensor
    missing: list[bool]
    removed: list[bool]
    late: list[bool]
    unread: list[bool]
    changed: list[bool]
    starts: list[bool]
    promised: list[float | None]
    stands_for: dict[int, StandsFor] = field(default_factory=dict)
    rescalings: list[tuple[int, list[float]]] = field(default_factory=list)
    grown: bool = False
    counters: list[float | Sent] = field(default_factory=list)
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    pull: Pull | None = None
    intended: Intended | None = None
    marks: list[tuple[Any, Any]] = field(default_factory=list)

    def steps_taken(self) -> float:
        """The largest step count in the optimizer's own state."""
        return max((one if isinstance(one, float) else float(one.read().max()) for one in self.counters), default=0.0)

    def send_to_host(self) -> None:
        """Copy all numbers to main memory, without waiting for the device."""
        begin = mark(self.products.device)
        device = self.products.device
        self.products = sent_to_host(self.products)
        self.found_inf = None if self.found_inf is None else sent_to_host(self.found_inf)
        self.grad_scale = None if self.grad_scale is None else sent_to_host(self.grad_scale)
        self.marks.append((begin, mark(device)))

    def has_arrived(self) -> bool:
        """Whether the numbers are in main memory, after `send_to_host`."""
        last = self.marks[-1][1]
        return last is None or bool(last.query())

    def wait(self) -> float:
        """Wait until the numbers are in main memory; the seconds that reading took on the device."""
        last = self.marks[-1][1]
        if last is not None:
            last.synchronize()
        return sum(seconds_between(*pair) for pair in self.marks)


@dataclass(frozen=True)
class MeasuredStep:
    """One step of many weights, as inner products; w is the weight before the step and g its gradient.

    A step moves a weight by ``w' - w = e - s w``, where s is the share that weight decay removes, known exactly from
    the settings. The remainder e is as small as the turn itself, so that

        ||e_tangent||^2 = ||e||^2 - <w, e>^2 / ||w||^2,    tan(angle) = ||e_tangent|| ||w|| / ((1 - s) ||w||^2 + <w, e>)

    loses no digits; arccos of a float32 cosine has none left below 3e-4 rad.

    Attributes:
        ww: <w, w>.
        wg: <w, g>.
        gg: <g, g>.
        we: <w, e>, where the step moves the weight by e - shrink w.
        ee: <e, e>.
        vg: <v, g> with the momentum buffer v before the step; NaN where there is none.
        shrink: share of the weight that decay removes in this step.
    """

    ww: Array
    wg: Array
    gg: Array
    we: Array
    ee: Array
    vg: Array
    shrink: Array

    @cached_property
    def norm(self) -> Array:
        """||w|| before the step."""
        return np.sqrt(self.ww)

    @cached_property
    def norm_sq_after(self) -> Array:
        """||w'||^2."""
        kept = 1 - self.shrink
        with np.errstate(invalid="ignore", over="ignore"):
            return kept * kept * self.ww + 2 * kept * self.we + self.ee

    @cached_property
    def growth(self) -> Array:
        """||w'||^2 / ||w||^2 - 1, with all its digits."""
        s = self.shrink
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return s * (s - 2) + (2 * (1 - s) * self.we + self.ee) / self.ww

    @cached_property
    def moved(self) -> Array:
        """||w' - w||."""
        s = self.shrink
        with np.errstate(invalid="ignore", over="ignore"):
            return np.sqrt(np.maximum(self.ee - 2 * s * self.we + s * s * self.ww, 0.0))

    @cached_property
    def angle(self) -> Array:
        """Radians between w and w'; NaN for a weight that is zero or out of the range of its products."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            tangent_sq = np.maximum(self.ee - self.we * self.we / self.ww, 0.0)
            angle: Array = np.arctan2(np.sqrt(tangent_sq * self.ww), (1 - self.shrink) * self.ww + self.we)
        return np.where((self.ww > 0) & np.isfinite(self.ww) & np.isfinite(self.ee), angle, np.nan)

    @cached_property
    def cosine(self) -> Array:
        """Cosine of weight and gradient; 0 for a scale-invariant weight, NaN if either is zero."""
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            return self.wg / np.sqrt(self.ww * self.gg)


class Combination(NamedTuple):
    """Coefficients of an update: w' - w = gradient * g + buffer * v - shrink * w."""

    gradient: float
    buffer: float
    shrink: float


def sgd_combination(group: Mapping[str, Any], *, first: bool) -> Combination:
    """The update of torch's SGD.

    With momentum mu and dampening d, torch forms v' = mu v + (1 - d)(g + wd w) and moves the weight by -lr v', or by
    -lr (g + wd w + mu v') under Nesterov momentum. While there is no buffer, v' = g + wd w, undamped. Without momentum
    torch ignores the dampening. Collecting the factors of g, v and w gives the three coefficients.

    Args:
        group: a parameter group of a `torch.optim.SGD`.
        first: whether the parameter has no momentum buffer yet.

    Example:
        >>> group = {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": True,
        ...          "maximize": False}
        >>> sgd_combination(group, first=False)
        Combination(gradient=-0.19, buffer=-0.081..., shrink=0.0019)
    """
    lr, wd = float(group["lr"]), float(group["weight_decay"])
    momentum = float(group["momentum"])
    taken = 1.0 if first else 1.0 - float(group["dampening"])
    own, kept = (taken, momentum) if momentum else (1.0, 0.0)
    if group["nesterov"]:
        own, kept = 1.0 + momentum * taken, momentum * momentum
    sign = -1.0 if group["maximize"] else 1.0
    return Combination(-lr * own * sign, -lr * kept, lr * own * wd)


def add_products(one_pass: ProductsPass, row: int, watched: Watched, gradient: Tensor, buffer: Tensor | None) -> None:
    """Add the products of weight, gradient and buffer to a pass, from a row of its table on."""
    tensors = aligned(watched.weight, gradient, buffer, axis=watched.axis)
    one_pass.add(row, *tensors, rows=1 if watched.axis is None else tensors[0].shape[0])


class CopyProbe:
    """Copies a weight before a step and compares it after the step. The copy is allocated at first use."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._copy: Tensor | None = None
        self._layout: tuple[object, ...] = ()  # of the weight when the copy was allocated
        self._version = -1  # of the weight that the copy equals; -1 if it equals none
        self._views: tuple[int, NDArray[Any] | None, NDArray[Any] | None] = (-1, None, None)

    def remember(self, copies: CopyPass, *, factor: float = 1.0) -> bool:
        """Make the copy equal to the weight, when ``copies`` run.

        If the last step was compared too, the copy already is the weight after it, unless somebody changed the weight
        in between: then copying is needed.

        Args:
            copies: copies the weights, all of them together.
            factor: what controllers multiplied the weight by in between.

        Returns:
            False if the weight is seen to be another than the one after the last compared step, times the factor.
        """
        param = local(self._watched.weight)
        layout = param.shape, param.stride(), param.dtype, param.device
        if self._copy is None or self._layout != layout:
            self._copy, self._layout, self._views = copy_of(param), layout, (-1, None, None)
            return True
        is_fresh = self._version >= 0
        is_untouched = is_fresh and self._version == self._watched.weight._version
        # A change through ``.data`` leaves the version as it was: entries are compared unless that waits for a device.
        is_compared = is_fresh and (param.device.type == "cpu" or not is_untouched)
        is_same = not is_compared or self._has_same_entries(param, self._copy, factor)
        if not (is_untouched and is_same):
            copies.add(self._copy, param)
        return is_same

    def _has_same_entries(self, param: Tensor, copy: Tensor, factor: float) -> bool:
        """Compare a few entries with the copy's: in main memory through numpy first, where torch takes ten calls."""
        if self._views[0] != param.data_ptr():
            self._views = param.data_ptr(), _numpy_view(param), _numpy_view(copy)
        _, now, then = self._views
        is_equal = factor == 1 and now is not None and then is not None and np.array_equal(now, then)
        return is_equal or _same_entries(param, copy, factor)

    def compare(self, one_pass: MovesPass, row: int, gradient: Tensor | None, *, shrink: float, refresh: bool) -> None:
        """Add the move of the weight to a pass; call it after the step.

        Args:
            one_pass: forms the products.
            row: first row of its table for this tensor.
            gradient: None if it was read before the step, or if there is none.
            shrink: share of the weight that decay removed.
            refresh: whether the next step is compared too: then the copy becomes the weight in the same pass.
        """
        assert self._copy is not None  # remember() was called before the step
        param, axis = self._watched.weight, self._watched.axis
        self._version = param._version if refresh else -1
        after, before, grad = aligned(param, self._copy, None if gradient is None else densify(gradient), axis=axis)
        in_place = before.data_ptr() == self._copy.data_ptr()
        rows = 1 if axis is None else before.shape[0]
        one_pass.add(row, before, after, grad, shrink=shrink, refresh=refresh and in_place, rows=rows)
        if refresh and not in_place:
            self._copy.copy_(local(param))  # ``before`` is a rearranged copy, which the pass reads instead


def _some_entries(tensor: Tensor, *, like: Tensor) -> Tensor:
    entries = flat(tensor, like=like)
    return entries[:: max(1, len(entries) // _COMPARED)]


def _same_entries(tensor: Tensor, before: Tensor, factor: float) -> bool:
    """Whether a few entries are those of a tensor before, times a factor, up to rounding."""
    now, then = (_some_entries(as_real(x.detach()), like=as_real(tensor.detach())) for x in (tensor, before))
    return tensor.numel() == 0 or bool(torch.all((now - then * factor).abs() <= _tolerance(then)))


class WeightMarks:
    """What weights looked like after the last step, to see whether something else has changed them since.

    Torch counts the in-place changes of a tensor in ``_version``; ``p.data = other`` is not counted, but moves the
    tensor in memory. Where either shows a change, a few entries decide: weights that were swapped for others and back,
    as for an evaluation with their averages, have not changed.

    In main memory the entries are read through numpy, without an operation of torch: a step between samples runs none.
    On a device they are read from the first touch on, which itself counts as a change: one launch a step for all of
    them, and one wait in a step before which something touched some.

    Args:
        params: the weights; none of them sharded.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self.versions: list[int] = []
        self._addresses: list[int] = []
        self._views: list[NDArray[Any] | None] = [None] * len(self._params)  # of the entries in main memory
        self._viewed = [-1] * len(self._params)  # the address that each view was made for
        self._entries: list[NDArray[Any] | Tensor | None] = []
        self._was_touched = False

    def forget(self) -> None:
        """Compare with nothing until the weights are marked again."""
        self.versions = []

    def mark(self, *, may_operate: bool) -> None:
        """Remember the weights as they are.

        Args:
            may_operate: whether operations of torch are allowed, as after a sampled step.
        """
        self.versions = [param._version for param in self._params]
        self._addresses = [param.data_ptr() for param in self._params]
        if may_operate:
            self._make_views(range(len(self._params)))
        self._entries = [
            view.copy() if view is not None and viewed == address else None
            for view, viewed, address in zip(self._views, self._viewed, self._addresses, strict=True)
        ]
        if self._was_touched:
            self._mark_on_devices()

    def _mark_on_devices(self) -> None:
        """Copy the entries of all weights of one device and type together."""
        alike: dict[Any, list[int]] = {}
        for index, param in enumerate(self._params):
            if self._entries[index] is None and is_on_device(param):
                alike.setdefault((param.device, param.dtype), []).append(index)
        for indices in alike.values():
            weights = [as_real(self._params[index].detach()) for index in indices]
            views = [_some_entries(weight, like=weight) for weight in weights]
            parts = torch.split(torch.cat(views), [len(view) for view in views])
            for index, part in zip(indices, parts, strict=True):
                self._entries[index] = part

    def changed(self, own: Sequence[tuple[int, float]] | None) -> list[int]:
        """The weights that something else has changed, by their index.

        Args:
            own: for each weight the number of changes that controllers announced and the factor that they multiplied it
                by, since the weights were marked; None if they announced nothing.
        """
        touched = [
            index
            for index, (param, version, address) in enumerate(
                zip(self._params, self.versions, self._addresses, strict=False)
            )
            if param._version - version != (0 if own is None else own[index][0]) or param.data_ptr() != address
        ]
        if not touched:
            return []
        self._was_touched = True
        self._make_views(touched)
        same = [self._is_same(index, 1.0 if own is None else own[index][1]) for index in touched]
        on_device = [flag for flag in same if isinstance(flag, Tensor)]
        known = iter(torch.stack([flag.to(on_device[0].device) for flag in on_device]).tolist() if on_device else ())
        is_same = [next(known) if isinstance(flag, Tensor) else flag for flag in same]
        return [index for index, flag in zip(touched, is_same, strict=True) if not flag]

    def _make_views(self, indices: Iterable[int]) -> None:
        for index in indices:
            param = self._params[index]
            if self._viewed[index] != param.data_ptr():
                self._views[index], self._viewed[index] = _numpy_view(param), param.data_ptr()

    def _is_same(self, index: int, factor: float) -> bool | Tensor:
        """Whether the entries are those that were marked, times a factor, up to rounding; still on its device there."""
        before, view, param = self._entries[index], self._views[index], self._params[index]
        if isinstance(before, Tensor) and before.device == param.device:
            weight = as_real(param.detach())
            after = _some_entries(weight, like=weight)
            return torch.all((after - before * factor).abs() <= _tolerance(before))
        if not isinstance(before, np.ndarray) or view is None or view.shape != before.shape:
            return False  # nothing to compare with
        if before.dtype.kind != "f":
            return factor == 1 and np.array_equal(view, before)
        return bool(np.all(np.abs(view - before * before.dtype.type(factor)) <= _tolerance(before)))


def _tolerance(entries: Any) -> Any:
    """The rounding of a few operations on entries of this size."""
    kind = torch.finfo if isinstance(entries, Tensor) else np.finfo
    return _FEW_ROUNDINGS * float(kind(entries.dtype).eps) * abs(entries).max()


def _numpy_view(param: Tensor) -> NDArray[Any] | None:
    """A few entries of a weight as numpy sees its memory: bits where numpy lacks the type; None if it cannot."""
    if param.device.type != "cpu" or param.layout != torch.strided or param.numel() == 0:
        return None
    entries = _some_entries(as_real(param.detach()), like=as_real(param.detach()))
    if entries.data_ptr() != param.data_ptr():
        return None  # a rearranged copy
    if entries.dtype not in (torch.float16, torch.float32, torch.float64):
        entries = entries.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[entries.element_size()])
    return entries.numpy()


def angle_between(first: Tensor, second: Tensor) -> float:
    """The angle between two tensors in radians, accurate to the last digits however small it is.

    Args:
        first: any tensor, not zero.
        second: a tensor of the same number of entries, not zero.

    Returns:
        Between 0 and pi.

    Example:
        >>> w = torch.ones(1000)
        >>> turned = w + 2**-17 * torch.tensor([1.0, -1.0]).repeat(500)
        >>> angle_between(w, turned) * 2**17
        0.99999999...
    """
    a, b = (as_real(tensor.detach()).double().reshape(-1) for tensor in (first, second))
    if a.numel() != b.numel():
        raise EquilibriaError(f"got tensors of {a.numel()} and {b.numel()} entries; expected the same number")
    lengths = [float(torch.linalg.vector_norm(vector)) for vector in (a, b)]
    if not all(length > 0 and np.isfinite(length) for length in lengths):
        raise EquilibriaError(f"got tensors of norm {lengths[0]:g} and {lengths[1]:g}; expected finite, not zero")
    a, b = a / lengths[0], b / lengths[1]
    apart, together = (float(torch.linalg.vector_norm(vector)) for vector in (a - b, a + b))
    return 2 * float(np.arctan2(apart, together))
