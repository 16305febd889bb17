"""Runs the examples of a Markdown page and compares what they print with what the page shows.

The blocks of a page run in order, in one namespace and one empty folder:

- ```python: is executed. The next block, if it is ```text, shows what it printed.
- ```console: every line ``$ equilibria ...`` is run; up to the next such line the block shows what it printed.
- other languages (sh, toml, none) are not looked at.

A comment on a line before a block, which no reader sees, says what is special about it:

    <!-- numbers: rel=0.05 abs=0.01 -->   tolerance of the numbers in the rest of the page
    <!-- file: train.py -->               the python block is written to that file instead of executed
    <!-- not run: needs two GPUs -->      the python block must compile, no more; its output is not compared
    <!-- exit: 1 -->                      the commands of the console block end with that status
    <!-- slow -->                         anywhere: the page is left to `make test-all` and `make docs`

What is printed must have the words that are shown; runs of blanks count as one. A number in a ```text block may be off
by 1 % or one in its last decimal (training rounds differently from machine to machine), one in a ```console block not
at all; a `numbers` comment widens both, by at most half of any number shown (0 aside). A line ``...`` stands for any
number of lines.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from click.testing import CliRunner

FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<body>.*?)^```[ \t]*$", flags=re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"^<!-- (?P<key>numbers|file|not run|exit|slow)(?:: (?P<value>.*?))? -->$", flags=re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it begins at, and the comments before it."""

    language: str
    body: str
    line: int
    comments: dict[str, str]


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be off, beside one in the last digit shown; ``exact`` asks for the same characters."""

    rel: float = 0.01
    abs: float = 0.0
    exact: bool = False


@dataclass
class Page:
    """A page, and after `run` what its examples printed and the names they left behind."""

    path: Path
    text: str = ""
    world: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})
    printed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = self.text or self.path.read_text(encoding="utf-8")

    @property
    def slow(self) -> bool:
        return any(found["key"] == "slow" for found in COMMENT.finditer(self.text))

    def blocks(self) -> Iterator[Block]:
        end = 0
        for fence in FENCE.finditer(self.text):
            comments = {found["key"]: found["value"] or "" for found in COMMENT.finditer(self.text, end, fence.start())}
            line = self.text.count("\n", 0, fence.start()) + 1
            yield Block(fence["language"].strip(), fence["body"], line, comments)
            end = fence.end()

    @property
    def executes(self) -> bool:
        return any(block.language in ("python", "console") for block in self.blocks())

    def replaced(self, changes: dict[str, str]) -> Page:
        """The same page with other code, as a shorter training; every key must be there."""
        text = self.text
        for old, new in changes.items():
            assert old in text, f"{self.path.name} does not have {old!r}"
            text = text.replace(old, new)
        return Page(self.path, text)

    def run(self, *, compare: bool = True) -> Page:
        """Run everything in the current folder; without ``compare`` only that it runs is checked."""
        tolerance: Tolerance | None = None
        python: str | None = None
        is_left_out = False
        for block in self.blocks():
            if "numbers" in block.comments:
                tolerance = _tolerance(block.comments["numbers"])
            where = f"{self.path.name}:{block.line}"
            if block.language == "console":
                self._console(block, where, tolerance or Tolerance(exact=True), compare)
            elif block.language == "text":
                assert python is not None, f"{where}: this output follows no python block"
                if compare and not is_left_out:
                    assert_shown(python, block.body, tolerance or Tolerance(), where)
            python = self._python(block) if block.language == "python" else None
            is_left_out = "not run" in block.comments
        return self

    def _python(self, block: Block) -> str:
        code = compile("\n" * block.line + block.body, str(self.path), "exec")
        if "file" in block.comments:
            Path(block.comments["file"]).write_text(block.body, encoding="utf-8")
        if "file" in block.comments or "not run" in block.comments:
            return ""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, self.world)
        self.printed.append(out.getvalue())
        return out.getvalue()

    def _console(self, block: Block, where: str, tolerance: Tolerance, compare: bool) -> None:
        status = int(block.comments.get("exit", "0"))
        for line, shown in commands(block.body, where):
            with fresh_modules():
                printed = run_command(line, where, status)
            self.printed.append(printed)
            if compare:
                assert_shown(printed, shown, tolerance, f"{where}: $ {line}")


def _tolerance(text: str) -> Tolerance:
    return Tolerance(**{key: float(value) for key, value in (part.split("=") for part in text.split())})


def commands(body: str, where: str) -> list[tuple[str, str]]:
    """Every command of a console block with the output shown below it."""
    joined = body.replace("\\\n", " ")
    pieces = re.split(r"^\$ ", joined, flags=re.MULTILINE)
    assert not pieces[0].strip() and len(pieces) > 1, f"{where}: a console block begins with '$ equilibria ...'"
    return [(line, shown) for line, _, shown in (piece.partition("\n") for piece in pieces[1:])]


def run_command(line: str, where: str, status: int) -> str:
    from equilibria.cli import app

    program, *arguments = shlex.split(line)
    assert program == "equilibria", f"{where}: only 'equilibria' is run, got {program!r} (use ```sh for what is not)"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, f"{where}: $ {line} ended with {result.exit_code}:\n{result.output}"
    return result.output


@contextlib.contextmanager
def fresh_modules() -> Iterator[None]:
    """Modules that a command imports from the page's folder are forgotten: the next page has its own train.py."""
    here, path = Path.cwd(), list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if here in Path(getattr(module, "__file__", None) or "/").parents:
                del sys.modules[name]


