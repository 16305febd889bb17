"""equilibria: predict, measure and control how fast every layer of a normalised network really turns."""

from equilibria._version import __version__
from equilibria.errors import EquilibriaError

__all__ = ["EquilibriaError", "__version__"]
