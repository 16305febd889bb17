"""Train, until the step at which somebody pulls the plug: no clean-up runs after it."""

from __future__ import annotations

import os
import signal
import sys

import torch

from equilibria.lab.training import train
from tests.helpers.training_cases import recipe

if __name__ == "__main__":
    folder, kind, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)

    def die(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    train(recipe(kind, rescale=True), folder=folder, checkpoint_steps=4, progress=die)
