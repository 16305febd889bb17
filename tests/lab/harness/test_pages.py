"""The gallery and RESULTS.md: every number from the results, nothing from outside, and no markup from a claim."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.helpers.small_experiments import collect, draw, experiment, replace_registry, run_task, tasks

from equilibria.lab.harness import claim_text, registry, reproduce
from equilibria.lab.harness.claim import Source, comparison, not_demanded
from equilibria.lab.harness.experiment import Experiment, Outcome
from equilibria.lab.harness.pages import results_page, write_gallery
from equilibria.lab.harness.results import open_results

CORRECTED = Source("smd", "Theorem 1", corrected="a <root> is missing", law="equilibrium.heavy_ball")

HEADLINE = "Claims shown: papers, exact 1 of 3; ours 2 of 2"


def judged(config, found):
    claims = [
        CORRECTED.says("norm | of <w>").near(2.5, 2.49, relative=0.01, unit="rad", printed=7.125),
        Source("smd", "eq. (4)").says("error").at_most(0.5, 0.75),
        not_demanded(Source("smd", "fig. 2").says("too small here").at_most(0.5, 0.75)),
    ]
    return Outcome([*collect(config, found).claims, *claims], {"spread": 1.0}, {"spread": "the <b> of one run"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "results"
    other = Experiment("judged", "Judged & drawn", "smd fig. 1", experiment().scales, (tasks, run_task, judged, draw))
    reproduce([experiment(), other], results=path)
    reproduce([other], scale="smoke", results=path)
    return open_results(path)


def test_the_gallery_shows_everything_and_asks_for_nothing(folder):
    page = (folder.path / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == 3  # desk and smoke of one, desk of the other
    assert not re.search(r"(src|href)=[\"'](?!data:|#)", page)
    assert "default-src 'none'; script-src 'none'" in page and "<script" not in page
    assert page.startswith("<!doctype html>") and page.count("<body>") == page.count("</body>") == 1
    for words in ("norm | of &lt;w&gt;", "2.49 rad", "2.5 rad ± 1", "as printed: 7.125 rad", "Judged &amp; drawn"):
        assert words in page, words
    assert "equilibria.theory.equilibrium.heavy_ball" in page
    assert "equilibria reproduce judged --scale desk" in page
    assert "contradicted (not demanded at this scale)" in page
    assert '<td class="bad">contradicted</td>' in page


def test_a_comparison_that_does_not_agree_is_neither_good_nor_bad():
    claim = Source("", "ours").says("").at_most(1, 0.5)
    other = comparison(Source("", "ours").says("").at_most(1, 2))
    assert [
        claim_text.verdict_class(claims) for claims in ([claim], [claim, other], [replace(other, role="claim"), other])
    ] == [
        "good",
        "open",
        "bad",
    ]


@pytest.mark.parametrize(("now", "marks"), [({}, 0), ({"seed": 4}, 1)])
def test_a_result_of_other_settings_or_code_is_marked_in_the_gallery(now, marks, folder, monkeypatch):
    replace_registry(monkeypatch, {"small": experiment(**now)})
    assert write_gallery(folder).read_text().count("Stale: ") == marks


def test_a_folder_without_results_says_what_is_missing(tmp_path):
    page = results_page(open_results(tmp_path / "none"))
    assert "**No results yet.**" in page and "## Papers" not in page and "0 of 0" not in page
    for name in registry.MODULES:
        scale = " --scale paper" if name in registry.PRESETS else ""
        assert f"- `equilibria reproduce {name}{scale}`\n" in page


def test_a_claim_without_a_paper_is_worded_in_english(tmp_path):
    path = tmp_path / "results"
    reproduce([replace(experiment(), source="beyond the papers")], results=path)
    page = (path / "RESULTS.md").read_text()
    assert "\nBeyond the papers. `equilibria" in page and "After beyond" not in page
    assert claim_text.source_text(Source("", "beyond").says("").at_most(1, 1)) == "beyond the papers"


def test_the_results_page_has_the_largest_scale_of_each(folder):
    page = results_page(folder)
    assert (folder.path / "RESULTS.md").read_text() == page
    assert (
        page.count("### judged\n\n**Judged &amp; drawn.**") == 1
        and "--scale desk" in page
        and "--scale smoke" not in page
    )
    row = "| norm \\| of &lt;w> | smd Theorem 1 | 7.125 rad | 2.5 rad ± 1 % | 2.49 rad | shown |"
    assert row in page
    assert "- smd Theorem 1: a &lt;root> is missing (derivation: `equilibria.theory.equilibrium.heavy_ball`)" in page
    assert f"**{HEADLINE}.**" in page
    for link in re.findall(r"!\[[^]]*\]\(([^)]*)\)", page):
        assert (folder.path / link).stat().st_size > 100
    assert "| | claims | shown | within tolerance, law excluded | not shown | contradicted |" in page
    assert "| **papers, exact** | 3 | 1 |  |  | 2 |\n| **ours** | 2 | 2 |  |  |  |\n" in page
    assert "| [judged](#judged) | 4 | 2 |  |  | 2 |" in page
    assert "Measured and not judged:\n\n- spread: the <b> of one run\n".replace("<", "&lt;") in page


def test_the_gallery_has_all_scales_and_counts_each_experiment_once(folder):
    page = (folder.path / "index.html").read_text()
    assert "(smoke)" in page and "(desk)" in page
    assert f"{HEADLINE}</h" in page


def test_networks_have_a_part_of_their_own(tmp_path):
    path = tmp_path / "results"
    reproduce([replace(experiment("a-trained"), kind="networks"), experiment("exact")], results=path)
    for page, heading in (("RESULTS.md", "## {}"), ("index.html", "<h3>{}</h3>")):
        text = (path / page).read_text()
        order = [text.index(heading.format(title)) for title in ("Exact small worlds", "Networks")]
        assert order == sorted(order)
        assert order[0] < text.index("exact", order[0]) < order[1] < text.index("a-trained", order[0])


def test_a_figure_that_was_removed_is_reported(folder, tmp_path):
    scale_folder = folder.at_scale("judged", "smoke")
    content = scale_folder.figure("figure", "png").read_bytes()
    scale_folder.figure("figure", "png").unlink()
    try:
        assert "is not there any more" in write_gallery(folder).read_text()
    finally:
        scale_folder.figure("figure", "png").write_bytes(content)
