"""The laboratory: small problems, networks, data, training, the papers' experiments, and the demo."""

from __future__ import annotations

import importlib
from typing import Any

from equilibria.errors import EquilibriaError


def import_extra(name: str) -> Any:
    """Import a package that only the ``lab`` extra installs.

    Raises:
        EquilibriaError: the package is not installed; the message has the pip command.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise EquilibriaError(
            f'got no {name}, which the laboratory needs; install it: pip install "equilibria[lab]"'
        ) from None
