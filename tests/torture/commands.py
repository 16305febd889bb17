"""Attacks on the command line: commands with options, values and files that people and scripts mistype."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import click

from equilibria.cli import app, main
from equilibria.doctor._differences import _COMPARED
from equilibria.records import RecordWriter
from equilibria.theory import SGD
from tests.helpers.sample_worlds import world
from tests.helpers.served import columns
from tests.torture import Trials

_LEFT_OUT = {"bench", "demo", "reproduce", "serve"}  # train for minutes, or run until they are stopped
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


# Valid lines beside the examples of the help pages: together they use most options.
_VALID = (
    "equilibrium --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9 --unit-grad-sq 25",
    "equilibrium --optimizer muon --lr 0.02 --wd 0.1 --json",
    "plan --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9 --schedule step --milestones 60,120,160 --factor 0.2 "
    "--epochs 200 --steps-per-epoch 391 --html plan.html",
    "plan --optimizer adamw --lr 1e-3 --wd 0.1 --betas 0.9,0.95 --schedule cosine --warmup 100 --steps 2000 --json",
    "fold --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9 --steps 100 --json",
    "translate --optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9 --scale-batch 4",
    "translate --optimizer sgd --lr 0.1 --wd 5e-4 --hold-angle-at-wd 1e-3 --json",
    "forecast runs/a --steps 2000 --json",
    "forecast runs/a --from 300",
    "forecast runs/a --steps 2000 --suggest now",
    "report runs/a --json",
    "verify runs/a --json",
)
_TARGET = "torture_target:make"  # in place of the examples' train:make, which other tests may import
_TARGET_SOURCE = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(2)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3), batches, torch.nn.CrossEntropyLoss()
"""


class CommandLines:
    """Valid lines with one or two mistakes: an exit code of 0, 1 or 2, and never a traceback.

    Lines that do not get past the parsing of their options test click rather than the library, so they are counted.

    Attributes:
        count: lines so far.
        past_parsing: how many called the function of their command.
        succeeded: how many ended with exit code 0.
    """

    def __init__(self) -> None:
        self.count = self.past_parsing = self.succeeded = 0

    def __call__(self, random: random.Random, folder: Path) -> Trials:
        """The trials, each with another line."""
        files = _files(folder)
        commands = {name: app.get_command(None, name) for name in app.list_commands(None) if name not in _LEFT_OUT}
        valid = _valid_lines(commands)
        self.count = self.past_parsing = self.succeeded = 0
        try:
            while True:
                name = random.choice(list(commands))
                words = _mutated(random, random.choice(valid[name]), commands[name], files)
                yield self._run(words, folder)
        finally:
            sys.modules.pop(_TARGET.partition(":")[0], None)

    def summary(self) -> str:
        """How far the lines got."""
        shares = self.past_parsing / self.count, self.succeeded / self.count
        return "{:.0%} got past the parsing of their options, {:.0%} succeeded".format(*shares)

    def _run(self, words: Sequence[str], folder: Path) -> str:
        typed = mock.patch.object(sys, "argv", ["equilibria", *words])
        place = mock.patch.object(sys, "path", [*sys.path])  # doctor adds the folder
        with typed, place, warnings.catch_warnings(action="ignore"), contextlib.chdir(folder), _Calls() as calls:
            sentence, code = _outcome(shlex.join(word[:60] for word in words))
        self.count += 1
        self.past_parsing += calls.body
        self.succeeded += code == 0
        return sentence


