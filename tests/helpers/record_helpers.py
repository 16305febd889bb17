"""Samples whose values follow from their step and parameter, so that a test can recognise wrong rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from equilibria.records import SAMPLE_SCHEMA

FLOATS = [field.name for field in SAMPLE_SCHEMA if field.type == pa.float64()]
PARAMS = ("conv1.weight", "conv2.weight")


def rows(steps: Iterable[int], params: tuple[str, ...] = PARAMS) -> dict[str, Any]:
    """All columns of the sample table for every step and parameter."""
    pairs = [(step, index) for step in steps for index in range(len(params))]
    step = np.array([pair[0] for pair in pairs], dtype=np.int64)
    index = np.array([pair[1] for pair in pairs], dtype=np.int64)
    columns: dict[str, Any] = {"step": step, "param": [params[i] for i in index]}
    for position, name in enumerate(FLOATS):
        columns[name] = step * 1000.0 + index + position / 64
    columns["state"] = [("settled", "rising")[int(s) % 2] for s in step]
    columns["note"] = [("skipped", None)[int(s) % 2] for s in step]
    columns["law"] = [("invariant", None, "measured gain")[int(s) % 3] for s in step]
    return columns


def assert_rows(table: pa.Table, steps: Iterable[int], params: tuple[str, ...] = PARAMS) -> None:
    """Check that the table holds exactly the rows of `rows` for these steps, in that order."""
    expected = rows(steps, params)
    assert table.column_names == SAMPLE_SCHEMA.names
    for name in ("step", *FLOATS):
        assert table[name].null_count == 0, name
        np.testing.assert_array_equal(table[name].to_numpy(), expected[name], err_msg=name)
    for name in ("param", "state", "note", "law"):
        assert table[name].to_pylist() == expected[name], name


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that can import these helpers; it reads and answers line by line."""
    command = [sys.executable, "-c", f"import sys\n{code}", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> None:
    """Kill a process with SIGKILL, and wait until it is gone."""
    process.kill()
    process.communicate()
