"""Kill -9 at random moments, streams cut at every byte, and reading while another process writes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.record_helpers import answer, assert_rows, finish, rows, start

from equilibria.errors import EquilibriaError
from equilibria.records import RecordWriter, read_record

# Imports once, then forks a writer for every line "directory first_step pause": many kills, cheap starts.
# A batch is several pages long. What flush() has promised is written, 8 bytes at a time, to the file "promised".
WRITERS = """
import os, signal, struct, time
from tests.helpers.record_helpers import rows
from equilibria.records import RecordWriter

PARAMS = tuple(f"layer{k}.weight" for k in range(64))

def write(directory, first, pause):
    promised = os.open(directory + ".promised", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    writer = RecordWriter(directory, metadata={"first": first}, resume=True, flush_seconds=0.002)
    for step in range(first, first + 20_000):  # an end, in case nothing kills it
        writer.append(rows([step], params=PARAMS))
        if step % 3 == 2:
            writer.flush()
            os.write(promised, struct.pack("q", step))
            time.sleep(pause)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    directory, first, pause = line.split()
    child = os.fork()
    if child == 0:
        write(directory, int(first), float(pause))
        os._exit(0)
    print(child, flush=True)
"""
PARAMS = tuple(f"layer{k}.weight" for k in range(64))
SESSION = 1_000_000


@pytest.fixture
def writers():
    process = start(WRITERS)
    assert answer(process) == "ready"

    started = []

    def begin(directory, first, *, pause=0.0) -> int:
        process.stdin.write(f"{directory} {first} {pause}\n")
        started.append(int(answer(process)))
        return started[-1]

    yield begin
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    finish(process)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for 30 s"
        time.sleep(0.001)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))


def promised_file(directory) -> Path:
    return directory.with_name(directory.name + ".promised")


def last_promised(directory) -> int | None:
    try:
        data = promised_file(directory).read_bytes()
    except FileNotFoundError:
        return None
    return struct.unpack("q", data[-8:])[0] if data else None


def assert_session(directory, first: int, promised: int | None) -> int:
    """Check that the steps of a session are complete, correct and reach the promised step; returns their number."""
    try:
        table = read_record(directory).samples()
    except EquilibriaError as error:  # killed before the run was there
        assert promised is None, error
        return 0
    steps = table["step"].to_numpy()
    table = table.slice(int((steps < first).sum()))
    count = table.num_rows // len(PARAMS)
    assert_rows(table, range(first, first + count), PARAMS)
    assert promised is None or first + count > promised
    return count


def test_fifty_kills_lose_nothing_that_was_flushed(tmp_path, writers):
    moment = random.Random(20260801)
    for number in range(50):
        directory = tmp_path / f"run{number % 10}"
        first = number // 10 * SESSION  # every directory is resumed four times, after a kill each time
        promised_file(directory).unlink(missing_ok=True)
        pid = writers(directory, first)
        if number % 2:  # at any moment of its work; the others also while they begin
            wait_until(lambda directory=directory: last_promised(directory) is not None)
        time.sleep(moment.uniform(0.0, 0.05))
        kill(pid)
        promised = last_promised(directory)
        count = assert_session(directory, first, promised)
        assert number % 2 == 0 or (promised is not None and count > 0)


PAUSES = """
from tests.helpers.record_helpers import rows
from equilibria.records import RecordWriter
writer = RecordWriter(sys.argv[1], metadata={}, flush_seconds=0.2)
writer.append(rows([0, 1, 2]))
print("appended", flush=True)
sys.stdin.readline()
"""


def test_a_pause_in_training_does_not_keep_samples_in_memory(tmp_path):
    child = start(PAUSES, tmp_path)
    assert answer(child) == "appended"
    wait_until(lambda: read_record(tmp_path).samples().num_rows > 0)
    finish(child)
    assert_rows(read_record(tmp_path).samples(), range(3))


def test_reading_while_another_process_writes(tmp_path, writers):
    directory = tmp_path / "run"
    pid = writers(directory, 0, pause=0.02)  # or the run would grow faster than a busy machine can check it
    counts: list[int] = []

    def read() -> bool:
        promised = last_promised(directory)
        counts.append(assert_session(directory, 0, promised))
        return len(set(counts)) > 8

    wait_until(read)
    kill(pid)
    assert counts == sorted(counts)


@pytest.fixture
def cut(tmp_path):
    """A closed run of three batches, the file's bytes, and where the schema and each batch end."""
    ends = []
    with RecordWriter(tmp_path, metadata={}, flush_seconds=3600) as writer:
        for step in range(3):
            writer.append(rows([step], params=("a", f"word{step}")))  # every batch brings new words
            writer.flush()
            ends.append((tmp_path / "samples-000.arrows").stat().st_size)
    return tmp_path, (tmp_path / "samples-000.arrows").read_bytes(), ends


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_cut_at_every_byte_of_its_last_batch(every, cut):
    directory, data, ends = cut
    path = directory / "samples-000.arrows"
    read = {}
    inside = {*range(ends[1], len(data) + 1, every), ends[1] + 100, len(data), *ends}
    sizes = inside | {*range(0, ends[1], 8)}  # every byte of the last batch, every word before
    for size in sorted(sizes, reverse=True):
        os.truncate(path, size)
        run = read_record(directory)
        expected = sum(size >= end for end in ends)
        table = run.samples()
        assert table["step"].to_pylist() == [step for step in range(expected) for _ in range(2)]
        assert table["param"].to_pylist() == [name for step in range(expected) for name in ("a", f"word{step}")]
        read[size] = run.notes
    torn = {size for size, notes in read.items() if notes}
    assert set(read) - torn == {len(data)}  # also where whole batches are missing: the session was closed
    assert read[ends[1]] == ("samples-000.arrows: its end is missing, 4 of 6 rows read",)
    size = ends[1] + 100
    assert read[size] == ("samples-000.arrows: last batch incomplete, 4 rows read, 100 bytes after them left",)
    assert read[8] == ("samples-000.arrows: no whole batch, 0 rows read",)


def test_a_torn_run_is_resumed_without_repair(cut):
    directory, _, ends = cut
    os.truncate(directory / "samples-000.arrows", ends[2] - 7)
    with RecordWriter(directory, metadata={}, resume=True) as writer:
        writer.append(rows([2], params=("a", "b")))
    run = read_record(directory)
    assert run.samples()["step"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert len(run.notes) == 1


def test_zeros_after_a_power_cut(cut):
    directory, data, ends = cut
    (directory / "samples-000.arrows").write_bytes(data[: ends[1]] + bytes(4096))
    run = read_record(directory)
    assert run.samples()["step"].to_pylist() == [0, 0, 1, 1]
    assert len(run.notes) == 1
    assert "last batch incomplete, 4 rows read" in run.notes[0]


BEFORE = [(0, "a"), (0, "word0"), (1, "a"), (1, "word1")]


def keys(table):
    return list(zip(table["step"].to_pylist(), table["param"].to_pylist(), strict=True))


def test_a_damaged_byte_spoils_at_most_its_own_batch(cut):
    directory, data, ends = cut
    path = directory / "samples-000.arrows"
    for place in range(ends[1], ends[2], 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        table = read_record(directory).samples()
        assert keys(table)[:4] == BEFORE
        assert table.to_pydict()  # the damaged batch can at least be converted


def test_zeros_in_the_middle_of_the_last_batch_do_not_look_like_a_return_to_step_0(cut):
    directory, data, ends = cut
    steps = struct.pack("qq", 2, 2)
    place = data.index(steps, ends[1])
    (directory / "samples-000.arrows").write_bytes(data[:place] + bytes(ends[2] - place))
    run = read_record(directory)
    assert keys(run.samples()) == BEFORE
    assert "damaged after 4 rows, the rest is left out" in run.notes[0]


def test_damage_anywhere_is_a_note_or_an_error_and_never_a_crash(cut):
    directory, data, _ = cut
    damage = random.Random(5)
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(damage.randint(1, 8)):
            broken[damage.randrange(len(data))] = damage.randrange(256)
        (directory / "samples-000.arrows").write_bytes(broken)
        with contextlib.suppress(EquilibriaError):
            read_record(directory).samples().to_pydict()