def assert_shown(printed: str, shown: str, tolerance: Tolerance, where: str) -> None:
    """What was printed is what the page shows."""
    _refuse_blind(tolerance, shown, where)
    found, expected = (_lines(text) for text in (printed, shown))
    if not _same(found, expected, tolerance):
        both = "\n".join(["--- the page shows", *expected, "--- the example prints", *found])
        raise AssertionError(f"{where}\n{both}")


def _refuse_blind(tolerance: Tolerance, shown: str, where: str) -> None:
    """A tolerance of more than half a number would let nearly anything pass for it."""
    values = [float(text.replace(",", "")) for text in NUMBER.findall(shown)]
    for value in values if not tolerance.exact else []:
        assert value == 0 or max(tolerance.rel, tolerance.abs / value) <= 0.5, (
            f"{where}: shows {value:g}, and `numbers: rel={tolerance.rel:g} abs={tolerance.abs:g}` lets it be off "
            "by more than half; give a smaller abs, or only rel"
        )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _same(found: list[str], expected: list[str], tolerance: Tolerance) -> bool:
    if not expected:
        return not found
    if expected[0].strip() == "...":
        return any(_same(found[skipped:], expected[1:], tolerance) for skipped in range(len(found) + 1))
    return bool(found) and _same_line(found[0], expected[0], tolerance) and _same(found[1:], expected[1:], tolerance)


def _same_line(found: str, expected: str, tolerance: Tolerance) -> bool:
    if found == expected or tolerance.exact:
        return found == expected
    words = [" ".join(NUMBER.sub("#", line).split()) for line in (found, expected)]
    numbers = zip(NUMBER.findall(found), NUMBER.findall(expected), strict=False)
    return words[0] == words[1] and all(_near(*pair, tolerance) for pair in numbers)


def _near(found: str, expected: str, tolerance: Tolerance) -> bool:
    value, wanted = (float(text.replace(",", "")) for text in (found, expected))
    allowed = max(tolerance.rel * abs(wanted), tolerance.abs, 1.001 * _last_digit(expected))
    return abs(value - wanted) <= allowed


def _last_digit(number: str) -> float:
    """One in the last digit of a number with decimals or exponent; of a whole number nothing (steps are counted)."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or "0") - decimals) if decimals or exponent else 0.0
