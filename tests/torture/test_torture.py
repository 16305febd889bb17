"""The short form of `make torture`: some trials of every attack, always the same ones."""

from __future__ import annotations

import pytest

from tests.torture import Attack, run_attack
from tests.torture.__main__ import page
from tests.torture.attacks import ATTACKS
from tests.torture.commands import CommandLines

BRIEF = {
    "kills between checkpoints": 6,
    "cut files": 150,
    "flipped bits": 150,
    "damaged run.json": 150,
    "failing disks": 9,
    "bit identity": 6,
    "watch and close": 25,
    "a million steps": 12,
    "command lines": 100,
    "viewers": 5,
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_every_promise_holds_in_a_few_trials(attack, tmp_path):
    if attack.name == "viewers":
        pytest.importorskip("uvicorn", reason='the server needs pip install "equilibria[serve]"')
    result = run_attack(
        attack, tmp_path / "attack", seed=0, goal=BRIEF[attack.name], seconds=120, progress=lambda *_: None
    )
    assert result.broken == []
    assert result.trials == BRIEF[attack.name]
    if isinstance(attack.trials, CommandLines):
        assert attack.trials.past_parsing >= 0.6 * result.trials, attack.summary()


def test_a_broken_promise_is_counted(tmp_path):
    def trials(random, folder):
        yield ""
        yield "a row is missing"
        raise OSError("and then this")

    attack = Attack("none", "nothing", trials, goal=10, seconds=10)
    result = run_attack(attack, tmp_path / "attack", seed=3, goal=10, seconds=10, progress=lambda *_: None)
    assert result.trials == 2
    assert result.broken[0] == "a row is missing" and "OSError: and then this" in result.broken[1]


def test_the_page_is_that_of_the_counts():
    from tests.torture.__main__ import COUNTS, PAGE

    if COUNTS.exists():
        assert PAGE.read_text() == page()
