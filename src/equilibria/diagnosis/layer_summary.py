"""One layer over its last samples: measured, predicted and equilibrium, in numbers and in a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from equilibria.diagnosis.budget import LayerBudget
from equilibria.diagnosis.metadata import three_digits
from equilibria.findings import counted, plain
from equilibria.records.tables import DISTURBED, GAIN_LAW, NO_EQUILIBRIUM, SETTLED

LEAST_WINDOW = 20  # samples, where there are as many at about these settings; and fewest to know how far they scatter
ACCURACY = 0.05  # |ln(measured / predicted angle)| to expect
JUDGED = 0.1  # standard error of measured / predicted up to which it is judged
_LEAST_RATIO = 1e-9  # stands for 0 of a weight that does not turn: ln(0) can be neither sorted nor written
_SURE = 4  # standard errors
_ALIKE = 2  # factor by which norm and angle may disagree about the distance from equilibrium
_MUCH_LONGER = 10  # times the steps so far: a time to settle beyond it is no number to act on


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One parameter over the window of `summarise`; None where a number is unknown.

    All angles and their ratios are of the same samples, those of the steps from ``first_step`` to ``last_step``; norms
    and settings are of the last of them.

    Attributes:
        name: the parameter (or its row).
        samples: samples in the window.
        last_step: step of its last sample, counted from 0.
        angle: root mean square angle per step, rad.
        angle_predicted: root mean square of the predicted angles.
        angle_equilibrium: root mean square of the equilibrium angles.
        angle_vs_predicted: measured / predicted.
        angle_vs_equilibrium: measured / equilibrium.
        norm: ||w|| at the last sample.
        norm_predicted: the predicted norm there.
        norm_equilibrium: the equilibrium norm there.
        norm_vs_predicted: measured / predicted.
        norm_vs_equilibrium: measured / equilibrium.
        cosine: root mean square cosine of weight and gradient; it does not depend on the settings, so the window for it
            reaches across their changes, to 20 samples at least if there are as many.
        invariant: whether the weight is scale-invariant by the label of `symmetries` or, without one, looks so by its
            cosines (`equilibria.diagnosis.invariance`); None while that is undecided.
        state: one of STATES.
        steps_to_settle: steps until the angle stays within 5 % of equilibrium; None also if ``lr_runs_out``.
        epochs_to_settle: the same in epochs, if the length of an epoch is known.
        lr: of the last sample.
        weight_decay: of the last sample, as torch defines it.
        momentum: of the last sample; beta1 for Adam and Lion.
        settings: the optimizer with these settings, as text.
        no_law: why there is no law, None if there is one.
        how_wrong: |ln(measured / predicted angle)|: 0.05 is 5 % off, 0.7 a factor of 2 either way.
        first_step: step of the first sample in the window, None if it is empty.
        lr_range: lowest and highest lr of the window, None if it is empty.
        first_lr: of the first sample of the run.
        peak_lr: highest of the sampled steps of the run.
        last_lr: of the last sample of the run; ``lr`` unless the window leaves out the tail of a schedule.
        how: the label of `symmetries`, such as "rows"; None if the monitor had none.
        angle_error: relative standard error of ``angle_vs_predicted``, from the scatter of the last samples around
            their predictions; momentum correlates successive angles.
        mean_cosine: of weight and gradient, with its sign, over all samples of the run.
        lr_runs_out: whether lr falls over the last samples, so fast that its pace would end at 0 before the layer could
            settle, or has fallen since the window: then a time to settle at the present lr means nothing.
        shape: of the parameter, None if the metadata do not know it.
        recorded_from: step of the first sample of the run.
        first_norm: ||w|| at that sample.
        angle_over_run: root mean square angle per step over all samples of the run.
        law: of the predictions, one of LAWS; None without any, and in records that do not say.
        gain: the growth gain G at the last sample.
        gain_error: its standard error.
        no_gain: why there is neither a gain nor another prediction: a clause about one layer and one about several,
            with {} for their names; None if there is one.
        budget: why the norm changed over the window.
        relative_update: root mean square of ||w' - w|| / ||w|| per step.
        update_per_entry: root mean square change of an entry per step.
        idle: why no gradient moves it, such as "no gradient since step 250"; None if one does. It then has no
            prediction.
        rounding: relative change of the weight per step, by decay or update, if its type rounds that away.
        decay_rounds_away: whether that is a decay of its own, so that none acts and there is no equilibrium.
        resolution: half an ulp of its type: angles below it are made by rounding; None if the type is unknown.
        passing: steps in which the norm at its pace crosses the tolerance of 5 % around equilibrium, negative where it
            falls against it; None unless it is within the tolerance and crosses it sooner than it would settle.
    """

    name: str
    samples: int
    last_step: int
    angle: float | None
    angle_predicted: float | None
    angle_equilibrium: float | None
    angle_vs_predicted: float | None
    angle_vs_equilibrium: float | None
    norm: float | None
    norm_predicted: float | None
    norm_equilibrium: float | None
    norm_vs_predicted: float | None
    norm_vs_equilibrium: float | None
    cosine: float | None
    invariant: bool | None
    state: str | None
    steps_to_settle: float | None
    epochs_to_settle: float | None
    lr: float | None
    weight_decay: float | None
    momentum: float | None
    settings: str
    no_law: str | None
    how_wrong: float | None
    first_step: int | None = None
    lr_range: tuple[float, float] | None = None
    first_lr: float | None = None
    peak_lr: float | None = None
    last_lr: float | None = None
    how: str | None = None
    lr_runs_out: bool = False
    angle_error: float | None = None
    shape: tuple[int, ...] | None = None
    recorded_from: int | None = None
    first_norm: float | None = None
    angle_over_run: float | None = None
    mean_cosine: float | None = None
    law: str | None = None
    gain: float | None = None
    gain_error: float | None = None
    no_gain: tuple[str, str] | None = None
    budget: LayerBudget | None = None
    relative_update: float | None = None
    update_per_entry: float | None = None
    idle: str | None = None
    rounding: float | None = None
    decay_rounds_away: bool = False
    resolution: float | None = None
    passing: float | None = None

    @property
    def by_gain(self) -> bool:
        """Whether its predictions come from its measured growth gain, not from the law of invariant weights."""
        return self.law == GAIN_LAW

    @property
    def few(self) -> bool:
        """Whether there are too few samples to judge the angle: its error is unknown, or more than 10 %."""
        return self.angle_error is None or self.angle_error > JUDGED

    @property
    def is_near(self) -> bool:
        """Whether the measured angle is within 5 % of the predicted one."""
        how_wrong = log_error(self.angle_vs_predicted)
        return how_wrong is not None and how_wrong <= ACCURACY

    @property
    def surely_off(self) -> bool:
        """Whether measured and predicted angle differ by more than 5 % and by more than chance."""
        if self.how_wrong is None or self.few:
            return False
        return self.how_wrong > max(ACCURACY, _SURE * (self.angle_error or 0.0))

    @property
    def norm_explains_angle(self) -> bool:
        """Whether norm and angle are off equilibrium alike: the angle goes as the norm to the power of -1 or -2.

        They are not while L, of which the equilibrium norm is made, has changed a lot within its average: then norm and
        time to settle say little.
        """
        if self.norm_vs_equilibrium is None or self.angle_vs_equilibrium is None:
            return False
        low, high = sorted((self.norm_vs_equilibrium**-1, self.norm_vs_equilibrium**-2))
        return bool(low / _ALIKE < self.angle_vs_equilibrium < high * _ALIKE)

    @property
    def settings_over_run(self) -> str:
        """The optimizer with its settings; lr at the first sample of the run, its highest one and the last."""
        if self.first_lr is None or self.lr is None or self.peak_lr is None or self.last_lr is None:
            return self.settings
        now = three_digits(self.last_lr)
        if self.peak_lr > max(self.first_lr, self.last_lr):
            course = f"lr={three_digits(self.first_lr)} -> {three_digits(self.peak_lr)} -> {now}"
        elif self.first_lr != self.last_lr:
            course = f"lr={three_digits(self.first_lr)} -> {now}"
        else:
            return self.settings
        return self.settings.replace(f"lr={three_digits(self.lr)}", course, 1)

    @property
    def when(self) -> str:
        """The steps of the window, with their number where few of them were sampled, and lr's range where it moved.

        Example:
            >>> at = dict.fromkeys(LayerSummary.__match_args__)
            >>> window = at | {"samples": 160, "first_step": 1840, "last_step": 1999, "lr_range": (3e-5, 1.2e-4)}
            >>> LayerSummary(**window).when
            'over steps 1,840-1,999 (lr 3e-5 to 1.2e-4)'
            >>> LayerSummary(**window | {"samples": 4}).when
            'over steps 1,840-1,999 (4 of 160 steps sampled, lr 3e-5 to 1.2e-4)'
        """
        if self.first_step is None or self.first_step == self.last_step:
            return self.steps
        low, high = (three_digits(lr) for lr in self.lr_range or (math.nan, math.nan))
        steps = self.last_step - self.first_step + 1
        few = self.samples < min(LEAST_WINDOW, steps)
        remarks = [f"{self.samples} of {steps:,} steps sampled"] if few else []
        remarks += [] if low == high else [f"lr {low} to {high}"]
        in_brackets = f" ({', '.join(remarks)})" if remarks else ""
        return f"{self.steps}{in_brackets}"

    @property
    def steps(self) -> str:
        """The steps of the window."""
        if self.first_step is None or self.first_step == self.last_step:
            return f"at step {self.last_step:,}"
        return f"over steps {self.first_step:,}-{self.last_step:,}"

    @property
    def state_word(self) -> str:
        """Its state, or in one or two words why it has none."""
        if self.no_law is not None:
            return "no law"
        if self.idle is not None:
            return self.idle.partition(" since ")[0]
        if self.invariant is False and not self.by_gain:
            return {None: "not invariant", "no": "not invariant", "no effect": "no effect"}.get(self.how, "not alone")
        if self.invariant is None and self.mean_cosine is not None and not self.by_gain:
            return "undecided"
        if self.state != NO_EQUILIBRIUM:
            return self.state or ""
        if self.weight_decay == 0:
            return "no decay"
        if self.decay_rounds_away:
            return "decay lost"
        return "gain unsure" if self.by_gain else self.state

    @property
    def sentence(self) -> str:
        """The summary in one sentence."""
        if self.angle is None:
            why = "" if self.idle is None else f": {self.idle}"
            return f"{self.name} has no angle in any sampled step{why}."
        rounds = ", within the rounding of its type" if self.turns_by_rounding else ""
        return f"{self.name} turns {self.angle:.3g} rad per step {self.when}{rounds}; {'; '.join(_clauses(self))}."

    @property
    def turns_by_rounding(self) -> bool:
        """Whether the measured angle is no larger than what rounding of the weights makes."""
        return self.angle is not None and self.angle < (self.resolution or 0.0)


