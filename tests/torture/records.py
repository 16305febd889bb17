"""Attacks on records: kills between checkpoints, cut files, flipped bits, damaged descriptions, failing disks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

import equilibria as eq
from equilibria.errors import EquilibriaError
from equilibria.records import Record, RecordWriter, read_record
from equilibria.records.tables import METRICS
from tests.torture import Trials

_KILLS_PER_CHAIN = 12
_STEPS_BETWEEN_CHECKPOINTS = 7


def _network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))


# ---- kills


def kills(random: random.Random, folder: Path) -> Trials:
    """Chains of trainings: each is killed at a random moment and goes on from its last checkpoint, to its end."""
    torch.set_num_threads(1)
    _import_all(folder)
    for chain in range(1_000_000):
        home = folder / f"chain-{chain}"
        home.mkdir()
        optimizer = random.choice(("SGD", "AdamW"))
        last_step = -1
        for _ in range(_KILLS_PER_CHAIN):
            child = os.fork()
            if child == 0:
                _train_until_killed(home, optimizer)
            while _checkpointed(home) <= last_step:  # it gets at least one checkpoint further
                time.sleep(0.001)
            time.sleep(random.choice((0.0, random.random() * 0.05, random.random() * 1.2)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            last_step = _checkpointed(home)
            yield _missing(home, last_step)
        shutil.rmtree(home)


def _import_all(folder: Path) -> None:
    """Import and compile once what every child would."""
    model = _network()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.01)
        with eq.watch(model, optimizer, log_dir=folder / kind.__name__, every=1) as monitor:
            optimizer.step()
            monitor.state_dict()


def _train_until_killed(home: Path, optimizer: str) -> None:
    """Train in a child process, with a checkpoint every few steps; never returns."""
    try:
        torch.manual_seed(0)
        model = _network()
        trained = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, weight_decay=0.01)
        monitor, step = eq.watch(model, trained, log_dir=home / "run", every=1), 0
        saved = home / "checkpoint.pt"
        if saved.exists():
            state = torch.load(saved, weights_only=False)
            model.load_state_dict(state["model"])
            trained.load_state_dict(state["optimizer"])
            monitor.load_state_dict(state["monitor"])
            step = state["step"]
        while True:
            # no autograd: its threads may run in the parent, and do not survive a fork
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            trained.step()
            monitor.log(loss=float(step))
            step += 1
            if step % _STEPS_BETWEEN_CHECKPOINTS == 0:
                state = {"model": model.state_dict(), "optimizer": trained.state_dict(), "step": step}
                torch.save({**state, "monitor": monitor.state_dict()}, home / "checkpoint.tmp")
                (home / "checkpoint.tmp").replace(saved)
                (home / "step.tmp").write_text(str(step))
                (home / "step.tmp").replace(home / "step")
    except BaseException as error:
        (home / "error").write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def _checkpointed(home: Path) -> int:
    """The steps before the last checkpoint; -1 before the first."""
    if (home / "error").exists():
        raise AssertionError(f"the training ended: {(home / 'error').read_text()}")
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((home / "step").read_text())
    return -1


def _missing(home: Path, steps: int) -> str:
    """A sentence if a step before the last checkpoint has no row or no loss, or two."""
    record = read_record(home / "run")
    samples, metrics = record.samples(), record.metrics()
    layers = len(samples["param"].unique())
    counts = samples.filter(pc.less(samples["step"], steps)).group_by("step").aggregate([("param", "count")])
    expected = dict.fromkeys(range(steps), layers)
    found = dict(zip(counts["step"].to_pylist(), counts["param_count"].to_pylist(), strict=True))
    if found != expected:
        return f"{len(expected.items() - found.items())} of {steps} steps lack rows or have too many"
    losses = metrics.filter(pc.less(metrics["step"], steps))
    logged = losses["step"].to_pylist() == losses["value"].to_pylist() == list(range(steps))
    return "" if logged else f"{len(losses)} losses of {steps} steps"


# ---- damage


_Rows = dict[tuple[int, str], dict[str, Any]]


def _written(folder: Path, random: random.Random, *, batches: int = 8) -> tuple[Path, _Rows]:
    """A finished record of several batches, and its rows by step and parameter, or by step and logged name."""
    run = folder / f"run-{random.getrandbits(40)}"
    with RecordWriter(run, metadata={"lr": 0.1}, flush_seconds=3600) as writer:
        for batch in range(batches):
            steps = [batch * 4 + step for step in range(4) for _ in "ab"]
            values = {name: [random.gauss(1, 0.1) for _ in steps] for name in ("lr", "norm", "angle", "weight_decay")}
            writer.append({"step": steps, "param": ["conv.a", "conv.b"] * 4, "state": ["settled", None] * 4, **values})
            logged = {"name": ["loss", "accuracy"] * 4, "value": [random.gauss(1, 0.1) for _ in steps]}
            writer.append({"step": steps, **logged}, table=METRICS)
            writer.flush()
    return run, _rows(read_record(run))


def _rows(record: Record) -> _Rows:
    samples = {(row["step"], row["param"]): row for row in record.samples().to_pylist()}
    return samples | {(row["step"], row["name"]): row for row in record.metrics().to_pylist()}


def _silent(run: Path, whole: _Rows, damage: str) -> str:
    """A sentence if a damaged record gives other values, or fewer rows without a note."""
    try:
        record = read_record(run)
        read, notes = _rows(record), record.notes
        record.verify()
    except EquilibriaError:
        return ""
    changed = [key for key, row in read.items() if whole.get(key) != row]
    if changed:
        return f"{damage}: other values at {changed[:3]}"
    return "" if len(read) == len(whole) or notes else f"{damage}: {len(whole) - len(read)} rows gone without a note"


def cuts(random: random.Random, folder: Path) -> Trials:
    """A record, one of its tables cut at every byte of its last two batches."""
    while True:
        run, whole = _written(folder, random, batches=3)
        contents = {file: file.read_bytes() for file in sorted(run.glob("*.arrows"))}
        longest = max(len(content) for content in contents.values())
        for back in range(1, 2 * longest // 3):
            for file, content in contents.items():
                if (length := len(content) - back) <= len(content) // 3:
                    continue
                file.write_bytes(content[:length])
                yield _silent(run, whole, f"{file.name} cut at byte {length} of {len(content)}")
                file.write_bytes(content)
        shutil.rmtree(run)


def flips(random: random.Random, folder: Path) -> Trials:
    """A record with one bit flipped anywhere."""
    run, whole = _written(folder, random)
    contents = {file: file.read_bytes() for file in sorted(run.glob("*.arrows"))}
    while True:
        file, content = random.choice(list(contents.items()))
        place, bit = random.randrange(len(content)), random.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        file.write_bytes(damaged)
        yield _silent(run, whole, f"bit {bit} of byte {place} of {file.name}")
        file.write_bytes(content)


def manifests(random: random.Random, folder: Path) -> Trials:
    """A record whose run.json is damaged: bytes changed, pieces moved, values of other kinds, deep nesting."""
    run, whole = _written(folder, random)
    file = run / "run.json"
    content = file.read_bytes()
    while True:
        damage = random.choice((_bytes_changed, _piece_moved, _value_replaced, _nonsense))
        file.write_bytes(damage(random, content))
        yield _silent(run, whole, f"run.json after {damage.__name__}")


def _bytes_changed(random: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(random.randint(1, 8)):
        damaged[random.randrange(len(damaged))] = random.randrange(256)
    return bytes(damaged)


def _piece_moved(random: random.Random, content: bytes) -> bytes:
    first, second = sorted(random.choices(range(len(content)), k=2))
    return random.choice((content[:first], content[second:], content[:first] + content[second:], content * 2))


def _value_replaced(random: random.Random, content: bytes) -> bytes:
    """One value anywhere in the JSON becomes one of another kind."""
    root = json.loads(content)
    holder: Any = root
    while True:
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if isinstance(holder[key], dict | list) and holder[key] and random.random() < 0.7:
            holder = holder[key]
            continue
        holder[key] = random.choice((None, -1, 1e400, "", "9.9", [], {}, [[]], True, {"a": None}, "\ud800", 2**80))
        return json.dumps(root).encode()


def _nonsense(random: random.Random, content: bytes) -> bytes:
    return random.choice(
        (b"", b"null", b"[]", b"1", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"format": "999.0"}', b'{"a":' * 5000)
    )


# ---- disks and writers that fail


def failing_disks(random: random.Random, folder: Path) -> Trials:
    """Trainings whose disk fails at a random byte, or whose folder vanishes, or which record into one folder."""
    number = 0
    while True:
        number += 1
        yield random.choice((_full_disk, _vanishing_folder, _two_writers))(random, folder / str(number))


def _train(monitored: Any, *, steps: int = 30) -> str:
    """The weights after a training in which ``monitored(model, optimizer)`` may watch, as bytes in hexadecimal."""
    torch.manual_seed(0)
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    after_step = monitored(model, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        after_step(step)
    return "".join(tensor.numpy().tobytes().hex() for tensor in model.state_dict().values())


def _unwatched() -> str:
    return _train(lambda model, optimizer: lambda step: None)


def _full_disk(random: random.Random, run: Path) -> str:
    code = random.choice((errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT))
    room, written = random.randrange(20_000), 0

    class Full:
        """A file on a disk with some bytes of room."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            nonlocal written
            if written + len(data) > room:
                raise OSError(code, os.strerror(code))
            written += len(data)
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    opened = Path.open

    def limited(path: Path, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        file = opened(path, mode, *arguments, **more)
        return Full(file) if "x" in mode and path.suffix == ".arrows" else file

    def monitored(model: Any, optimizer: Any) -> Any:
        monitor = eq.watch(model, optimizer, log_dir=run, every=1)

        def after(step: int) -> None:
            if step % 5 == 4:
                monitor.state_dict()
            if step == 29:
                monitor.close()

        return after

    Path.open = limited  # type: ignore[method-assign,assignment]
    try:
        with warnings.catch_warnings(action="ignore"):
            watched = _train(monitored)
    except EquilibriaError:  # no room for the first bytes: the watch is refused before training
        return ""
    finally:
        Path.open = opened  # type: ignore[method-assign]
    return _same(watched, run, f"{errno.errorcode[code]} after {room} bytes")


def _vanishing_folder(random: random.Random, run: Path) -> str:
    vanishes = random.randrange(30)

    def monitored(model: Any, optimizer: Any) -> Any:
        monitor = eq.watch(model, optimizer, log_dir=run, every=1)

        def after(step: int) -> None:
            if step == vanishes:
                shutil.rmtree(run, ignore_errors=True)
            if step % 7 == 6:
                monitor.state_dict()
            if step == 29:
                monitor.close()

        return after

    with warnings.catch_warnings(action="ignore"):
        watched = _train(monitored)
    return "" if watched == _unwatched() else f"training changed when the folder vanished at step {vanishes}"


def _two_writers(random: random.Random, run: Path) -> str:
    def monitored(model: Any, optimizer: Any) -> Any:
        monitor = eq.watch(model, optimizer, log_dir=run, every=1)
        try:
            RecordWriter(run, metadata={}, resume=True).close()
        except EquilibriaError as error:
            refused = str(error)
        else:
            raise AssertionError("two writers in one folder")
        assert refused
        return lambda step: monitor.close() if step == 29 else None

    return _same(_train(monitored), run, "two writers")


def _same(watched: str, run: Path, damage: str) -> str:
    if watched != _unwatched():
        return f"training changed: {damage}"
    with contextlib.suppress(EquilibriaError):
        steps = read_record(run).samples()["step"].to_pylist()
        if steps != sorted(steps):
            return f"rows out of order: {damage}"
    return ""
