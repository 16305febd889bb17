"""The runner of the pages: what it runs, what it lets pass, and that it can fail."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from tests.helpers.page_runner import Page, Tolerance, assert_shown


def page(text: str) -> Page:
    return Page(Path("page.md"), text)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_blocks_share_their_names_and_output_belongs_to_the_block_before():
    text = "```python\nx = 2\n```\nthen\n\n```python\nprint(x + 1)\n```\nprints\n\n```text\n3\n```\n"
    assert page(text).run().printed == ["", "3\n"]
    with pytest.raises(AssertionError, match=r"page\.md:11\n--- the page shows\n4"):
        page(text.replace("\n3\n", "\n4\n")).run()


def test_an_error_points_to_its_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as caught:
        page("a page\n\n```python\nx = 1\nx / 0\n```\n").run()
    assert caught.traceback[-1].lineno + 1 == 5


def test_output_that_nothing_printed_is_refused():
    with pytest.raises(AssertionError, match="follows no python block"):
        page("```python\nprint(1)\n```\n```sh\nls\n```\n```text\n1\n```\n").run()


def test_commands_run_and_are_compared_to_the_letter():
    line = "equilibria equilibrium --optimizer sgd --lr 0.1 --wd 5e-4"
    with pytest.raises(AssertionError, match=re.escape(f"page.md:1: $ {line}")):
        page(f"```console\n$ {line}\nnothing of the kind\n```\n").run()
    shown = page(f"```console\n$ {line}\n```\n").run(compare=False).printed[0]
    assert "time constant" in shown
    page(f"```console\n$ {line.replace(' --lr', f' {chr(92)}{chr(10)}  --lr')}\n{shown}```\n").run()


def test_a_command_may_be_meant_to_fail_and_no_other_program_is_run():
    page("<!-- exit: 2 -->\n```console\n$ equilibria no-such-command\n...\n```\n").run()
    with pytest.raises(AssertionError, match="ended with 2"):
        page("```console\n$ equilibria no-such-command\n...\n```\n").run()
    with pytest.raises(AssertionError, match="only 'equilibria' is run, got 'rm'"):
        page("```console\n$ rm x\n```\n").run()


def test_a_file_is_written_and_a_block_that_is_not_run_must_compile(tmp_path):
    page("<!-- file: train.py -->\n```python\n1 / 0\n```\n<!-- not run: no -->\n```python\n1 / 0\n```\n").run()
    assert (tmp_path / "train.py").read_text() == "1 / 0\n"
    with pytest.raises(SyntaxError):
        page("<!-- not run: no -->\n```python\n1 /\n```\n").run()


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("angle 0.123 rad", "angle  0.123 rad", True),
        ("angle 0.123 rad", "angle 0.123 degrees", False),
        ("0.1239", "0.1230", True),  # 0.7 %
        ("0.1260", "0.1230", False),  # 2.4 %
        ("0.02", "0.01", True),  # one in the last digit
        ("0.03", "0.01", False),
        ("1,010 steps", "1,001 steps", True),
        ("13 steps", "12 steps", False),
        ("2e-07", "1e-07", True),
        ("3e-07", "1e-07", False),
        ("a\nb\nc", "a\n...", True),
        ("a\nb\nc", "...\nc", True),
        ("a\nb\nc", "a\n...\nd", False),
        ("a\nb", "a", False),
        ("a", "a\nb", False),
        ("1 2", "1", False),
    ],
)
def test_words_must_agree_and_numbers_nearly(printed, shown, same):
    with contextlib.nullcontext() if same else pytest.raises(AssertionError):
        assert_shown(printed, shown, Tolerance(), "here")


def test_a_comment_widens_the_tolerance_from_there_on():
    text = "```python\nprint(0.5)\n```\n\n```text\n0.6\n```\n"
    page(f"<!-- numbers: rel=0 abs=0.11 -->\n{text}").run()
    with pytest.raises(AssertionError):
        page(f"<!-- numbers: rel=0.05 abs=0.05 -->\n{text.replace('0.6', '0.61')}").run()


@pytest.mark.parametrize("given", ["rel=0.01 abs=0.15", "rel=0.6 abs=0"])
def test_a_tolerance_that_lets_anything_pass_is_refused(given):
    text = f"<!-- numbers: {given} -->\n```python\nprint('0.20 rad after 0 of 1,000 steps')\n```\n\n"
    shown = "```text\n0.20 rad after 0 of 1,000 steps\n```\n"
    with pytest.raises(AssertionError, match=r"shows 0\.2, .* lets it be off by more than half"):
        page(text + shown).run()
    page(text.replace(given, "rel=0.1 abs=0.1") + shown).run()


def test_a_page_says_itself_that_it_is_slow():
    assert page("# Title\n\n<!-- slow -->\n").slow
    assert not page("# slow\n").slow
