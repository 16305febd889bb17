"""Hooks on an optimizer: cheap bookkeeping at every step, a full reading of the sampled steps.

Each piece of a reading is taken at the only moment when it is right.

Before the step
    - Settings (lr, weight decay, momentum): schedulers change them between steps, and the step uses these values.
    - Changes from outside: torch counts the in-place changes of every tensor in ``_version``. A count that differs from
      the one after our last step means that somebody else changed the weight. ``p.data = other`` is not counted, but
      moves the tensor in memory.
    - SGD's weight, gradient and momentum buffer, which determine the update (`equilibria.monitor.reading`). The step
      overwrites weight and buffer, so they are read now. That is right only if no later hook changes the gradient
      (clipping, for instance) between this reading and the step: if a hook was registered after ours, the tensor is
      copied instead, and our hook moves to the end of the list for the next sample.
    - A copy of the weight for every other optimizer.
    - Gradients that the step may overwrite: SGD with Nesterov momentum and no decay accumulates into ``.grad``, fused
      optimizers unscale it, unknown ones may do anything.
    - The optimizer's momentum and second moments where a prediction starts, because the recursion starts from the state
      before the step.
After the step
    - The copied weights again, for the move.
    - All other gradients. With a closure the gradient exists only after the step has called it; and reading it together
      with the move reads the weights once instead of twice.
    - ``_version`` of every weight, to compare with before the next step.

A finished reading goes to one callback. The hooks never see what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from equilibria.monitor.reading import (
    PRODUCTS,
    Combination,
    CopyProbe,
    StepReading,
    add_products,
    sgd_combination,
)
from equilibria.monitor.sampler import Sampler
from equilibria.monitor.settings_log import SettingsLog
from equilibria.optimizers.rules import GroupRule, follows, rule_of_group
from equilibria.tensors.inner_products import MovesPass, ProductsPass
from equilibria.tensors.layout import densify, is_sharded, local, rows
from equilibria.tensors.parameters import Watched
from equilibria.theory.rules import SGDW, AdamW, Lion, Muon

OnReading: TypeAlias = Callable[[int, StepReading | None], None]
"""Called after every sampled step with the index of the optimizer and the reading, None if an error prevented it."""

_EXACT = (torch.float32, torch.float64)  # types in which SGD's step can be recomputed from its products
_EMPTY: dict[str, Any] = {}


class OptimizerHooks:
    """Reads the sampled steps of one optimizer.

    Args:
        optimizer: the optimizer.
        watched: its watched tensors.
        index: of the optimizer among those that are watched together.
        sampler: decides which steps are read.
        on_reading: receives the readings.

    Attributes:
        optimizer: the optimizer that carries the hooks.
        watched: its watched tensors.
        count: steps that it has taken.
        step: number of the present step in the samples. It differs from step to step, and is never below a number
            given before, to whichever optimizer.
        last_step: number of its last step; -1 before the first.
        settings: the settings of each parameter group since the last reading.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        watched: Sequence[Watched],
        *,
        index: int,
        sampler: Sampler,
        on_reading: OnReading,
    ) -> None:
        self.watched = list(watched)
        self.count, self.step, self.last_step = 0, 0, -1
        self.settings = [SettingsLog() for _ in optimizer.param_groups]
        self._groups = list(optimizer.param_groups)
        self._index, self._sampler, self._on_reading = index, sampler, on_reading
        self._rows = _row_slices(self.watched)
        # Compared at every step. Sharded tensors are left out: gathering and scattering them counts as changes.
        self._plain = [layer.param for layer in watched if not is_sharded(layer.param)]
        self._units = sum(layer.units for layer in watched)
        self._versions: list[int] = []  # of the plain tensors after the last step
        self._addresses: list[int] = []  # of the tensors after the last sampled step
        self._changed = [False] * len(watched)
        self._reading: StepReading | None = None
        self._started = [False] * len(watched)  # tensors with a prediction: it starts at the first gradient
        self._is_due = False
        self._last_sampled = -2  # count of the last sampled step
        self._in_step, self._in_hook = False, False
        self._handles: list[Any] = []
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Move the hooks to an optimizer; one that trains no watched tensor gets none."""
        self.detach()
        self.optimizer, self._is_silent, self._parameters = optimizer, False, _count_parameters(optimizer)
        if self.watched:
            pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
            self._handles = [pre(self._before), post(self._after)]

    def detach(self) -> None:
        """Remove the hooks and free the copies; inside a hook, only fall silent: torch is iterating over its hooks."""
        self._is_silent = True
        self._probes = [CopyProbe(layer) for layer in self.watched]
        if not self._in_hook:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def restart_predictions(self) -> None:
        """Start all predictions from the measured state at the next sampled step."""
        self._started = [False] * len(self.watched)

    def mark_weights(self) -> None:
        """Count every change of a weight from now until the next step as a change from outside."""
        self._versions = [param._version for param in self._plain]

    @property
    def changes_since_last_step(self) -> int:
        """In-place changes since this optimizer's last step, of the tensor with the most."""
        if not self._versions:
            return 0
        return max(param._version - version for param, version in zip(self._plain, self._versions, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Numbers for a checkpoint."""
        return {
            "count": self.count,
            "last_step": self.last_step,
            "started": list(self._started),
            "changed": list(self._changed),
            "settings": [log.state_dict() for log in self.settings],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.count, self.last_step = state["count"], state["last_step"]
        for log, changes in zip(self.settings, state["settings"], strict=True):
            log.load_state_dict(changes)
        self._started, self._changed = list(state["started"]), list(state["changed"])
        self._versions, self._addresses, self._reading, self._last_sampled = [], [], None, -2
        self._probes = [CopyProbe(layer) for layer in self.watched]  # the copies are of other weights

    # ---- around a step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_silent:
            return
        # This also cleans up after a step that raised. A step may call its base class's step, which runs the hooks too:
        # then the inner step is the one that counts.
        self._in_step, self._in_hook, self._reading = True, True, None
        try:
            self.step = max(self.last_step + 1, self._sampler.latest)
            jumps = self._sampler.automatic and any(
                log.jumps(self.count, group)
                for log, group in zip(self.settings, self.optimizer.param_groups, strict=False)
            )
            self._is_due = self._sampler.is_due(self._index, count=self.count, step=self.step, jumps=jumps)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._sampler.attempt(lambda: self._look_before(has_closure=closure is not None))
        finally:
            self._in_hook = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._is_silent or not self._in_step:
            return
        self._in_step, self._in_hook = False, True
        try:
            self.count += 1
            self.last_step = self._sampler.latest = self.step
            reading = self._sampler.attempt(self._look_after)
            if self._is_due:
                self._on_reading(self._index, reading)
        finally:
            self._in_hook = False

    def _look_before(self, *, has_closure: bool) -> None:
        for log, group in zip(self.settings, self.optimizer.param_groups, strict=False):
            log.note(self.count, group, sampled=self._is_due)
        if self._versions and self._versions != (now := [param._version for param in self._plain]):
            self._mark_changed(self._versions, now)
        if self._is_due:
            with torch.no_grad():
                self._reading = self._read_before(has_closure=has_closure)

    def _look_after(self) -> StepReading | None:
        reading, self._reading = self._reading, None
        if reading is not None:
            if any(reading.copied) or any(reading.missing):
                with torch.no_grad():
                    self._read_after(reading)
            # Only now: a step that raises leaves no reading, and its settings then belong to the next one.
            reading.settings = [log.hand_over(reading.count) for log in self.settings]
            before, self._parameters = self._parameters, _count_parameters(self.optimizer)
            reading.grown = self._parameters > before
            self._last_sampled = reading.count
            self._changed = [False] * len(self.watched)
            self._started = [not missing for missing in reading.missing]
            # An optimizer that moves its tensors in memory by itself says nothing about changes from outside.
            self._addresses = reading.addresses if reading.addresses == self._addresses_now() else []
            if not self._comes_last():
                self._handles[0].remove()
                self._handles[0] = self.optimizer.register_step_pre_hook(self._before)
        self.mark_weights()
        return reading

    def _comes_last(self) -> bool:
        """Whether no hook runs between ours and the step."""
        hooks: Mapping[int, Any] = getattr(self.optimizer, "_optimizer_step_pre_hooks", {})
        return not hooks or next(reversed(hooks)) == self._handles[0].id

    # ---- changes from outside

    def _mark_changed(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Mark the tensors whose version or address differs."""
        changed = {id(param) for param, old, new in zip(self._plain, before, now, strict=True) if old != new}
        for index, layer in enumerate(self.watched):
            self._changed[index] |= id(layer.param) in changed

    def _addresses_now(self) -> list[int]:
        return [param.data_ptr() for param in self._plain]

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's parameter groups; the last ones it had if some have been removed since."""
        if len(self.optimizer.param_groups) >= len(self._groups):
            self._groups = list(self.optimizer.param_groups)
        return self._groups

    # ---- a reading

    def _read_before(self, *, has_closure: bool) -> StepReading:
        groups, states = self.groups, self.optimizer.state
        laws = [rule_of_group(self.optimizer, group) for group in groups]
        sgd, is_last, addresses = follows(self.optimizer, SGD), self._comes_last(), self._addresses_now()
        if self._addresses and self._addresses != addresses:
            self._mark_changed(self._addresses, addresses)  # ``p.data = other``, which torch does not count
        if sgd:
            first, later = ([sgd_combination(group, first=first) for group in groups] for first in (True, False))
        else:
            first = later = [_decay_alone(law) for law in laws]
        on_cpu = any(layer.param.is_cpu for layer in self.watched)  # the products on other devices are sent there
        device = torch.device("cpu") if on_cpu else self.watched[0].param.device
        none = [False] * len(self.watched)
        reading = StepReading(
            count=self.count,
            step=self.step,
            laws=laws,
            settings=[],
            addresses=addresses,
            combinations=[],
            combined=list(none),
            copied=list(none),
            products=torch.zeros(self._units, PRODUCTS, dtype=torch.float64, device=device),
            missing=list(none),
            late=list(none),
            unread=list(none),
            changed=list(self._changed),
            starts=list(none),
            found_inf=getattr(self.optimizer, "found_inf", None),
            grad_scale=getattr(self.optimizer, "grad_scale", None),
        )
        can_combine = sgd and is_last and not has_closure
        one_pass = ProductsPass(reading.products)
        for index, layer in enumerate(self.watched):
            param, group = layer.param, layer.group
            gradient, buffer = param.grad, states.get(param, _EMPTY).get("momentum_buffer") if sgd else None
            reading.combinations.append((first if buffer is None else later)[group])
            # In half precision the step rounds the new weight by more than the products can know.
            combined = can_combine and param.dtype in _EXACT and (gradient is None or gradient.layout == torch.strided)
            reading.combined[index], reading.missing[index] = combined, gradient is None
            if gradient is None and not has_closure:
                continue
            reading.starts[index] = not self._started[index]
            if combined and gradient is not None:
                add_products(one_pass, self._rows[index].start, layer, gradient, buffer)
                continue
            reading.copied[index] = True
            overwritten = reading.grad_scale is not None or self._may_overwrite(laws[group], layer, sgd=sgd)
            reading.late[index], reading.unread[index] = not overwritten, overwritten and has_closure
            if overwritten and gradient is not None and not has_closure:
                self._read_pair(layer, densify(gradient), self._products(reading, index)[:, 1:3])
            is_same = self._probes[index].remember()
            # If the last sample is not of the last step, our own steps lie between, and a difference means nothing.
            reading.changed[index] |= not is_same and self._last_sampled == self.count - 1
        one_pass.run()
        reading.starts = [starts or changed for starts, changed in zip(reading.starts, reading.changed, strict=True)]
        if any(reading.starts):
            self._read_optimizer_state(reading)
        return reading

    def _read_after(self, reading: StepReading) -> None:
        refresh, one_pass = self._sampler.every == 1, MovesPass(reading.products)
        for index, layer in enumerate(self.watched):
            gradient = layer.param.grad if reading.late[index] else None
            if reading.copied[index]:  # a closure need not reach every tensor
                reading.missing[index] = reading.late[index] and gradient is None
            if reading.missing[index]:
                self._products(reading, index).fill_(torch.nan)
            elif reading.copied[index]:
                row, shrink = self._rows[index].start, reading.combinations[index].shrink
                self._probes[index].compare(one_pass, row, gradient, shrink=shrink, refresh=refresh)
                if reading.unread[index]:
                    self._products(reading, index)[:, 1:3] = torch.nan
        one_pass.run()

    def _read_optimizer_state(self, reading: StepReading) -> None:
        """Read momentum and second moments of the tensors whose prediction starts."""
        for index, layer in enumerate(self.watched):
            state = self.optimizer.state.get(layer.param, _EMPTY)
            first, second = state.get("exp_avg", state.get("momentum_buffer")), state.get("exp_avg_sq")
            if first is None or not reading.starts[index] or not _is_readable(first, layer.param):
                continue
            out = self._products(reading, index)[:, 6:]
            self._read_pair(layer, first, out[:, :2])
            if second is not None and _is_readable(second, layer.param):
                out[:, 2] = _row_sums(layer, local(second))
            reading.steps_taken = max(reading.steps_taken, float(state.get("step", self.count)))

    def _read_pair(self, layer: Watched, other: Tensor, out: Tensor) -> None:
        """<w, x> and <x, x> of a weight and another tensor."""
        products = out.new_zeros(len(out), 6)
        one_pass = ProductsPass(products)
        add_products(one_pass, 0, layer, other, None)
        one_pass.run()
        out.copy_(products[:, 1:3])

    def _products(self, reading: StepReading, index: int) -> Tensor:
        """The rows of a reading for the part of a tensor that this process holds."""
        return reading.products[self._rows[index]]

    def _may_overwrite(self, law: GroupRule, layer: Watched, *, sgd: bool) -> bool:
        """Whether the step may leave something else in ``.grad``: SGD does with Nesterov and no decay, others might."""
        if sgd:
            group = self.groups[layer.group]
            return bool(group["nesterov"]) and float(group["weight_decay"]) == 0
        return law.rule is None


def _decay_alone(law: GroupRule) -> Combination:
    """The part of a step that is known beforehand: the share of the weight that decoupled decay removes."""
    decoupled = isinstance(law.rule, SGDW | AdamW | Lion | Muon)
    return Combination(0.0, 0.0, law.rule.decay_per_step if decoupled and law.rule else 0.0)


def _row_slices(watched: Sequence[Watched]) -> list[slice]:
    """For each tensor the rows of a reading that this process fills; other processes fill the rest."""
    slices, begin = [], 0
    for layer in watched:
        own = 1 if layer.axis is None else local(layer.param).shape[layer.axis]
        slices.append(slice(begin + layer.first_row, begin + layer.first_row + own))
        begin += layer.units
    return slices


def _count_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _is_readable(state: Tensor, param: Tensor) -> bool:
    """Whether a state tensor is what its name says: some optimizers store a quantised or low-rank one under it."""
    return state.shape == param.shape and (is_sharded(state) or type(state) is Tensor)


def _row_sums(layer: Watched, tensor: Tensor) -> Tensor:
    by_row = tensor.reshape(1, -1) if layer.axis is None else rows(tensor, axis=layer.axis)
    return by_row.sum(1, dtype=torch.float64)
