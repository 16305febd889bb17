"""Files of data sets: the folder they are in, the message if they are missing, and checks of their contents."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from equilibria.errors import EquilibriaError


def label_array(labels: np.ndarray, *, file: Path | str, classes: int) -> np.ndarray:
    """Labels (count,) as int64; raises EquilibriaError for labels that are not whole numbers below ``classes``.

    Args:
        labels: as read from the file.
        file: for messages.
        classes: number of classes.

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
    """``folder``, else that of the environment variable, else ``~/.cache/equilibria/data``."""
    if folder is not None:
        path = Path(folder).expanduser()
        if path.is_file():
            raise EquilibriaError(f"got folder={str(folder)!r}, which is a file; expected the folder that holds it")
        return path
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "equilibria" / "data"


def missing(name: str, folder: Path, *, looked_for: str, get: str) -> EquilibriaError:
    """The error about a missing data set: which files are missing, where to get them and where to put them.

    Args:
        name: of the data set.
        folder: that was searched.
        looked_for: names of the files.
        get: the files to get, and the official page that has them.
    """
    return EquilibriaError(
        f"{name} was not found in {folder}; looked for {looked_for}. Get {get}, and put what you get into that folder. "
        f"To use another one, set the environment variable {VARIABLE} to it, or pass folder=... from Python."
    )


def verify_md5(content: bytes, expected: str, *, file: Path | str) -> None:
    """Raise EquilibriaError unless this is the content of the official file.

    The authors publish MD5. It finds damage, not malice: nothing in the file is ever executed.
    """
    got = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if got != expected:
        raise _other("MD5", got, expected, file)


def verify_sha256(images: bytes, expected: str, *, file: Path | str) -> None:
    """Raise EquilibriaError unless these images, in the form of the official file, have its hash."""
    got = hashlib.sha256(images).hexdigest()
    if got != expected:
        raise _other("images of SHA-256", got, expected, file)


def _other(what: str, got: str, expected: str, file: Path | str) -> EquilibriaError:
    return EquilibriaError(
        f"{file} has {what} {got}; expected {expected}, that of the official file. Get it again; data of your own "
        "in this format are read from Python alone, with verify=False."
    )
