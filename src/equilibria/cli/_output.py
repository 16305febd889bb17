"""What commands print: JSON without NaN, and standard streams that may be closed, full, or read only in part."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import sys
from typing import Any, TextIO, cast

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 plus the number of the signal."""


def jsonable(value: Any) -> Any:
    """Dataclasses, arrays and numbers as JSON values; numbers that are not finite become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_json(value: Any) -> None:
    """Print one JSON value and nothing else."""
    print(json.dumps(jsonable(value), allow_nan=False))


# ---- standard streams


class OutputError(Exception):
    """Standard output cannot be written.

    Not an OSError, because click turns those of a broken pipe into its own exit code.

    Attributes:
        reader_left: whether the reader (head, less) has closed the pipe, which is not a failure.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.reader_left = cause.errno == errno.EPIPE


class _Output(io.TextIOWrapper):
    """Standard output whose failures differ from those of other files."""

    def write(self, text: str, /) -> int:
        """Write, or raise `OutputError`."""
        try:
            return super().write(text)
        except OSError as error:
            raise OutputError(error) from None

    def flush(self) -> None:
        """Flush, or raise `OutputError`."""
        try:
            super().flush()
        except OSError as error:
            raise OutputError(error) from None


def guard_streams() -> None:
    """Replace missing standard streams, and show ? for characters that the console cannot."""
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    cast("io.TextIOWrapper", sys.stderr).reconfigure(errors="replace")
    if sys.stdout is None:  # closed by the shell: writing to the replacement fails, as on a full disk
        sys.stdout = _Output(os.fdopen(os.open(os.devnull, os.O_RDONLY), "wb"))
        return
    console = cast("io.TextIOWrapper", sys.stdout)
    sys.stdout = _Output(
        console.buffer,
        encoding=console.encoding,
        errors="replace",
        line_buffering=console.line_buffering,
        write_through=console.write_through,
    )


def print_error(text: str) -> None:
    """Print a line on stderr, if it can be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Send the rest of a stream to the null device: the interpreter flushes it once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
