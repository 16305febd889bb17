"""The samples in memory are whole steps, in order, of every optimizer, however many are dropped."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

import equilibria.monitor.history as history_module
from equilibria.monitor.history import History
from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS


def rows(step: int, names=("a", "b"), value: float = 0.5) -> dict[str, object]:
    columns: dict[str, object] = {name: np.full(len(names), value) for name in NUMBERS}
    columns["step"] = np.full(len(names), step, dtype=np.int64)
    columns["param"] = tuple(names)
    columns["state"] = ("settled",) * len(names)
    columns["note"] = columns["law"] = (None,) * len(names)
    return columns


def steps_of(table: pa.Table, name: str) -> list[int]:
    pairs = zip(table["param"].to_pylist(), table["step"].to_pylist(), strict=True)
    return [step for param, step in pairs if param == name]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(history_module, "_MOST_ROWS", 20)
    monkeypatch.setattr(history_module, "_BLOCK", 3)


def test_an_empty_history_is_an_empty_table():
    table = History().table()
    assert table.schema.equals(SAMPLE_FIELDS, check_metadata=True)
    assert table.num_rows == 0


def test_everything_is_kept_in_order_while_there_is_room():
    history = History()
    for step in range(600):
        history.append(rows(step))
        if step in (1, 300):
            assert history.table().num_rows == 2 * (step + 1)
    table = history.table()
    assert table.schema.equals(SAMPLE_FIELDS, check_metadata=True)
    assert steps_of(table, "a") == steps_of(table, "b") == list(range(600))
    assert table["param"].to_pylist()[:4] == ["a", "b", "a", "b"]


def test_nulls_and_nans_stay_distinct():
    history, columns = History(), rows(0)
    columns["norm"] = np.array([np.nan, 1.0])
    columns["angle_predicted"] = np.array([None, 2.0], dtype=object)
    history.append(columns)
    table = history.table()
    assert table["norm"].null_count == 0
    assert np.isnan(table["norm"][0].as_py())
    assert table["angle_predicted"].to_pylist() == [None, 2.0]


@pytest.mark.parametrize("looks", [(), (3,), (10, 11), range(100)], ids=str)
def test_thinning_keeps_whole_steps_evenly_spaced_and_in_order(small, looks):
    """Reading the table in between must not change which steps are kept."""
    history = History()
    for step in range(100):
        history.append(rows(step))
        if step in looks:
            history.table()
    steps = steps_of(history.table(), "a")
    assert steps == steps_of(history.table(), "b")
    assert 5 <= len(steps) <= 10
    assert set(np.diff(steps)) == {16}
    assert steps[-1] > 83


def test_no_optimizer_loses_its_samples_to_another(small):
    history = History()
    for step in range(100):
        history.append(rows(step, names=("a",)))
        history.append(rows(step, names=("b",)))
    table = history.table()
    assert steps_of(table, "a") == steps_of(table, "b")
    assert len(steps_of(table, "a")) >= 5


def test_optimizers_that_step_at_different_rates(small):
    history = History()
    for step in range(200):
        history.append(rows(step, names=("often",)))
        if step % 5 == 4:
            history.append(rows(step, names=("seldom",)))
    table = history.table()
    assert table["step"].to_pylist() == sorted(table["step"].to_pylist())
    often, seldom = (len(steps_of(table, name)) for name in ("often", "seldom"))
    assert often >= 7
    assert seldom >= 1


def test_one_step_of_more_rows_than_there_is_room_for_is_still_kept(small):
    history, names = History(), [f"w[{row}]" for row in range(30)]
    for step in range(10):
        history.append(rows(step, names=names))
        assert history.table().num_rows in (30, 60)
    assert max(steps_of(history.table(), "w[0]")) >= 7


def test_memory_of_many_small_steps_stays_in_few_pieces():
    history = History()
    for step in range(2000):
        history.append(rows(step, names=("a",)))
    assert len(history._blocks) + len(history._newest) < 300
    assert steps_of(history.table(), "a") == list(range(2000))


MEMORY = """
import numpy as np
from equilibria.monitor.history import History, _MOST_ROWS
from equilibria.records.tables import NUMBERS

def used():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

names, layers = tuple(f"layer{k}.conv.weight" for k in range(20)), 20

def fill(history, steps):
    for step in range(steps):
        columns = {name: np.full(layers, 0.5 + step) for name in NUMBERS}
        text = {"param": names, "state": ("settling",) * layers, "note": (None,) * layers, "law": (None,) * layers}
        history.append({"step": np.full(layers, step, dtype=np.int64), **columns, **text})
        if step % 500 == 0:
            yield used()
    table = history.table()
    yield used()
    del history
    assert table.num_rows > _MOST_ROWS // 2 or steps < 1000

for _ in fill(History(), 300):  # imports what Arrow imports when it is first used
    pass
before = used()
print((max(fill(History(), _MOST_ROWS // layers + 2000)) - before) / 1e6)  # beyond the bound: thinned once
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_is_bounded_at_200_mb_with_the_table():
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert 60 < float(done.stdout) < 200
