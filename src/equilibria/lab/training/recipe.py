"""All that a training consists of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from equilibria.errors import EquilibriaError, positive, whole
from equilibria.lab.training.device import named_device
from equilibria.tensors.parameters import Select

if TYPE_CHECKING:
    from equilibria.lab.training.training import Training

Schedule = Callable[[int], float]
Batch = tuple[Tensor, Tensor]


class Measure(Protocol):
    """Looks at a training now and then; leaves it as it was.

    One that remembers something from time to time has ``state_dict()`` and ``load_state_dict(state)`` too, so that a
    training that goes on after a kill finds the same numbers.
    """

    def __call__(self, training: Training) -> Mapping[str, float | NDArray[Any]]:
        """Numbers, or arrays of one shape, by name; the same names each time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """All that a training consists of; equal recipes give equal weights, bit for bit, on one kind of machine.

    This holds on the CPU; some kernels of GPUs sum in another order each time.

    Attributes:
        model: a function that makes the network; called once, after torch's generator was seeded. It is put into
            training mode; what is to stay frozen in evaluation mode sees to that in its own ``train()``.
        optimizer: a function that makes the optimizer of that network; see `two_groups`.
        data: batches (inputs, targets) without end, the same each time it is iterated: `equilibria.lab.data.Batches`,
            or a `FullBatch`. Two recipes with equal data train on the same batches in the same order, whatever else
            differs.
        steps: in all, from the first weights on.
        seed: of the first weights, and of what the network itself draws, such as dropout.
        loss: outputs, targets -> their mean loss.
        schedule: step -> what the learning rates of all groups are multiplied by in that step, counted from 0; not
            negative.
        control: scheduler, model -> the same wrapped, such as `equilibria.control._rescale_on_decay.RescaleOnDecay`.
        chunk: samples per backward pass; None for all of a batch at once. The gradient is that of the mean loss over
            the batch, unless the samples of a chunk are coupled, as BatchNorm does: see `Trained.covers`.
        measures: what is measured, by name; no two may give numbers of one name.
        measure_every: steps from one measurement to the next; before the first step and after the last one, too.
        watch_every: steps from one sample of `equilibria.watch` to the next; None to watch nothing.
        watch_select: which parameters are watched, as for `equilibria.watch`.
        device: where it is trained: "cpu", "cuda" or "cuda:1". The network is made on the CPU and moved there, so that
            its first weights are the same; batches are moved one by one.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    data: Iterable[Batch]
    steps: int
    seed: int = 0
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    schedule: Schedule = lambda step: 1.0
    control: Callable[[LRScheduler, nn.Module], LRScheduler] | None = None
    chunk: int | None = None
    measures: Mapping[str, Measure] = field(default_factory=dict)
    measure_every: int = 100
    watch_every: int | None = None
    watch_select: Select | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise EquilibriaError(
                f"got model={_kind(self.model)}; expected a function that makes the network, called when the seed is "
                "set: model=lambda: ..."
            )
        if isinstance(self.optimizer, Optimizer | type) or not callable(self.optimizer):
            raise EquilibriaError(
                f"got optimizer={_kind(self.optimizer)}; expected a function that makes it for the network: "
                "optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=...)"
            )
        self._make_whole("steps", low=1)
        self._make_whole("seed", low=0)
        self._make_whole("measure_every", low=1)
        if self.chunk is not None:
            self._make_whole("chunk", low=1)
        if self.watch_every is not None:
            self._make_whole("watch_every", low=1)
        named_device(self.device)

    def _make_whole(self, name: str, *, low: int) -> None:
        object.__setattr__(self, name, whole(name, getattr(self, name), low=low))

    def is_measured(self, step: int) -> bool:
        """Whether there is a measurement when so many steps are done."""
        return step % self.measure_every == 0 or step == self.steps


def _kind(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"an object of {type(given).__name__}"


def drops(at: Sequence[int], factor: float) -> Schedule:
    """A schedule that divides the learning rate by ``factor`` at each of these steps.

    Example:
        >>> schedule = drops([2500], 5)
        >>> schedule(2499), schedule(2500)
        (1.0, 0.2)
    """
    steps, divisor = sorted(whole("at", step) for step in at), positive("factor", factor)
    return lambda step: divisor ** -float(bisect_right(steps, step))
