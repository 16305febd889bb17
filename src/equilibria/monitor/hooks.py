"""The hooks on one optimizer: they glance at every step, and read the sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from equilibria.monitor.reading import Combination, CopyProbe, add_products, sgd_combination
from equilibria.monitor.settings_log import SettingsLog
from equilibria.optimizers.rules import GroupRule, follows, rule_of_group
from equilibria.tensors.inner_products import MovesPass, ProductsPass
from equilibria.tensors.layout import densify, is_sharded, local, rows
from equilibria.tensors.parameters import Watched
from equilibria.theory.rules import SGDW, AdamW, Lion, Muon

_EXACT = (torch.float32, torch.float64)
PRODUCTS = 9  # numbers per unit in a reading


@dataclass(slots=True)
class Reading:
    """What one sampled step of one optimizer gave, still on the device where it was formed.

    The lists have one entry per watched tensor.

    Attributes:
        count: the optimizer's own count of steps.
        label: what the samples call the step.
        laws: the law of each parameter group.
        combinations: the update as a combination of weight, gradient and buffer, as far as it is known.
        combined: whether its products are ww, wg, gg, wv, gv, vv of weight, gradient and buffer, from which the update
            follows; otherwise ww, wg, gg, we, ee, 0 with the measured move e.
        copied: whether the tensor was copied, to be compared after the step.
        products: the inner products, (units, 9): the six above, and for optimizers that have them and a new beginning
            <w, m>, <m, m> and the sum of the second moments. NaN without a gradient.
        missing: whether there is no gradient.
        late: whether the gradient is read after the step, together with the move.
        unread: whether there was no moment to read the gradient: a closure makes it, the step may overwrite it.
        changed: whether the tensor was changed since the last step.
        begin: whether its forecast is to begin anew.
        steps_taken: steps that the optimizer's own state counts.
        found_inf: not 0 where a fused optimizer skips the step; None if it cannot.
        grad_scale: by which the gradients are still multiplied; None if they are not.
    """

    count: int
    label: int
    laws: list[GroupRule]
    combinations: list[Combination]
    combined: list[bool]
    copied: list[bool]
    products: Tensor
    missing: list[bool]
    late: list[bool]
    unread: list[bool]
    changed: list[bool]
    begin: list[bool]
    steps_taken: float = 0.0
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None


class Listener(Protocol):
    """What a tap asks and tells.

    Attributes:
        latest: the label of the latest step of any optimizer.
    """

    latest: int

    def is_due(self, tap: Tap) -> bool:
        """Whether the step that begins now is to be sampled; asked once per step."""

    def take(self, tap: Tap, reading: Reading) -> None:
        """A sampled step is over."""

    def next_is_due(self) -> bool:
        """Whether the step after this one is sampled too, as far as is known."""

    def guarded(self, work: Callable[[], None]) -> None:
        """Do it, and never let an error out into the training."""

    def missed(self, tap: Tap) -> None:
        """A step that was due is over; `take` may not have been called for it, after an error."""


class Tap:
    """Hooks on one optimizer.

    Args:
        optimizer: what to listen to.
        watched: the tensors of it that are watched.
        listener: who is asked which steps to sample, and told what they gave.

    Attributes:
        count: how many steps it has taken.
        label: what the samples call the step that begins now. It is never below a label given before, whichever
            optimizer that was for, and differs from step to step.
        last: the label of its last step.
    """

    def __init__(self, optimizer: Optimizer, watched: Sequence[Watched], *, listener: Listener) -> None:
        self.watched = list(watched)
        self.count, self.label, self.last = 0, 0, -1
        self.logs = [SettingsLog() for _ in optimizer.param_groups]
        self._listener = listener
        self._rows = _row_slices(self.watched)
        self._units = sum(each.units for each in watched)
        # Asked at every step. Sharded tensors are left out: gathering and scattering them counts as changes.
        self._versioned = [each.param for each in watched if not is_sharded(each.param)]
        self._versions: list[int] = []
        self._places: list[int] = []  # in memory, after the last sampled step
        self._changed = [False] * len(watched)
        self._reading: Reading | None = None
        self._begun = [False] * len(watched)  # whose forecast has begun: not yet where there was no gradient so far
        self._is_due = False
        self._sampled = -2  # the last sampled step, by its count
        self._in_step, self._in_hook = False, False
        self._handles: list[Any] = []
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Put the hooks on an optimizer, this one from now on; one that trains nothing that is watched needs none."""
        self.detach()
        self.optimizer, self._is_silent, self._trained = optimizer, False, _tensors_in(optimizer)
        if self.watched:
            pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
            self._handles = [pre(self._before), post(self._after)]

    def detach(self) -> None:
        """Take the hooks off and let copies go; inside of a hook they only fall silent, for torch is counting them."""
        self._is_silent = True
        self._copying = [CopyProbe(each) for each in self.watched]  # without what they copied
        if not self._in_hook:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def has_grown(self) -> bool:
        """Whether tensors were added to the optimizer since this was last asked."""
        before, self._trained = self._trained, _tensors_in(self.optimizer)
        return self._trained > before

    def begin_anew(self) -> None:
        """Let the forecast start from the measured weights at the next sample."""
        self._begun = [False] * len(self.watched)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: numbers only."""
        logs = [log.state_dict() for log in self.logs]
        return {
            "count": self.count,
            "last": self.last,
            "begun": list(self._begun),
            "changed": list(self._changed),
            "logs": logs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.count, self.last = state["count"], state["last"]
        for log, held in zip(self.logs, state["logs"], strict=True):
            log.load_state_dict(held)
        self._begun, self._changed = list(state["begun"]), list(state["changed"])
        self._versions, self._places, self._reading, self._sampled = [], [], None, -2
        self._copying = [CopyProbe(each) for each in self.watched]  # what they copied is of another time

    def mark_weights(self) -> None:
        """Count what changes from now on as changed outside of a step, also before the first one."""
        self._versions = [param._version for param in self._versioned]

    @property
    def jumps(self) -> bool:
        """Whether the step that begins now is taken with settings quite different from the last one's."""
        return any(log.jumps(group) for log, group in zip(self.logs, self.optimizer.param_groups, strict=False))

    @property
    def changes_since_last_step(self) -> int:
        """How often the tensor that was changed most was changed since this optimizer's last step."""
        if not self._versions:
            return 0
        return max(param._version - seen for param, seen in zip(self._versioned, self._versions, strict=True))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_silent:
            return
        # After a step that raised this begins anew; and a step may call its base class's step, which has hooks too.
        self._in_step, self._reading = True, None
        self.label = max(self.last + 1, self._listener.latest)
        self._is_due = self._listener.is_due(self)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._guarded(lambda: self._look(has_closure=closure is not None))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._is_silent or not self._in_step:
            return
        self._in_step = False
        self.count += 1
        self.last = self._listener.latest = self.label
        self._guarded(self._finish)
        if self._is_due:
            self._listener.missed(self)

    def _guarded(self, work: Callable[[], None]) -> None:
        self._in_hook = True
        try:
            self._listener.guarded(work)
        finally:
            self._in_hook = False

    def _look(self, *, has_closure: bool) -> None:
        for log, group in zip(self.logs, self.optimizer.param_groups, strict=False):
            log.note(self.count, group, sampled=self._is_due)
        if self._versions and self._versions != [param._version for param in self._versioned]:
            self._note_changes()
        if self._is_due:
            with torch.no_grad():
                self._reading = self._open(has_closure=has_closure)

    def _note_changes(self) -> None:
        versions = {id(param): version for param, version in zip(self._versioned, self._versions, strict=True)}
        for at, each in enumerate(self.watched):
            version = each.param._version
            self._changed[at] |= versions.get(id(each.param), version) != version

    def _open(self, *, has_closure: bool) -> Reading:
        laws = [rule_of_group(self.optimizer, group) for group in self.optimizer.param_groups]
        sgd, is_last, replaced = follows(self.optimizer, SGD), self._comes_last(), self._replaced()
        count = len(self.watched)
        reading = Reading(
            count=self.count,
            label=self.label,
            laws=laws,
            combinations=self._combinations(laws, sgd=sgd),
            combined=[sgd and not has_closure and is_last and _is_plain(each.param) for each in self.watched],
            copied=[False] * count,
            products=self._no_products(),
            missing=[each.param.grad is None for each in self.watched],
            late=[False] * count,
            unread=[False] * count,
            changed=[old or new for old, new in zip(self._changed, replaced, strict=True)],
            begin=[False] * count,
            found_inf=getattr(self.optimizer, "found_inf", None),
            grad_scale=getattr(self.optimizer, "grad_scale", None),
        )
        one_pass = ProductsPass(reading.products)
        for at, each in enumerate(self.watched):
            gradient = each.param.grad
            if gradient is None and not has_closure:
                continue
            reading.begin[at] = not self._begun[at]
            if reading.combined[at] and gradient is not None:
                buffer = self._state(each).get("momentum_buffer")
                add_products(one_pass, self._rows[at].start, each, gradient, buffer)
                continue
            reading.copied[at] = True
            overwritten = reading.grad_scale is not None or self._may_overwrite(laws[each.group], each, sgd=sgd)
            reading.late[at], reading.unread[at] = not overwritten, overwritten and has_closure
            if overwritten and gradient is not None and not has_closure:
                self._read_with(each, densify(gradient), self._place(reading, at)[:, 1:3])
            same = self._copying[at].remember()
            reading.changed[at] |= not same and self._sampled == self.count - 1  # else steps of its own came between
        one_pass.run()
        reading.begin = [begin or changed for begin, changed in zip(reading.begin, reading.changed, strict=True)]
        if any(reading.begin):
            self._read_starts(reading)
        return reading

    def _finish(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            with torch.no_grad():
                self._compare(reading)
            self._sampled = reading.count
            self._changed = [False] * len(self.watched)
            self._begun = [not missing for missing in reading.missing]
            self._places = [] if self._places_before != self._places_now() else self._places_before
            if not self._comes_last():
                self._handles[0].remove()
                self._handles[0] = self.optimizer.register_step_pre_hook(self._before)
            self._listener.take(self, reading)
        self.mark_weights()

    def _comes_last(self) -> bool:
        """Whether no other hook comes between ours and the step: one that was registered later may clip gradients."""
        hooks: Mapping[int, Any] = getattr(self.optimizer, "_optimizer_step_pre_hooks", {})
        return not hooks or next(reversed(hooks)) == self._handles[0].id

    def _places_now(self) -> list[int]:
        return [0 if is_sharded(each.param) else each.param.data_ptr() for each in self.watched]

    def _replaced(self) -> list[bool]:
        """Which tensors lie elsewhere than after the last sample: ``p.data = other``, which torch does not count.

        An optimizer that does this by itself, seen at the last sample, says nothing.
        """
        self._places_before = self._places_now()
        return [old != new for old, new in zip(self._places or self._places_before, self._places_before, strict=True)]

    def _compare(self, reading: Reading) -> None:
        refresh, one_pass = self._listener.next_is_due(), MovesPass(reading.products)
        for at, each in enumerate(self.watched):
            gradient = each.param.grad if reading.late[at] else None
            if reading.copied[at]:  # a closure need not reach every tensor
                reading.missing[at] = reading.late[at] and gradient is None
            if reading.missing[at]:
                self._place(reading, at).fill_(torch.nan)
            elif reading.copied[at]:
                place, shrink = self._rows[at].start, reading.combinations[at].shrink
                self._copying[at].compare(one_pass, place, gradient, shrink=shrink, refresh=refresh)
                if reading.unread[at]:
                    self._place(reading, at)[:, 1:3] = torch.nan
        one_pass.run()

    def _no_products(self) -> Tensor:
        devices = [each.param.device for each in self.watched]
        shared = next((device for device in devices if device.type == "cpu"), devices[0])  # the rest is sent there
        return torch.zeros(self._units, PRODUCTS, dtype=torch.float64, device=shared)

    def _place(self, reading: Reading, at: int) -> Tensor:
        """The rows of a reading that belong to what this process holds of a tensor."""
        return reading.products[self._rows[at]]

    def _read_with(self, each: Watched, other: Tensor, out: Tensor) -> None:
        """<w, x> and <x, x> of the weight and another tensor."""
        found = out.new_zeros(len(out), 6)
        one_pass = ProductsPass(found)
        add_products(one_pass, 0, each, other, None)
        one_pass.run()
        out.copy_(found[:, 1:3])

    def _may_overwrite(self, law: GroupRule, each: Watched, *, sgd: bool) -> bool:
        """Whether the step may leave something else in ``.grad``: SGD does with Nesterov and no decay, others might."""
        if sgd:
            group = self.optimizer.param_groups[each.group]
            return bool(group["nesterov"]) and float(group["weight_decay"]) == 0
        return law.rule is None

    def _read_starts(self, reading: Reading) -> None:
        for at, each in enumerate(self.watched):
            state = self._state(each)
            first, second = state.get("exp_avg", state.get("momentum_buffer")), state.get("exp_avg_sq")
            if first is None or not reading.begin[at] or not _is_readable(first, each.param):
                continue
            out = self._place(reading, at)[:, 6:]
            self._read_with(each, first, out[:, :2])
            if second is not None and _is_readable(second, each.param):
                out[:, 2] = _sum(each, local(second))
            reading.steps_taken = max(reading.steps_taken, float(state.get("step", self.count)))

    def _state(self, each: Watched) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(each.param, {})
        return state

    def _combinations(self, laws: Sequence[GroupRule], *, sgd: bool) -> list[Combination]:
        if not sgd:
            of_group = [_decay_alone(law) for law in laws]
            return [of_group[each.group] for each in self.watched]
        first, later = (
            [sgd_combination(group, first=first) for group in self.optimizer.param_groups] for first in (True, False)
        )
        return [
            (first if self._state(each).get("momentum_buffer") is None else later)[each.group] for each in self.watched
        ]


def _decay_alone(law: GroupRule) -> Combination:
    """What is known of a step beforehand: the share of the weight that decoupled decay takes away."""
    decoupled = isinstance(law.rule, SGDW | AdamW | Lion | Muon)
    return Combination(0.0, 0.0, law.rule.decay_per_step if decoupled and law.rule else 0.0)


def _row_slices(watched: Sequence[Watched]) -> list[slice]:
    """The rows of a reading that belong to what this process holds of each tensor; other rows are elsewhere."""
    places, begin = [], 0
    for each in watched:
        held = 1 if each.axis is None else local(each.param).shape[each.axis]
        places.append(slice(begin + each.first_row, begin + each.first_row + held))
        begin += each.units
    return places


def _tensors_in(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _is_plain(param: Tensor) -> bool:
    """Whether SGD's arithmetic on it is exact enough to be recomputed, and its gradient can be multiplied."""
    held = param.grad
    return param.dtype in _EXACT and (held is None or held.layout == torch.strided)


def _is_readable(state: Tensor, param: Tensor) -> bool:
    """Whether a buffer is what its name says: some optimizers keep a quantised or low-rank one under it."""
    return state.shape == param.shape and (is_sharded(state) or type(state) is Tensor)


def _sum(each: Watched, tensor: Tensor) -> Tensor:
    """Of the numbers in every row."""
    return (tensor.reshape(1, -1) if each.axis is None else rows(tensor, axis=each.axis)).sum(1, dtype=torch.float64)
