"""One definition, theorem, algorithm, figure or table of a document, and where it is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["works", "at desk scale", "preset only"]
STATUSES = get_args(Status)
MEANINGS: dict[Status, str] = {
    "works": "a function with its test, or an experiment at the paper's own settings",
    "at desk scale": "an experiment on smaller networks or images; the paper's settings are its `--scale paper`",
    "preset only": "the paper's settings, never run here",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One definition, theorem, algorithm, figure or table.

    Attributes:
        where: its name in the document.
        says: its content in a few words.
        status: one of `STATUSES`.
        names: public names below `equilibria`, such as "control.RescaleOnDecay".
        laws: names below `equilibria.theory`, with their derivation in the docstring.
        figures: figures here, as "experiment/figure".
        experiments: experiments beside those of the figures.
        note: a difference from the document, or the missing part.
    """

    where: str
    says: str
    status: Status
    names: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    experiments: tuple[str, ...] = ()
    note: str = ""

    @property
    def all_experiments(self) -> tuple[str, ...]:
        """The experiments, those of the figures first."""
        return tuple(dict.fromkeys([*(figure.split("/")[0] for figure in self.figures), *self.experiments]))


def works(where: str, says: str, **places: str) -> Item:
    """An item that works."""
    return _item(where, says, "works", **places)


def at_desk_scale(where: str, says: str, **places: str) -> Item:
    """An item that works at desk scale."""
    return _item(where, says, "at desk scale", **places)


def preset_only(where: str, says: str, **places: str) -> Item:
    """An item with the paper's settings, never run here."""
    return _item(where, says, "preset only", **places)


def _item(where: str, says: str, status: Status, *, note: str = "", **places: str) -> Item:
    """An item whose names, laws, figures and experiments are words of a string."""
    return Item(where, says, status, note=note, **{kind: tuple(words.split()) for kind, words in places.items()})
