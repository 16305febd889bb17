"""Standard streams that are closed, full, or read by someone who stops early: no traceback, and honest exit codes."""

from __future__ import annotations

import subprocess
import sys

import click.core
import pytest

from equilibria.cli import _show_warning

COMMAND = f"{sys.executable} -m equilibria.cli"
SGD = "--optimizer sgd --lr 0.1 --wd 5e-4 --momentum 0.9"
GOOD = [f"fold {SGD} --steps 20", f"fold {SGD} --steps 50000 --csv", f"plan {SGD} --steps 20 --json", "--help"]
BAD = f"fold {SGD} --steps 0"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)


@pytest.mark.parametrize("line", GOOD)
@pytest.mark.parametrize(("where", "reason"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
def test_output_that_cannot_be_written_is_failed_work(line, where, reason):
    done = shell(f"{COMMAND} {line} {where}")
    assert done.returncode == 1
    assert done.stderr.startswith("equilibria: standard output cannot be written: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_lost_standard_error_changes_nothing_else(where):
    lost, plain = shell(f"{COMMAND} {GOOD[0]} {where}"), shell(f"{COMMAND} {GOOD[0]}")
    assert (lost.returncode, lost.stdout) == (0, plain.stdout)
    assert shell(f"{COMMAND} {BAD} {where}").returncode == 2
    assert shell(f"{COMMAND} {where}").returncode == 2


def test_without_any_stream_the_exit_code_still_tells():
    assert shell(f"{COMMAND} {GOOD[0]} <&- >&- 2>&-").returncode == 1
    assert shell(f"{COMMAND} {BAD} <&- >&- 2>&-").returncode == 2


def test_a_usage_error_stays_one_where_nothing_can_be_written():
    assert shell(f"{COMMAND} {BAD} >/dev/full").returncode == 2


@pytest.mark.parametrize("line", GOOD)
def test_a_reader_that_never_reads_is_no_failure(line):
    done = shell(f"{COMMAND} {line} | true")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_stops_early_gets_its_lines():
    done = shell(f"{COMMAND} fold {SGD} --steps 100000 --csv | head -2")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first == "step,original_lr,lr,log_scale" and second.startswith("0,0.1,")


def test_a_page_that_cannot_be_written_is_bad_usage(tmp_path):
    done = shell(f"{COMMAND} plan {SGD} --steps 20 --html {tmp_path}/no-such-folder/page.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--html" in done.stderr and "no-such-folder" in done.stderr and done.stderr.count("\n") == 1


def test_a_warning_has_a_place_only_where_that_is_the_users_own(capsys):
    _show_warning(UserWarning("ours"), UserWarning, click.core.__file__, 911)
    _show_warning(UserWarning("theirs"), UserWarning, "train.py", 4)
    assert capsys.readouterr().err == "equilibria: warning: ours\ntrain.py:4: UserWarning: theirs\n"
