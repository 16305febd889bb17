"""Attacks on the command line: commands with options, values and files that people and scripts mistype."""

from __future__ import annotations

import contextlib
import io
import random
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import click
import numpy as np

from equilibria.cli import app, main
from equilibria.records import RecordWriter
from tests.torture import Trials

_LEFT_OUT = {"demo", "reproduce", "serve"}  # train for minutes, or run until they are stopped
_NUMBERS = "0 1 -1 0.1 5e-4 0.9 1e-3 1e308 1e-308 nan inf -inf 1,2 0.9,0.999 1_000 0x10 100 391 ١".split()  # noqa: SIM905
_WORDS = [
    "",
    " ",
    "sgd",
    "adamw",
    "lion",
    "muon",
    "cosine",
    "step",
    "SGD",
    "--",
    "-",
    "☃",
    "a b",
    "\n",
    "x" * 5000,
    "now",
]


def command_lines(random: random.Random, folder: Path) -> Trials:
    """Generated command lines: an exit code of 0, 1 or 2, and never a traceback."""
    files = _files(folder)
    commands = {name: app.get_command(None, name) for name in app.list_commands(None) if name not in _LEFT_OUT}
    while True:
        name = random.choice(list(commands))
        arguments = [name, *_arguments(random, commands[name], files)]
        shown = shlex.join(argument[:60] for argument in arguments)
        typed = mock.patch.object(sys, "argv", ["equilibria", *arguments])
        with typed, warnings.catch_warnings(action="ignore"), contextlib.chdir(folder):  # some lines write files
            outcome = _outcome(shown)
        yield outcome


def _outcome(line: str) -> str:
    """Run the command that sys.argv holds, as from a shell."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as end:
        if end.code not in (0, 1, 2):
            return f"exit code {end.code!r}: {line}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}: {line}"
    errors.seek(0)
    return f"a traceback: {line}" if "Traceback" in errors.read() else ""


def _arguments(random: random.Random, command: click.Command, files: Sequence[str]) -> list[str]:
    words: list[str] = []
    options = [option for option in command.params if isinstance(option, click.Option)]
    for option in random.sample(options, random.randint(0, min(len(options), 7))):
        words.append(random.choice(option.opts))
        if not option.is_flag and random.random() < 0.95:
            words += [_value(random, option, files) for _ in range(max(option.nargs, 1))]
    for argument in command.params:
        if isinstance(argument, click.Argument) and random.random() < 0.85:
            words.insert(random.randint(0, len(words)), random.choice([*files, *_WORDS]))
    if random.random() < 0.1:
        words.insert(random.randint(0, len(words)), random.choice([*_WORDS, *_NUMBERS, "--no-such-option"]))
    return words


def _value(random: random.Random, option: click.Option, files: Sequence[str]) -> str:
    is_path = any(word in (option.name or "") for word in ("html", "file", "save", "diff", "path"))
    if is_path and random.random() < 0.8:
        return random.choice(files)
    if isinstance(option.type, click.Choice) and random.random() < 0.7:
        return str(random.choice(list(option.type.choices)))
    return random.choice(_NUMBERS if random.random() < 0.75 else _WORDS)


def _files(folder: Path) -> list[str]:
    """A run, a damaged one, an empty folder, files of other kinds, and names of nothing."""
    with RecordWriter(folder / "run", metadata={"params": []}) as writer:
        steps = np.repeat(np.arange(200), 2)
        values = {"angle": np.full(400, 0.01), "norm": np.full(400, 1.0), "lr": np.full(400, 0.1)}
        writer.append({"step": steps, "param": ["a", "b"] * 200, **values})
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.json").write_text("{")
    (folder / "empty").mkdir()
    (folder / "numbers.csv").write_text("0.1\n0.2\nx\n")
    (folder / "bytes").write_bytes(bytes(range(256)))
    names = (
        "run",
        "damaged",
        "empty",
        "numbers.csv",
        "bytes",
        "new.html",
        "missing/new.html",
        "run/run.json",
        "nothing",
    )
    return [*(str(folder / name) for name in names), "/dev/null", "/dev/full", "tests.torture:run_attack", "json:loads"]
