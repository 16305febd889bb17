"""Whether a weight is settled, on its way, or was disturbed: the memory behind the word in each sample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from equilibria.measure.samples import APPROACHING, DISTURBED, NO_EQUILIBRIUM, SETTLED

Flags = NDArray[np.bool_]


class Verdicts:
    """One verdict per weight, from sample to sample.

    Example:
        >>> verdicts = Verdicts(1)
        >>> def see(settled, changed):
        ...     return verdicts.judge(np.array([settled]), changed=np.array([changed]), balanced=np.array([True]))[0]
        >>> see(False, False), see(True, False), see(False, True), see(False, False), see(True, False)
        ('approaching', 'settled', 'disturbed', 'disturbed', 'settled')
    """

    def __init__(self, count: int) -> None:
        self._was_settled, self._disturbed = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)

    def judge(self, settled: Flags, *, changed: Flags, balanced: Flags) -> list[str]:
        """The state of every weight.

        Args:
            settled: whether its angle is within the tolerance of equilibrium.
            changed: whether settings or the weight itself were changed since the last sample.
            balanced: whether there is an equilibrium at all.
        """
        self._disturbed = ~settled & (self._disturbed | (changed & self._was_settled))
        self._was_settled = settled.copy()
        moving = np.where(self._disturbed, DISTURBED, APPROACHING)
        words: list[str] = np.where(balanced, np.where(settled, SETTLED, moving), NO_EQUILIBRIUM).tolist()
        return words

    def state_dict(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        held = {"was_settled": self._was_settled, "disturbed": self._disturbed}
        return {name: torch.from_numpy(flags.copy()) for name, flags in held.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from a checkpoint."""
        self._was_settled, self._disturbed = (state[name].cpu().numpy().copy() for name in ("was_settled", "disturbed"))
