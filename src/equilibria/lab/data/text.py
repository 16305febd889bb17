"""Text that every Python has, the documentation behind `help()`, in batches of characters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from equilibria.errors import EquilibriaError, whole

_KNOWN = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
CHARACTERS = len(_KNOWN) + 1
"""Newline, the printable characters of ASCII, and one for all others."""


def python_documentation() -> Tensor:
    """The topics of `pydoc_data.topics` in alphabetic order, one number per character, int64.

    This is the language reference in plain text (Python Software Foundation License), half a million characters. It
    differs slightly from one version of Python to the next.

    Example:
        >>> text = python_documentation()
        >>> len(text) > 100_000, int(text.max()) < CHARACTERS
        (True, True)
    """
    from pydoc_data.topics import topics

    number = {character: place for place, character in enumerate(_KNOWN)}
    whole_text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([number.get(character, CHARACTERS - 1) for character in whole_text])


class TextBatches:
    """Endless batches of random stretches of a text as inputs, and the same one character further on as targets.

    Args:
        text: one number per character.
        length: of a stretch.
        batch_size: stretches in a batch.
        seed: batches of one seed are the same everywhere.

    Example:
        >>> inputs, targets = next(iter(TextBatches(torch.arange(100), length=4, batch_size=2)))
        >>> inputs.shape, bool((targets == inputs + 1).all())
        (torch.Size([2, 4]), True)
    """

    def __init__(self, text: Tensor, *, length: int, batch_size: int, seed: int = 0) -> None:
        if len(text) <= whole("length", length, low=1):
            raise EquilibriaError(f"got a text of {len(text)} characters; expected more than length={length}")
        self.text, self.length = text, length
        self.batch_size, self.seed = whole("batch_size", batch_size, low=1), whole("seed", seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from a step on; each batch has its own generator."""
        while True:
            yield self.batch(step)
            step += 1

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step."""
        drawn = np.random.default_rng([self.seed, step]).integers(len(self.text) - self.length, size=self.batch_size)
        places = torch.from_numpy(drawn).view(-1, 1) + torch.arange(self.length)
        return self.text[places], self.text[places + 1]
