"""Where data sets are looked for, what is said when they are not there, and whether files are the official ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from equilibria.errors import EquilibriaError


def label_array(labels: np.ndarray, *, file: Path | str, classes: int) -> np.ndarray:
    """Labels (count,) as int64; nothing is rounded, and a negative one does not count from the end.

    Args:
        labels: as they were read.
        file: where from, for messages.
        classes: how many there are.

    Example:
        >>> label_array(np.array([2, -1]), file="y.npy", classes=10)
        Traceback (most recent call last):
        ...
        equilibria.errors.EquilibriaError: y.npy has a label of -1; expected labels of 0 to 9
    """
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise EquilibriaError(f"{file} has labels of {labels.dtype} {labels.shape}; expected whole numbers (count,)")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if wrong.size:
        raise EquilibriaError(f"{file} has a label of {wrong[0]}; expected labels of 0 to {classes - 1}")
    return labels.astype(np.int64)


VARIABLE = "EQUILIBRIA_DATA"


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The given folder, else that of the environment variable, else ``~/.cache/equilibria/data``."""
    if folder is not None:
        found = Path(folder).expanduser()
        if found.is_file():
            raise EquilibriaError(f"got folder={str(folder)!r}, which is a file; expected the folder that holds it")
        return found
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "equilibria" / "data"


def missing(name: str, folder: Path, *, looked_for: str, get: str) -> EquilibriaError:
    """The one message about a data set that is not there: what was looked for where, where to get it, where to put it.

    Args:
        name: of the data set.
        folder: where it was looked for.
        looked_for: the files that would do.
        get: the files to get and the official page that has them.
    """
    return EquilibriaError(
        f"{name} was not found in {folder}; looked for {looked_for}. Get {get}, and put what you get into that folder. "
        f"To use another one, set the environment variable {VARIABLE} to it, or pass folder=... from Python."
    )


def verify_md5(content: bytes, expected: str, *, file: Path | str) -> None:
    """Refuse content that is not that of the official file.

    MD5 is what the authors publish. It finds damage, not malice: nothing that is read is ever executed.
    """
    got = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if got != expected:
        raise _other("MD5", got, expected, file)


def verify_sha256(images: bytes, expected: str, *, file: Path | str) -> None:
    """Refuse a file whose images, in the form of the official file that has the same ones, are not that file."""
    got = hashlib.sha256(images).hexdigest()
    if got != expected:
        raise _other("images of SHA-256", got, expected, file)


def _other(what: str, got: str, expected: str, file: Path | str) -> EquilibriaError:
    return EquilibriaError(
        f"{file} has {what} {got}; expected {expected}, that of the official file. Get it again; data of your own "
        "in this format are read from Python alone, with verify=False."
    )
