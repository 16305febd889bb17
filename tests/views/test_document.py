"""What all pages share: one file, written whole or not at all, whose text stays text."""

from __future__ import annotations

import json
import re

import pytest

from equilibria.errors import EquilibriaError
from equilibria.findings import Finding
from equilibria.views.document import as_json, finding_card, still_document, write_document
from equilibria.views.words import full_stop, ratio_cell, text

EVIL = "</script><script>alert(1)</script>&\"'"


PAGE = '<!doctype html>\n<meta name="generator" content="equilibria 0.1.0">\n'


def test_json_cannot_end_its_script():
    shown = as_json({"name": EVIL, "list": [1.5, None]})
    assert "<" not in shown
    assert json.loads(shown) == {"name": EVIL, "list": [1.5, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"x": float("nan")})


def test_a_page_is_replaced_whole(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(PAGE)
    assert write_document(path, "naïve ✓\n") == path
    assert path.read_bytes() == "naïve ✓\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text(PAGE)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(EquilibriaError, match="cannot be written: No space left on device"):
        write_document(path, "new")
    assert path.read_text() == PAGE
    assert list(tmp_path.iterdir()) == [path]


def test_only_our_own_pages_are_replaced(tmp_path):
    foreign, empty, own = (tmp_path / name for name in ("train.py", "empty.html", "report.html"))
    foreign.write_text("import torch\n")
    empty.touch()
    for content in (PAGE, still_document("", title="t", style="", headline="h")):
        own.write_text(content)
        write_document(own, content)
    write_document(empty, PAGE)
    with pytest.raises(EquilibriaError, match=r"train.py', a file that equilibria has not written"):
        write_document(foreign, PAGE)
    assert foreign.read_text() == "import torch\n"


@pytest.mark.parametrize("marker", ["run.json", "samples-000.arrows"])
@pytest.mark.parametrize("name", ["run.json", "report.html", "samples-000.arrows"])
def test_no_page_is_written_into_a_run(tmp_path, marker, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / marker).write_text("{}")
    (tmp_path / "link").symlink_to(run)
    for path in (run / name, tmp_path / "link" / name):
        with pytest.raises(EquilibriaError, match="expected a path outside it") as caught:
            write_document(path, PAGE)
        assert caught.value.argument == "path"
    assert (run / marker).read_text() == "{}" and len(list(run.iterdir())) == 1


def test_a_card_is_a_sentence_with_advice_and_source():
    finding = Finding("warning", "fc1.weight rests", "lr x wd is 5 %", "raise it", "states.rescale_factors")
    shown = finding_card(finding)
    plain = re.sub(r"<[^>]+>", " ", shown)
    assert "fc1.weight rests" in plain  # a name keeps its small letter
    assert "lr\u00a0×\u00a0wd is 5\u00a0%." in plain
    assert "Raise it." in plain
    assert "states.rescale_factors" in plain and "Spherical Motion Dynamics" in plain


def test_a_card_without_a_law_does_not_speak_of_one():
    assert "Law" not in finding_card(Finding("note", "a", "b", "c", ""))
    assert "<cite>" not in finding_card(Finding("note", "a", "b", "c", "no such law"))


def test_text_is_escaped_everywhere():
    shown = finding_card(Finding("note", EVIL, EVIL, EVIL, EVIL)) + text(EVIL)
    assert "<script" not in shown
    assert shown.count("&lt;script&gt;") == 5


@pytest.mark.parametrize(
    ("ratio", "cell"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (1.049, "1.05"),
        (0.5, "0.50▼ slower"),
        (1.2, "1.20▲ faster"),
        (0.001, "0.001▼ slower"),
        (12345.0, "1.23e4▲ faster"),
    ],
)
def test_a_ratio_says_its_direction_in_words_too(ratio, cell):
    assert re.sub(r"<[^>]+>", "", ratio_cell(ratio, 0.05)) == cell


def test_sentences_end():
    assert [full_stop(words) for words in ("the end", "The end.", "why?", "conv1 rests")] == [
        "The end.",
        "The end.",
        "Why?",
        "conv1 rests.",
    ]
