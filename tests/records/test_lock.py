from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from tests.helpers.record_helpers import answer, assert_rows, finish, rows, start

import equilibria.records._lock as lock_module
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWarning, RecordWriter, read_record

HOLD = """
from tests.helpers.record_helpers import rows
from equilibria.records import RecordWriter
writer = RecordWriter(sys.argv[1], metadata={}, resume=True)
writer.append(rows([0]))
writer.flush()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_a_second_process_is_kept_out_until_the_first_is_dead(tmp_path):
    child = start(HOLD, tmp_path)
    assert answer(child) == "ready"
    holder = re.escape(f"{tmp_path} is being recorded by process {child.pid} on {socket.gethostname()}; close that run")
    for resume in (False, True):
        with pytest.raises(EquilibriaError, match=holder):
            RecordWriter(tmp_path, metadata={}, resume=resume)
    finish(child)
    assert (tmp_path / "writer.lock").read_text().startswith(str(child.pid))  # stale, and in nobody's way
    with RecordWriter(tmp_path, metadata={}, resume=True) as writer:
        writer.append(rows([1]))
    assert_rows(read_record(tmp_path).samples(), [0, 1])


def test_a_second_writer_in_the_same_process_is_kept_out(tmp_path):
    with RecordWriter(tmp_path, metadata={}), pytest.raises(EquilibriaError, match=f"by process {os.getpid()} on"):
        RecordWriter(tmp_path, metadata={}, resume=True)
    RecordWriter(tmp_path, metadata={}, resume=True).close()


FORK = """
import os, time
from tests.helpers.record_helpers import rows
from equilibria.records import RecordWriter
writer = RecordWriter(sys.argv[1], metadata={}, resume=True, flush_seconds=3600)
writer.append(rows([0]))
writer.flush()
writer.append(rows([1]))
child = os.fork()
if child == 0:
    writer.append(rows([2]))
    writer.flush()
    writer.close()
    print(os.getpid(), flush=True)
    if sys.argv[2] == "exit":
        sys.exit()
    time.sleep(60)
if sys.argv[2] == "exit":
    os.waitpid(child, 0)
    print("exited", flush=True)
sys.stdin.readline()
"""


def test_a_forked_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path):
    parent = start(FORK, tmp_path, "stay")
    worker = int(answer(parent))
    try:
        parent.kill()
        parent.wait()
        os.kill(worker, 0)  # it lives
        RecordWriter(tmp_path, metadata={}, resume=True).close()
    finally:
        os.kill(worker, signal.SIGKILL)
    parent.communicate()


def test_a_forked_worker_writes_nothing_and_ends_nothing(tmp_path):
    parent = start(FORK, tmp_path, "exit")
    answer(parent)
    assert answer(parent) == "exited"
    run = read_record(tmp_path)
    assert_rows(run.samples(), [0])
    assert run.sessions[0].ended is None
    with pytest.raises(EquilibriaError, match=f"by process {parent.pid} on"):
        RecordWriter(tmp_path, metadata={}, resume=True)
    parent.communicate("\n")
    run = read_record(tmp_path)
    assert_rows(run.samples(), [0, 1])
    assert run.sessions[0].ended is not None


NO_LOCKS = [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.fixture(params=NO_LOCKS, ids=[errno.errorcode[code] for code in NO_LOCKS])
def no_locks(request, monkeypatch):
    """A file system, or an operating system, without locks."""

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_living_writer_still_keeps_others_out(tmp_path):
    with pytest.warns(RecordWarning, match="file system without locks: a second writer may go unnoticed"):
        writer = RecordWriter(tmp_path, metadata={})
    with pytest.raises(EquilibriaError, match=f"by process {os.getpid()} on"):
        RecordWriter(tmp_path, metadata={}, resume=True)
    writer.close()
    (tmp_path / "writer.lock").write_text(f"{os.getppid()} {socket.gethostname()}\n")
    with pytest.raises(EquilibriaError, match=f"by process {os.getppid()} on"):
        RecordWriter(tmp_path, metadata={}, resume=True)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("left", ["", "nonsense", f"{2**22 + 1} {{host}}", "1 elsewhere", "{pid} {host}"])
def test_without_locks_the_lock_file_of_a_dead_writer_does_not_block(tmp_path, left):
    (tmp_path / "writer.lock").write_text(left.format(host=socket.gethostname(), pid=os.getpid()))
    with pytest.warns(RecordWarning, match="without locks"), RecordWriter(tmp_path, metadata={}) as writer:
        writer.append(rows([0]))
    assert_rows(read_record(tmp_path).samples(), [0])


def test_another_failure_of_the_lock_keeps_its_message(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(EquilibriaError, match=f"cannot record into {tmp_path}: Input/output error"):
        RecordWriter(tmp_path, metadata={})


def test_a_living_process_of_another_user_counts_as_living(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    assert lock_module.Holder(1, socket.gethostname()).is_alive_here()


def test_no_signal_is_sent_on_windows_where_it_would_interrupt_the_process(monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    monkeypatch.setattr(lock_module.sys, "platform", "win32")
    assert not lock_module.Holder(os.getpid(), socket.gethostname()).is_alive_here()


@pytest.mark.skipif(sys.platform != "linux", reason="known on Linux only")
def test_the_start_of_a_process():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = lock_module.process_start(process.pid)
        process.communicate(b"\n")
    assert before - 2 < start < time.time() + 2  # the boot is known to a second
    assert lock_module.process_start(2**31 - 1) is None
