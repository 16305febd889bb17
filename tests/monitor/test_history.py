"""Samples in memory: whole steps, in order, of every optimizer, however much is dropped."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from equilibria.monitor import history
from equilibria.monitor.history import History
from equilibria.records.tables import NUMBERS, SAMPLE_FIELDS


def rows(step: int, names=("a", "b"), value: float = 0.5) -> dict[str, object]:
    columns: dict[str, object] = {name: np.full(len(names), value) for name in NUMBERS}
    columns["step"] = np.full(len(names), step, dtype=np.int64)
    columns["param"] = list(names)
    columns["state"] = ["settled"] * len(names)
    columns["note"] = [None] * len(names)
    return columns


def steps_of(table: pa.Table, name: str) -> list[int]:
    pairs = zip(table["param"].to_pylist(), table["step"].to_pylist(), strict=True)
    return [step for param, step in pairs if param == name]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(history, "_MOST_ROWS", 20)
    monkeypatch.setattr(history, "_BLOCK", 3)


def test_an_empty_history_is_an_empty_table():
    table = History().table()
    assert table.schema.equals(SAMPLE_FIELDS, check_metadata=True)
    assert table.num_rows == 0


def test_everything_is_kept_in_order_while_there_is_room():
    held = History()
    for step in range(600):
        held.append(rows(step))
        if step in (1, 300):
            assert held.table().num_rows == 2 * (step + 1)
    table = held.table()
    assert table.schema.equals(SAMPLE_FIELDS, check_metadata=True)
    assert steps_of(table, "a") == steps_of(table, "b") == list(range(600))
    assert table["param"].to_pylist()[:4] == ["a", "b", "a", "b"]


def test_nulls_and_nans_are_told_apart():
    held, columns = History(), rows(0)
    columns["norm"] = np.array([np.nan, 1.0])
    columns["angle_predicted"] = np.array([None, 2.0], dtype=object)
    held.append(columns)
    table = held.table()
    assert table["norm"].null_count == 0
    assert np.isnan(table["norm"][0].as_py())
    assert table["angle_predicted"].to_pylist() == [None, 2.0]


@pytest.mark.parametrize("looks", [(), (3,), (10, 11), range(100)], ids=str)
def test_thinning_keeps_whole_steps_evenly_spaced_and_in_order(small, looks):
    """To look at the table in between must not change what is kept."""
    held = History()
    for step in range(100):
        held.append(rows(step))
        if step in looks:
            held.table()
    steps = steps_of(held.table(), "a")
    assert steps == steps_of(held.table(), "b")
    assert 5 <= len(steps) <= 10
    assert set(np.diff(steps)) == {16}
    assert steps[-1] > 83


def test_no_optimizer_loses_its_samples_to_another(small):
    held = History()
    for step in range(100):
        held.append(rows(step, names=("a",)))
        held.append(rows(step, names=("b",)))
    table = held.table()
    assert steps_of(table, "a") == steps_of(table, "b")
    assert len(steps_of(table, "a")) >= 5


def test_optimizers_that_step_at_different_rates(small):
    held = History()
    for step in range(200):
        held.append(rows(step, names=("often",)))
        if step % 5 == 4:
            held.append(rows(step, names=("seldom",)))
    table = held.table()
    assert table["step"].to_pylist() == sorted(table["step"].to_pylist())
    often, seldom = (len(steps_of(table, name)) for name in ("often", "seldom"))
    assert often >= 7
    assert seldom >= 1


def test_one_step_of_more_rows_than_there_is_room_for_is_still_kept(small):
    held, names = History(), [f"w[{row}]" for row in range(30)]
    for step in range(10):
        held.append(rows(step, names=names))
        assert held.table().num_rows in (30, 60)
    assert max(steps_of(held.table(), "w[0]")) >= 7


def test_memory_of_many_small_steps_stays_in_few_pieces():
    held = History()
    for step in range(2000):
        held.append(rows(step, names=("a",)))
    assert len(held._blocks) + len(held._tail) < 300
    assert steps_of(held.table(), "a") == list(range(2000))
