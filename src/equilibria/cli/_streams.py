"""Standard streams that may be closed, full, or read by someone who stops early."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO, cast

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the number of the signal."""


class OutputError(Exception):
    """Standard output takes nothing more.

    Not an OSError: those of a broken pipe click would turn into an exit code of its own.

    Attributes:
        reader_left: the reader (head, less) has seen enough, which is no failure.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.reader_left = cause.errno == errno.EPIPE


class _Output(io.TextIOWrapper):
    """Standard output whose failures are told apart from those of other files."""

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
    """Replace the standard streams by ones that exist, and that show ? for what the console cannot show."""
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    cast("io.TextIOWrapper", sys.stderr).reconfigure(errors="replace")
    if sys.stdout is None:  # closed by the shell: one that cannot be written, so that this fails as a full disk does
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


def tell(text: str) -> None:
    """A line on stderr, if that can be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: TextIO) -> None:
    """Let what is left in a stream go nowhere: the interpreter flushes it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
