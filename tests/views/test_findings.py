"""Findings print as sentences wherever they are shown."""

from __future__ import annotations

import pytest

from equilibria.findings import Finding, Findings, warnings_first
from equilibria.views.findings import findings_view

NOTE = Finding("note", "lr moves", "from 0.1 to 0.01", "nothing needs doing", "")
WARNING = Finding("warning", "a <b> is lost", "at step 3", "", "")


def test_a_tuple_of_findings_prints_one_paragraph_each():
    findings = warnings_first([NOTE, WARNING])
    assert (
        str(findings)
        == repr(findings)
        == ("! a <b> is lost: at step 3\n- lr moves: from 0.1 to 0.01\n  nothing needs doing")
    )
    assert findings == (WARNING, NOTE) and isinstance(findings, tuple)
    assert "a &lt;b&gt; is lost: at step 3" in findings._repr_html_()


def test_no_findings():
    assert str(Findings()) == "no findings" and "No findings" in Findings()._repr_html_()


@pytest.mark.parametrize("columns", ["60", "200"])
def test_paragraphs_are_as_wide_as_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    long = Finding("note", "word " * 60, "evidence", "remedy", "")
    lines = findings_view([long]).text.splitlines()
    assert int(columns) - 10 < max(map(len, lines)) <= int(columns)
