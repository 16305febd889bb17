"""A disk that fills up, goes away or cannot be written: one warning, and training goes on."""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings

import pytest
from tests.helpers.record_helpers import assert_rows, rows

import equilibria.records._writer as writer_module
from equilibria.errors import EquilibriaError
from equilibria.records import RecordWarning, RecordWriter, read_record


class FailingFile:
    """Accepts some more bytes, part of a write at a time, and then fails."""

    def __init__(self, file, *, takes, code):
        self.file, self.takes, self.code = file, takes, code

    def write(self, data):
        if self.takes == 0:
            raise OSError(self.code, os.strerror(self.code))
        part = data[: min(self.takes, 100)]
        self.takes -= len(part)
        return self.file.write(part)

    def __getattr__(self, name):
        return getattr(self.file, name)


def fail_after(writer, takes, code=errno.ENOSPC):
    writer._segments["samples"]._file = FailingFile(writer._segments["samples"]._file, takes=takes, code=code)


CODES = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.EDQUOT]


@pytest.mark.parametrize("code", CODES, ids=[errno.errorcode[code] for code in CODES])
def test_a_failing_flush_warns_once_and_stops(tmp_path, code):
    with RecordWriter(tmp_path, metadata={}, flush_seconds=3600) as writer:
        writer.append(rows([0]))
        writer.flush()
        fail_after(writer, 300, code)
        writer.append(rows([1]))
        message = f"recording into {tmp_path} has stopped: {os.strerror(code)}; training goes on"
        with pytest.warns(RecordWarning, match=message) as caught:
            writer.flush()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert writer.failure == os.strerror(code)
        for step in range(2, 50):  # warnings are errors here: none may follow
            writer.append(rows([step]))
            writer.flush()
        assert writer._pending == {}  # and nothing piles up
    run = read_record(tmp_path)
    assert_rows(run.samples(), [0])
    assert run.notes == ("samples-000.arrows: last batch incomplete, 2 rows read, 300 bytes after them left",)
    assert run.sessions[0].ended is None


@pytest.mark.parametrize("takes", [0, 1, 1000])
def test_a_failing_full_buffer_and_a_failing_close(tmp_path, monkeypatch, takes):
    with RecordWriter(tmp_path / "a", metadata={}, flush_seconds=3600) as writer:
        fail_after(writer, takes)
        monkeypatch.setattr(writer_module, "_MOST_ROWS", 2)
        with pytest.warns(RecordWarning, match="No space left"):
            writer.append(rows([0]))
    monkeypatch.undo()
    writer = RecordWriter(tmp_path / "b", metadata={}, flush_seconds=3600)
    writer.append(rows([0]))
    fail_after(writer, takes)
    with pytest.warns(RecordWarning, match="No space left"):
        writer.close()
    for name in "ab":
        assert read_record(tmp_path / name).samples().num_rows == 0
        RecordWriter(tmp_path / name, metadata={}, resume=True).close()  # the lock is free


def test_short_writes_are_completed(tmp_path):
    with RecordWriter(tmp_path, metadata={}) as writer:
        fail_after(writer, 10**9)
        for step in range(3):
            writer.append(rows([step]))
            writer.flush()
    assert_rows(read_record(tmp_path).samples(), range(3))


def test_a_failure_in_the_background_is_reported_by_the_next_call(tmp_path):
    writer = RecordWriter(tmp_path, metadata={}, flush_seconds=0.01)
    fail_after(writer, 0)
    writer.append(rows([0]))
    end = time.monotonic() + 20
    while writer.failure is None and time.monotonic() < end:
        time.sleep(0.005)
    with pytest.warns(RecordWarning, match="has stopped: No space left"):
        writer.append(rows([1]))
    writer.close()


def test_a_directory_removed_while_recording(tmp_path):
    with RecordWriter(tmp_path / "a", metadata={}, flush_seconds=3600) as writer:
        writer.append(rows([0]))
        writer.flush()
        shutil.rmtree(tmp_path / "a")
        writer.append(rows([1]))
        with pytest.warns(RecordWarning, match=r"has stopped: the file was removed \(.*samples-000.arrows\)"):
            writer.flush()
        writer.append(rows([2]))
    assert not (tmp_path / "a").exists()


def test_a_directory_moved_while_recording_keeps_its_samples(tmp_path):
    writer = RecordWriter(tmp_path / "a", metadata={}, flush_seconds=3600)
    (tmp_path / "a").rename(tmp_path / "b")
    writer.append(rows([0]))
    with pytest.warns(RecordWarning, match=r"has stopped: No such file or directory \(.*run.json.tmp\)"):
        writer.close()
    assert_rows(read_record(tmp_path / "b").samples(), [0])


def test_no_warning_without_a_fault(tmp_path):
    with warnings.catch_warnings(record=True) as caught, RecordWriter(tmp_path, metadata={}) as writer:
        warnings.simplefilter("always")
        writer.append(rows([0]))
    assert [str(warning.message) for warning in caught if warning.category is RecordWarning] == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_path_that_cannot_be_a_directory(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(EquilibriaError, match=f"cannot record into {tmp_path}/{name}: (File exists|Not a directory)"):
        RecordWriter(tmp_path / name, metadata={})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(EquilibriaError, match="Permission denied"):
        RecordWriter(tmp_path / "a", metadata={})


@pytest.mark.parametrize("name", ["write_manifest", "SegmentWriter", "RunLock"])
def test_a_failure_at_any_stage_of_the_construction_is_an_error_and_frees_the_lock(tmp_path, monkeypatch, name):
    def fail(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(writer_module, name, fail)
    with pytest.raises(EquilibriaError, match=f"cannot record into {tmp_path}: Permission denied"):
        RecordWriter(tmp_path, metadata={})
    monkeypatch.undo()
    with RecordWriter(tmp_path, metadata={}, resume=True) as writer:
        writer.append(rows([0]))
    assert_rows(read_record(tmp_path).samples(), [0])


def test_a_disk_that_really_fills_up(small_disk):
    place = small_disk("128k") / "a"
    written, step = [], 0
    with RecordWriter(place, metadata={}, flush_seconds=3600) as writer:
        with pytest.warns(RecordWarning, match="has stopped: No space left on device") as caught:
            while writer.failure is None:
                writer.append(rows([step]))
                writer.flush()
                written += [step] if writer.failure is None else []
                step += 1
        assert len(caught) == 1
        for more in range(step, step + 20):
            writer.append(rows([more]))
    run = read_record(place)
    assert len(written) > 10
    assert_rows(run.samples(), written)


def test_a_disk_that_is_full_or_read_only_from_the_start(small_disk):
    full = small_disk("4k")
    (full / "other").write_bytes(bytes(4096))
    with pytest.raises(EquilibriaError, match=r"cannot record into .*: No space left on device"):
        RecordWriter(full / "a", metadata={"x": "y" * 5000})
    with pytest.raises(EquilibriaError, match=r"cannot record into .*: Read-only file system"):
        RecordWriter(small_disk("4k", "ro") / "a", metadata={})
