"""Files that are replaced as a whole, and what is no file."""

from __future__ import annotations

import os
import stat

import pytest

from equilibria.errors import EquilibriaError
from equilibria.records._files import check_outside_runs, write_whole


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


@pytest.mark.parametrize("place", ["page.html", "sub/page.html", "a/b/page.html"])
def test_no_page_is_written_into_a_run_however_deep(tmp_path, place):
    (tmp_path / "samples-000.arrows").touch()
    with pytest.raises(EquilibriaError, match="inside the run"):
        check_outside_runs(tmp_path / place)
    check_outside_runs(tmp_path.parent / "page.html")
