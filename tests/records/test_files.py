"""Files that are replaced as a whole, and what is no file."""

from __future__ import annotations

import os
import stat

from equilibria.records._files import write_whole


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, b"page")
        assert os.read(reader, 100) == b"page"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
