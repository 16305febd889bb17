"""The slowest honest monitor: every weight copied in float64 before each step and compared after it.

It knows nothing of the library, so that the demo's physics is checked independently.
"""

from __future__ import annotations

import numpy as np
import torch


class SlowMonitor:
    """Watches the four-dimensional weights of a model, as a context manager."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 4}
        self.optimizer = optimizer
        self.angles: dict[str, list[float]] = {name: [] for name in self.weights}
        self.norms: dict[str, list[float]] = {name: [] for name in self.weights}
        self.moved: dict[str, list[float]] = {name: [] for name in self.weights}

    def __enter__(self) -> SlowMonitor:
        self.hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().to(torch.float64, copy=True).flatten() for name, weight in self.weights.items()}

    def _before(self, *_: object) -> None:
        self.old = self._copies()

    def _after(self, *_: object) -> None:
        for name, new in self._copies().items():
            old = self.old[name]
            chord = (new / new.norm() - old / old.norm()).norm()
            self.angles[name].append(2 * torch.asin(chord / 2).item())
            self.norms[name].append(old.norm().item())
            self.moved[name].append((new - old).norm().item())

    def rms_angles(self, first: int, last: int) -> np.ndarray:
        """Root mean square over steps, one per weight."""
        return np.array([np.sqrt(np.mean(np.square(angles[first:last]))) for angles in self.angles.values()])