def log_error(ratio: float | None) -> float | None:
    """|ln(ratio)|, finite for a ratio of 0."""
    return None if ratio is None else abs(math.log(max(ratio, _LEAST_RATIO)))


def times(ratio: float) -> str:
    """How far a ratio is from 1, in words.

    Example:
        >>> times(0.714), times(2.0), times(1.004)
        ('1.4x too small', '2x too large', 'right to 1 %')
    """
    if abs(ratio - 1) < 0.01:
        return "right to 1 %"
    return f"{ratio:.3g}x too large" if ratio > 1 else f"{1 / ratio:.3g}x too small"


def _few_digits(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def how_long(steps: float, epochs: float | None) -> str:
    """A time in steps, with epochs where their length is known.

    Example:
        >>> how_long(2100, 5.37), how_long(1, None)
        ('2,100 more steps (5.4 epochs)', '1 more step')
        >>> how_long(256, 0.001)
        '256 more steps'
    """
    in_epochs = f" ({_few_digits(epochs)} epochs)" if epochs and epochs >= 0.05 else ""
    return counted(math.ceil(steps), "more step") + in_epochs


def _clauses(layer: LayerSummary) -> list[str]:
    """The clauses of the sentence after the measured angle."""
    if layer.no_law is not None:
        return [layer.no_law]
    if layer.idle is not None:
        return [layer.idle]
    if layer.invariant is False and not layer.by_gain:
        return [f"{_not_invariant(layer)}, {_why_no_gain(layer)}"]
    if layer.angle_predicted is None:
        undecided = layer.invariant is None and layer.mean_cosine is not None
        why = "whether it is scale-invariant is undecided, " if undecided else ""
        return [f"{why}{_why_no_gain(layer)}"]
    predicts, is_now = f"{layer.settings} predicts {layer.angle_predicted:.3g}", layer.last_lr == layer.lr
    if layer.by_gain:
        predicts = f"its measured gain {gain_text(layer)} predicts {layer.angle_predicted:.3g}"
    elif layer.invariant is None:
        return [f"{predicts} if it is scale-invariant, which is undecided"]
    if layer.weight_decay == 0:
        return [predicts, "without weight decay there is no equilibrium"]
    if layer.decay_rounds_away:
        return [predicts, "its type rounds its decay away: there is no equilibrium"]
    if layer.angle_equilibrium is None:
        unknown = "its gain is not known to be positive: no equilibrium is stated"
        return [predicts, unknown if layer.by_gain else "with these settings there is no equilibrium"]
    if layer.state == SETTLED:
        return [predicts, "it is settled" if is_now else "it was settled there"]
    when = "now" if is_now else "there"
    return [f"{predicts} {when} and {layer.angle_equilibrium:.3g} in equilibrium", _distance(layer)]


def gain_text(layer: LayerSummary) -> str:
    """The growth gain with its standard error.

    Example:
        >>> at = dict.fromkeys(LayerSummary.__match_args__)
        >>> gain_text(LayerSummary(**at | {"gain": 23.4, "gain_error": 1.52}))
        '23.4 ± 1.5'
        >>> gain_text(LayerSummary(**at | {"gain": 693.0, "gain_error": 132.0}))
        '693 ± 132'
    """
    return "" if layer.gain is None else f"{plain(layer.gain, digits=3)} ± {plain(layer.gain_error or math.nan)}"


def _why_no_gain(layer: LayerSummary) -> str:
    one = "{} has no prediction" if layer.no_gain is None else layer.no_gain[0]
    return f"and {one.format('it')}"


def _not_invariant(layer: LayerSummary) -> str:
    if layer.how is None or layer.how == "no":
        cosine = "" if layer.mean_cosine is None else f" (mean cosine with its gradient {layer.mean_cosine:.2g})"
        return f"it {'is not' if layer.how else 'does not look'} scale-invariant{cosine}"
    return f"it is not scale-invariant by itself ({layer.how})"


def _distance(layer: LayerSummary) -> str:
    since = "since the last change " if layer.state == DISTURBED else ""
    if layer.lr_runs_out:
        high, now = (three_digits(lr or math.nan) for lr in ((layer.lr_range or (0.0, 0.0))[1], layer.last_lr))
        fell = "lr is falling" if high == now else f"lr fell from {high} to {now} since step {layer.first_step or 0:,}"
        return f"{fell}, too fast for a time to settle at one lr"
    if layer.norm_vs_equilibrium is not None and not layer.norm_explains_angle:
        return "its gradient has changed too much for a time to settle"
    norm = None if layer.norm_vs_equilibrium is None else f"is {times(layer.norm_vs_equilibrium)}"
    steps = layer.steps_to_settle
    if not steps and norm is not None and layer.passing is not None:
        ends = ("below", "above") if layer.passing > 0 else ("above", "below")
        pace = f"it takes {counted(round(abs(layer.passing)), 'step')} from 5 % {ends[0]} equilibrium to 5 % {ends[1]}"
        return f"{since}its norm {norm}, but not at rest: at its pace {pace}"
    if steps == 0 and norm is not None and layer.angle_vs_equilibrium is not None:
        return f"{since}its norm {norm}, but it still turns at {layer.angle_vs_equilibrium:.2g}x its equilibrium"
    wait = None
    if steps:
        wait = f"needs {how_long(steps, layer.epochs_to_settle)} to settle at this lr and weight decay"
    if steps and steps > _MUCH_LONGER * (layer.last_step + 1):
        wait = f"would take more than {_MUCH_LONGER} times the steps so far to settle at this lr and weight decay"
    return f"{since}its norm {' and '.join(filter(None, (norm, wait))) or 'is not settled'}"