class _Calls:
    """Whether the body of a command is called while this is open."""

    def __enter__(self) -> Self:
        self.body = False
        invoke = click.Context.invoke

        def noted(context: click.Context, callback: Any, *args: Any, **kwargs: Any) -> Any:
            self.body |= getattr(context.command, "callback", None) is callback and context.command is not app
            return invoke(context, callback, *args, **kwargs)

        self._patch = mock.patch.object(click.Context, "invoke", noted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def _valid_lines(commands: Mapping[str, click.Command]) -> dict[str, list[list[str]]]:
    """The words of lines that succeed, by command: the examples of its help, and those above."""
    examples = [
        line.strip().removeprefix("equilibria ").partition(" > ")[0]
        for command in commands.values()
        for line in (command.epilog or "").splitlines()
        if line.strip().startswith("equilibria ")
    ]
    lines = [shlex.split(line.replace("train:make", _TARGET)) for line in (*examples, *_VALID)]
    return {name: [words for words in lines if words[0] == name] for name in commands}


def _mutated(random: random.Random, line: Sequence[str], command: click.Command, files: Sequence[str]) -> list[str]:
    """The line with one or two mistakes; the name of the command stays."""
    name, *words = line
    items = _items(words, command)
    for _ in range(random.choice([1, 1, 2])):
        mistakes = [_other_value, _other_value, _other_value, _added_option, _added_option, _typo, _lost, _twice]
        mistake = random.choice(mistakes) if items else _added_option
        mistake(random, items, command, files)
    return [name, *(word for item in items for word in item)]


def _items(words: Sequence[str], command: click.Command) -> list[list[str]]:
    """The words of a line, every option with its values."""
    rest, items = list(words), []
    while rest:
        option = _named_option(command, rest[0])
        length = 1 if option is None or option.is_flag else 1 + option.nargs
        items.append(rest[:length])
        del rest[:length]
    return items


def _other_value(random: random.Random, items: list[list[str]], command: click.Command, files: Sequence[str]) -> None:
    """Another value of an option, or another argument."""
    item = random.choice([item for item in items if len(item) > 1 or not item[0].startswith("-")] or items)
    option = _named_option(command, item[0])
    item[-1] = random.choice([*files, *_WORDS]) if option is None else _value(random, option, files)


def _added_option(random: random.Random, items: list[list[str]], command: click.Command, files: Sequence[str]) -> None:
    option = random.choice([option for option in command.params if isinstance(option, click.Option)])
    values = [] if option.is_flag else [_value(random, option, files) for _ in range(max(option.nargs, 1))]
    items.insert(random.randint(0, len(items)), [random.choice(option.opts), *values])


def _typo(random: random.Random, items: list[list[str]], _command: click.Command, _files: Sequence[str]) -> None:
    """Another letter in the last word of an item: mostly a value."""
    item = random.choice(items)
    cut = random.randint(0, len(item[-1]))
    item[-1] = item[-1][:cut] + random.choice(["", "-", "x", "0", ".", ","]) + item[-1][cut + 1 :]


def _lost(random: random.Random, items: list[list[str]], _command: click.Command, _files: Sequence[str]) -> None:
    """Without an option, or only without its value."""
    item = random.choice(items)
    if random.random() < 0.8 or len(item) == 1:
        items.remove(item)
    else:
        item.pop()


def _twice(random: random.Random, items: list[list[str]], _command: click.Command, _files: Sequence[str]) -> None:
    items.insert(random.randint(0, len(items)), list(random.choice(items)))


def _named_option(command: click.Command, word: str) -> click.Option | None:
    options = [option for option in command.params if isinstance(option, click.Option)]
    return next((option for option in options if word in (*option.opts, *option.secondary_opts)), None)


def _outcome(line: str) -> tuple[str, object]:
    """Run the command that sys.argv holds, as from a shell: a sentence if it breaks the promise, and its exit code."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code: object = None
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as end:
        code = end.code
        if code not in (0, 1, 2):
            return f"exit code {code!r}: {line}", code
    except BaseException as error:
        return f"{type(error).__name__}: {error}: {line}", code
    errors.seek(0)
    return f"a traceback: {line}" if "Traceback" in errors.read() else "", code


def _value(random: random.Random, option: click.Option, files: Sequence[str]) -> str:
    """A value for an option: mostly one that its type can read, which the command then has to judge."""
    is_path = any(word in (option.name or "") for word in ("html", "file", "save", "diff", "path"))
    if is_path and random.random() < 0.8:
        return random.choice(files)
    readable = [value for value in (*_NUMBERS, *_WORDS) if _is_readable(option, value)]
    return random.choice(readable if readable and random.random() < 0.85 else [*_NUMBERS, *_WORDS])


def _is_readable(option: click.Option, value: str) -> bool:
    try:
        option.type.convert(value, option, None)
    except Exception:
        return False
    return True


def _files(folder: Path) -> list[str]:
    """What the valid lines read, a damaged run, an empty folder, files of other kinds, and names of nothing."""
    settled = world(SGD(0.1, 2e-3, momentum=0.9), 600, every=5)
    with RecordWriter(folder / "runs" / "a", metadata=settled.metadata) as writer:
        writer.append(columns(settled.samples))
    (folder / f"{_TARGET.partition(':')[0]}.py").write_text(_TARGET_SOURCE)
    for name, lr in (("before.json", 0.1), ("after.json", 0.2)):
        row = {**dict.fromkeys(_COMPARED), "name": "0.weight", "lr": lr}
        (folder / name).write_text(json.dumps({"parameters": [row]}))
    (folder / "damaged").mkdir()
    (folder / "damaged" / "run.json").write_text("{")
    (folder / "empty").mkdir()
    (folder / "numbers.csv").write_text("0.1\n0.2\nx\n")
    (folder / "bytes").write_bytes(bytes(range(256)))
    names = (
        "runs/a",
        "runs",
        "damaged",
        "empty",
        "numbers.csv",
        "bytes",
        "new.html",
        "missing/new.html",
        "runs/a/run.json",
        "nothing",
    )
    return [*(str(folder / name) for name in names), "/dev/null", "/dev/full", "tests.torture:run_attack", "json:loads"]
