"""Hooks on an optimizer: cheap bookkeeping at every step, a full reading of the sampled steps.

Each piece of a reading is taken at the only moment when it is right.

Before the step
    - Settings (lr, weight decay, momentum): schedulers change them between steps, and the step uses these values.
    - Changes from outside: a weight that differs from the one after our last step (`WeightMarks` in reading.py), unless
      a controller of this package announced that it rescaled it (`equilibria.optimizers.controllers`): then the
      prediction is rescaled as well. Controllers act before our hook and, after the step, behind it.
    - SGD's weight, gradient and momentum buffer, which determine the update (`equilibria.monitor.reading`). The step
      overwrites weight and buffer, so they are read now. That is right only if no later hook changes the gradient
      (clipping, for instance) between this reading and the step: if a hook was registered after ours, the tensor is
      copied instead, and our hook moves to the end of the list for the next sample.
    - A copy of the weight for every other optimizer.
    - Gradients that the step may overwrite: SGD with Nesterov momentum and no decay accumulates into ``.grad``, fused
      optimizers unscale it, unknown ones may do anything.
    - The optimizer's momentum and second moments where a prediction starts, because the recursion starts from the state
      before the step.
    - A few coordinates of every weight, to compare with those of earlier steps (`StepMemory` in step_memory.py).
After the step
    - The copied weights again, for the move.
    - All other gradients. With a closure the gradient exists only after the step has called it; and reading it together
      with the move reads the weights once instead of twice.
    - What every weight looks like, to compare with before the next step.

A step that is recorded into a CUDA graph is not taken: the hooks do nothing then. Replays of the graph run no hooks.

A finished reading goes to one callback. The hooks never see what becomes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from equilibria.errors import EquilibriaError, WatchWarning, warn_in_training
from equilibria.findings import Finding
from equilibria.monitor.half_precision import IntendedUpdates, lacks_master, master_in
from equilibria.monitor.loss_scaling import SkippedSteps
from equilibria.monitor.reading import (
    PRODUCTS,
    Combination,
    CopyProbe,
    StepReading,
    WeightMarks,
    add_products,
    sgd_combination,
)
from equilibria.monitor.sampler import Sampler
from equilibria.monitor.settings_log import SettingsLog
from equilibria.monitor.step_memory import StepMemory
from equilibria.optimizers.controllers import (
    AngleController,
    Rescaled,
    StandIn,
    StandsFor,
    control_log,
    order_hooks,
)
from equilibria.optimizers.copies import rule_groups
from equilibria.optimizers.in_force import not_in_force
from equilibria.optimizers.rules import GroupRule, follows, rule_of_group
from equilibria.tensors.device_queue import Sent, is_capturing, is_on_device, mark
from equilibria.tensors.inner_products import CopyPass, MovesPass, ProductsPass
from equilibria.tensors.layout import densify, is_sharded, local, rows
from equilibria.tensors.parameters import Watched
from equilibria.theory.identified import Identified
from equilibria.theory.rules import SGDW, AdamW, Lion, Muon

OnReading: TypeAlias = Callable[[int, StepReading | None], None]
"""Called after every sampled step with the index of the optimizer and the reading, None if an error prevented it."""

_EXACT = (torch.float32, torch.float64)  # types in which SGD's step can be recomputed from its products
_EMPTY: dict[str, Any] = {}
_NO_DECAY = Combination(0.0, 0.0, 0.0)


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
        copied_too: tensors, by their index, that are copied although products would do: rounding decides their update.
        memory: a few coordinates of the weights at earlier steps.
        skipped: the steps that a GradScaler skipped.
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
        self._groups = rule_groups(optimizer)
        self._is_one_rule_per_group = len(self._groups) == len(optimizer.param_groups)
        self.settings = [SettingsLog() for _ in self._groups]
        self.copied_too: frozenset[int] = frozenset()
        self.memory = StepMemory(self.watched)
        self._intended = IntendedUpdates(self.watched)
        self._halves = [index for index, layer in enumerate(self.watched) if lacks_master(layer)]
        self._searched: dict[int, list[str]] = {}  # by tensor, names in its state when no master was found there
        self.skipped = SkippedSteps()
        self._index, self._sampler, self._on_reading = index, sampler, on_reading
        self._rows = _row_slices(self.watched)
        # Compared at every step. Sharded tensors are left out: gathering and scattering them counts as changes.
        self._plain = [index for index, layer in enumerate(watched) if not is_sharded(layer.param)]
        self._marks = WeightMarks([self.watched[index].param for index in self._plain])
        self._units = sum(layer.units for layer in watched)
        self._changed = [False] * len(watched)
        self._rescalings: list[tuple[int, list[float]]] = []  # since the last reading
        self._reading: StepReading | None = None
        self._started = [False] * len(watched)  # tensors with a prediction: it starts at the first gradient
        self._is_due = False
        self._last_sampled = -2  # count of the last sampled step
        self._in_step, self._in_hook = False, False
        self._has_seen_graph = False
        self._handles: list[Any] = []
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Move the hooks to an optimizer; one that trains no watched tensor gets none."""
        self.detach()
        self.optimizer, self._is_silent, self._parameters = optimizer, False, _count_parameters(optimizer)
        self._control = control_log(optimizer)
        self._noted = self._marked = self._announced()
        self._noted_count = self._marked_count = self._control.count
        if self.watched:
            pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
            self._handles = [pre(self._before), post(self._after)]
            order_hooks(optimizer)

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
        self._mark_weights(may_operate=True)

    def _mark_weights(self, *, may_operate: bool) -> None:
        self._marks.mark(may_operate=may_operate)
        if self._marked_count != self._control.count:
            self._marked, self._marked_count = self._announced(), self._control.count

    @property
    def changes_since_last_step(self) -> int:
        """In-place changes since this optimizer's last step, of the tensor with the most."""
        params = (self.watched[index].param for index in self._plain)
        changes = (param._version - version for param, version in zip(params, self._marks.versions, strict=False))
        return max(changes, default=0)

    @property
    def laws(self) -> list[GroupRule]:
        """The law of each parameter group; under a controller that turns weights itself, that of the others in it."""
        stepping = self.optimizer if self.turned_by is None else self.turned_by.plain
        watched = {layer.group for layer in self.watched}
        return [rule_of_group(stepping, group, measure=index in watched) for index, group in enumerate(self.groups)]

    def settings_not_in_force(self) -> tuple[Finding, ...]:
        """Settings of watched groups that a copy of the optimizer does not obey; some tenths of a second."""
        watched = {layer.group for layer in self.watched if layer.param.is_floating_point()}
        return not_in_force(self.optimizer, [self.groups[index] for index in sorted(watched)])

    @property
    def turned_by(self) -> AngleController | None:
        """The controller that turns weights of this optimizer by angles of its own, None without one."""
        return next((one for one in self._control.controllers if isinstance(one, AngleController)), None)

    def promised(self, layer: Watched) -> float | None:
        """Radians by which a controller turns a tensor in the next step, NaN if it does not say; None without one."""
        controller = self.turned_by
        if controller is None:
            return None
        try:
            return controller.promised_angle(layer.param, self.groups[layer.group], by_row=layer.axis is not None)
        except EquilibriaError:  # of settings without an equilibrium: the step itself raises it
            return math.nan

    def state_dict(self) -> dict[str, Any]:
        """Numbers for a checkpoint."""
        self._note_rescalings()  # of weights that the checkpoint holds already
        return {
            "count": self.count,
            "last_step": self.last_step,
            "started": list(self._started),
            "changed": list(self._changed),
            "settings": [log.state_dict() for log in self.settings],
            "rescalings": [(count, list(factors)) for count, factors in self._rescalings],
            "memory": self.memory.state_dict(),
            "skipped": self.skipped.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.count, self.last_step = state["count"], state["last_step"]
        for log, changes in zip(self.settings, state["settings"], strict=True):
            log.load_state_dict(changes)
        self._started, self._changed = list(state["started"]), list(state["changed"])
        self._rescalings = [(count, list(factors)) for count, factors in state.get("rescalings", ())]
        self.memory.load_state_dict(state.get("memory", {}))
        self.skipped.load_state_dict(state.get("skipped", {}))
        self._noted, self._noted_count = self._announced(), self._control.count
        self._marks.forget()
        self._reading, self._last_sampled = None, -2
        self._probes = [CopyProbe(layer) for layer in self.watched]  # the copies are of other weights

    # ---- around a step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, _optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_silent:
            return
        if is_capturing():
            self._in_step = False
            self._warn_of_graph()
            return
        # This also cleans up after a step that raised. A step may call its base class's step, which runs the hooks too:
        # then the inner step is the one that counts.
        self._in_step, self._in_hook, self._reading = True, True, None
        try:
            self.step = max(self.last_step + 1, self._sampler.latest)
            jumps = self._sampler.automatic and any(
                log.jumps(self.count, group) for log, group in zip(self.settings, self.groups, strict=False)
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

    def _warn_of_graph(self) -> None:
        if not self._has_seen_graph:
            self._has_seen_graph = True
            kind = type(self.optimizer).__name__
            warn_in_training(
                f"steps of {kind} that a CUDA graph replays run no hooks: they are not watched", WatchWarning
            )

    def _look_before(self, *, has_closure: bool) -> None:
        self.skipped.look(self.step, self.optimizer, search=self._is_due)
        for log, group in zip(self.settings, self.groups, strict=False):
            log.note(self.count, group, sampled=self._is_due)
        self._note_rescalings()
        for index in self._marks.changed(self._own_changes()):
            self._changed[self._plain[index]] = True
            self.memory.forget(self._plain[index])
        if not self._is_due:
            self.memory.look(self.count, self.step, keep=self._needs_pull(), sampled=False)
            return
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
            reading.rescalings, self._rescalings = self._rescalings, []
            before, self._parameters = self._parameters, _count_parameters(self.optimizer)
            reading.grown = self._parameters > before
            self._last_sampled = reading.count
            self._changed = [False] * len(self.watched)
            self._started = [not missing for missing in reading.missing]
            if not self._comes_last():
                self._handles[0].remove()
                self._handles[0] = self.optimizer.register_step_pre_hook(self._before)
        self._mark_weights(may_operate=reading is not None)
        return reading

    def _comes_last(self) -> bool:
        """Whether no hook runs between ours and the step."""
        hooks: Mapping[int, Any] = getattr(self.optimizer, "_optimizer_step_pre_hooks", {})
        return not hooks or next(reversed(hooks)) == self._handles[0].id

    # ---- changes between two steps

    def _announced(self) -> list[Rescaled]:
        """All that controllers announced about the watched tensors."""
        return [self._control.of(layer.param) for layer in self.watched]

    def _note_rescalings(self) -> None:
        """Take note of the rescalings that controllers announced, as made before the coming step."""
        if self._noted_count == self._control.count:
            return
        before, self._noted, self._noted_count = self._noted, self._announced(), self._control.count
        pairs = zip(before, self._noted, strict=True)
        self.memory.forget_last()
        self._rescalings.append((self.count, [math.exp(new.log_change - old.log_change) for old, new in pairs]))

    def _own_changes(self) -> list[tuple[int, float]] | None:
        """For the tensors that are compared, what controllers announced since the weights were marked."""
        if self._marked_count == self._control.count:
            return None
        return [
            (self._noted[index].changes - self._marked[index].changes, self._factor_since_mark(index))
            for index in self._plain
        ]

    def _factor_since_mark(self, index: int) -> float:
        """What controllers multiplied a tensor by since the weights were marked."""
        return math.exp(self._noted[index].log_scale - self._marked[index].log_scale)

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The optimizer's parameter groups; the last ones it had if some have been removed since.

        With the settings of the run that their weights stand for, under a controller that trains such weights.
        """
        now = list(self.optimizer.param_groups) if self._is_one_rule_per_group else rule_groups(self.optimizer)
        self._groups = groups = now if len(now) >= len(self._groups) else self._groups
        for index, run in self._stands_for().items():
            groups = [
                *groups[:index],
                {**groups[index], "lr": run.lr, "weight_decay": run.weight_decay},
                *groups[index + 1 :],
            ]
        return groups

    def _stands_for(self) -> dict[int, StandsFor]:
        """By parameter group, what its weights stand for; none of them under no such controller."""
        runs = (one.stands_for() for one in self._control.controllers if isinstance(one, StandIn))
        return {index: run for of_controller in runs for index, run in of_controller.items()}

    # ---- a reading

    def _find_masters(self) -> None:
        """Measure the float32 masters of 16-bit weights that the optimizer's state holds.

        A state is searched once, and again when it has other entries or lost the master: that waits for the device.
        """
        found = False
        for index in self._halves:
            layer, state = self.watched[index], self.optimizer.state.get(self.watched[index].param, _EMPTY)
            held = any(value is layer.master for value in state.values())
            is_known = held if layer.master is not None else self._searched.get(index, []) == list(state)
            if is_known:
                continue
            master = master_in(state, layer.param)
            if master is not None and not bool(local(layer.param).any()):  # zeros: anything may round to them
                continue
            self._searched[index] = list(state)
            if master is not layer.master:
                self.watched[index], found = replace(layer, master=master), True
                self._probes[index] = CopyProbe(self.watched[index])
        if found:
            self.memory, self._intended = StepMemory(self.watched), IntendedUpdates(self.watched)

    def _read_before(self, *, has_closure: bool) -> StepReading:
        self._find_masters()
        groups, states = self.groups, self.optimizer.state
        laws = self.laws
        sgd, is_last = follows(self.optimizer, SGD), self._comes_last()
        promised = [self.promised(layer) for layer in self.watched]
        if sgd:
            first, later = ([sgd_combination(group, first=first) for group in groups] for first in (True, False))
        else:
            first = later = [_decay_alone(law) for law in laws]
        on_cpu = any(layer.param.is_cpu for layer in self.watched)  # the products on other devices are sent there
        device = torch.device("cpu") if on_cpu else self.watched[0].param.device
        none = [False] * len(self.watched)
        stepped = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        reading = StepReading(
            count=self.count,
            step=self.step,
            laws=laws,
            settings=[],
            combinations=[],
            combined=list(none),
            copied=list(none),
            products=self._table(PRODUCTS, device),
            missing=list(none),
            removed=[id(layer.param) not in stepped for layer in self.watched],
            late=list(none),
            unread=list(none),
            changed=list(self._changed),
            starts=list(none),
            promised=promised,
            stands_for=self._stands_for(),
            found_inf=getattr(self.optimizer, "found_inf", None),
            grad_scale=getattr(self.optimizer, "grad_scale", None),
        )
        can_combine = sgd and is_last and not has_closure
        one_pass, copies, begin = ProductsPass(reading.products), CopyPass(), mark(device)
        for index, layer in enumerate(self.watched):
            param, group = layer.param, layer.group
            gradient, buffer = param.grad, states.get(param, _EMPTY).get("momentum_buffer") if sgd else None
            combination = (first if buffer is None else later)[group]
            reading.combinations.append(combination if promised[index] is None else _NO_DECAY)
            # In half precision, or by a tiny update, the step rounds the new weight by more than the products can know.
            exact = layer.weight.dtype in _EXACT and index not in self.copied_too
            combined = can_combine and exact and (gradient is None or gradient.layout == torch.strided)
            is_missing = gradient is None or reading.removed[index]
            reading.combined[index], reading.missing[index] = combined, is_missing
            if reading.removed[index] or (gradient is None and not has_closure):
                continue
            reading.starts[index] = not self._started[index]
            if combined and gradient is not None:
                add_products(one_pass, self._rows[index].start, layer, gradient, buffer)
                continue
            reading.copied[index] = True
            overwritten = reading.grad_scale is not None or self._may_overwrite(laws[group], layer, sgd=sgd)
            reading.late[index], reading.unread[index] = not overwritten, overwritten and has_closure
            if overwritten and gradient is not None and not has_closure:
                add_products(one_pass, self._rows[index].start, layer, densify(gradient), None)
            is_same = self._probes[index].remember(copies, factor=self._factor_since_mark(index))
            # If the last sample is not of the last step, our own steps lie between, and a difference means nothing.
            reading.changed[index] |= not is_same and self._last_sampled == self.count - 1
        gradients, second = (None, None) if has_closure or not is_last or not self._reads_pull() else self._pulling()
        reading.pull = self.memory.look(
            *(self.count, self.step),
            keep=self._needs_pull(),
            sampled=True,
            gradients=gradients,
            second=second,
            copies=copies,
        )
        copies.run()
        one_pass.run()
        if is_last and not has_closure and reading.grad_scale is None:
            reading.intended = self._intended.read(self.optimizer)
        reading.starts = [starts or changed for starts, changed in zip(reading.starts, reading.changed, strict=True)]
        if any(reading.starts):
            self._read_optimizer_state(reading)
        reading.marks.append((begin, mark(device)))
        return reading

    def _read_after(self, reading: StepReading) -> None:
        refresh, one_pass, begin = self._sampler.every == 1, MovesPass(reading.products), mark(reading.products.device)
        standing = self._stands_for()
        for index, layer in enumerate(self.watched):
            gradient = layer.param.grad if reading.late[index] else None
            if reading.copied[index]:  # a closure need not reach every tensor
                reading.missing[index] = reading.late[index] and gradient is None
            if reading.copied[index] and not reading.missing[index]:
                row, shrink = self._rows[index].start, reading.combinations[index].shrink
                if layer.group in reading.stands_for:
                    shrink = 0.0  # of the stored weight; what it stands for keeps a share that is known only now
                    kept = standing[layer.group].kept if layer.group in standing else 1.0
                    reading.combinations[index] = Combination(0.0, 0.0, 1 - kept)
                self._probes[index].compare(one_pass, row, gradient, shrink=shrink, refresh=refresh)
        one_pass.run()
        reading.marks.append((begin, mark(reading.products.device)))

    def _table(self, columns: int, device: torch.device) -> Tensor:
        """A table of inner products, not yet formed; 0 where other processes fill in theirs."""
        make = torch.empty if len(self._plain) == len(self.watched) else torch.zeros
        return make(self._units, columns, dtype=torch.float64, device=device)

    def _read_optimizer_state(self, reading: StepReading) -> None:
        """Read momentum and second moments of the tensors whose prediction starts."""
        reading.products[:, 6:] = 0
        products = self._table(6, reading.products.device)
        one_pass, with_state, on_device = ProductsPass(products), [], list[Tensor]()
        for index, layer in enumerate(self.watched):
            state = self.optimizer.state.get(layer.param, _EMPTY)
            first, second = state.get("exp_avg", state.get("momentum_buffer")), state.get("exp_avg_sq")
            if first is None or not reading.starts[index] or not _is_readable(first, layer.param):
                continue
            with_state.append(self._rows[index])
            add_products(one_pass, self._rows[index].start, layer, first, None)
            if second is not None and _is_readable(second, layer.param):
                reading.products[self._rows[index], 8] = _row_sums(layer, local(second)).to(products.device)
            step = state.get("step", self.count)
            if isinstance(step, Tensor) and is_on_device(step):
                on_device.append(step.detach().reshape(()))
            else:
                reading.counters.append(float(step))
        reading.counters += [Sent(torch.stack(on_device))] if on_device else []
        one_pass.run()
        for rows_of_tensor in with_state:
            reading.products[rows_of_tensor, 6:8] = products[rows_of_tensor, 1:3]

    def _pulling(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of the coming step, and Adam's second moments."""
        states = [self.optimizer.state.get(layer.param, _EMPTY) for layer in self.watched]
        second = [
            None if "max_exp_avg_sq" in state else _readable(state.get("exp_avg_sq"), layer.param)
            for state, layer in zip(states, self.watched, strict=True)
        ]
        return [_readable(layer.param.grad, layer.param) for layer in self.watched], second

    def _reads_pull(self) -> bool:
        """Whether the pull of this sampled step is read from a few coordinates."""
        return self.memory.may_pull(self.count) and not self._has_heavy_ball()

    def _needs_pull(self) -> bool:
        """Whether a few coordinates are kept for the pull of this step or the next."""
        here = self._is_due and self.memory.may_pull(self.count)
        soon = self._sampler.expects(self._index, count=self.count, step=self.step)
        return (here or (soon and self.memory.may_pull(self.count + 1))) and not self._has_heavy_ball()

    def _has_heavy_ball(self) -> bool:
        """Whether the momentum buffers are the last moves: then the products hold the pull, of all coordinates."""
        return follows(self.optimizer, SGD) and all(
            group["momentum"] and not group["nesterov"] for group in self.optimizer.param_groups
        )

    def _may_overwrite(self, law: GroupRule, layer: Watched, *, sgd: bool) -> bool:
        """Whether the step may leave something else in ``.grad``: SGD does with Nesterov and no decay, others might."""
        if sgd:
            group = self.groups[layer.group]
            return bool(group["nesterov"]) and float(group["weight_decay"]) == 0
        return law.rule is None or law.overwrites_gradient or self.turned_by is not None


def _decay_alone(law: GroupRule) -> Combination:
    """The part of a step that is known beforehand: the share of the weight that decoupled decay removes."""
    is_measured = isinstance(law.rule, Identified) and not law.rule.is_coupled
    decoupled = is_measured or isinstance(law.rule, SGDW | AdamW | Lion | Muon)
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


def _readable(tensor: Tensor | None, param: Tensor) -> Tensor | None:
    """A tensor whose entries are those of a parameter, or None."""
    if tensor is None or tensor.layout != torch.strided or not _is_readable(tensor, param):
        return None
    return tensor


def _row_sums(layer: Watched, tensor: Tensor) -> Tensor:
    by_row = tensor.reshape(1, -1) if layer.axis is None else rows(tensor, axis=layer.axis)
    return by_row.sum(1, dtype=torch.float64)
