"""Every experiment of the registry at its smallest scale: every claim that is demanded there is shown."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from equilibria.errors import EquilibriaError
from equilibria.lab.harness import experiments, figures, find, registry, reproduce
from equilibria.lab.harness.pages import results_page
from equilibria.lab.harness.registry import MODULES, is_stale
from equilibria.lab.harness.results import Result, open_results
from equilibria.theory import cite

RESULTS = Path(__file__).parents[3] / "results"


# The longest; of the networks of each paper one stays in `make test`. `make test-all` runs all of them.
LONG = {
    "eq-diffusion",
    "eq-forecast",
    "eq-optimizers",
    "explr-angle",
    "explr-cosine",
    "explr-equivalence",
    "explr-joint",
    "explr-stepdecay",
    "explr-toy",
    "explr-v2",
    "nrq-equilibrium",
    "nrq-escape",
    "nrq-imagenet",
    "nrq-initialization",
    "nrq-networks",
    "sharp-ablations",
    "sharp-completion",
    "sharp-resnet",
    "smd-architectures",
    "smd-correlation",
    "smd-detection",
    "smd-fixed-lr",
    "smd-linear-scaling",
    "smd-momentum",
    "smd-multistage",
    "smd-pseudo-overfitting",
    "smd-rescale-law",
    "smd-synthetic",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MODULES]
)
def test_smoke(name, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "SUFFIXES", ("png",))  # drawing costs more than most of the runs
    monkeypatch.setitem(figures._STYLE, "savefig.dpi", 60)
    (report,) = reproduce(find([name]), scale="smoke", results=tmp_path / "results")
    assert report.failure == ""
    result = report.result
    assert result.claims
    assert [claim for claim in result.claims if claim.fails] == []
    assert Result.from_dict(json.loads(json.dumps(result.as_dict(), allow_nan=False))) == result
    assert result.figures
    for figure in result.figures:
        assert (tmp_path / "results" / name / "smoke" / f"{figure}.png").stat().st_size > 5000
    for claim in result.claims:
        if claim.source.law:
            cite(claim.source.law)  # raises if there is no such law


def test_ids_and_scales_are_as_the_command_line_promises():
    assert experiments()
    for name, experiment in experiments().items():
        assert re.fullmatch(r"[a-z]+-[a-z0-9-]+", name) and experiment.id == name
        assert "smoke" in experiment.scales and ("desk" in experiment.scales) == (name not in registry.PRESETS)


def test_a_group_leaves_out_experiments_without_the_scale():
    assert "nrq-imagenet" not in [experiment.id for experiment in find(["networks"], scale="desk")]
    assert "nrq-imagenet" in [experiment.id for experiment in find(["networks"], scale="paper")]
    assert [experiment.id for experiment in find(["nrq-imagenet"], scale="desk")] == ["nrq-imagenet"]


def test_the_table_of_modules_is_complete_and_right():
    """Every module below the papers and beyond that has an EXPERIMENT is listed, under that experiment's id."""
    lab = Path(registry.__file__).parents[1]
    files = [file for folder in ("papers", "beyond") for file in (lab / folder).rglob("*.py")]
    written = {file for file in files if "\nEXPERIMENT = " in file.read_text(encoding="utf-8")}
    assert {lab.joinpath(*module.split(".")).with_suffix(".py") for module in MODULES.values()} == written
    assert {name: experiment.id for name, experiment in experiments().items()} == {name: name for name in MODULES}
    papers = [module.rsplit(".", 1)[0] for module in MODULES.values()]
    assert list(MODULES) == sorted(MODULES, key=lambda name: (papers.index(MODULES[name].rsplit(".", 1)[0]), name))


def test_one_experiment_imports_no_other():
    code = (
        "import sys; from equilibria.lab.harness import find, registry; find(['nrq-escape'])\n"
        "others = {f'equilibria.lab.{module}' for name, module in registry.MODULES.items() if name != 'nrq-escape'}\n"
        "print(sorted(others & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_unknown_ids_raise_with_the_nearest():
    with pytest.raises(EquilibriaError, match="'sharp-hamiltonain', which is unknown; did you mean sharp-hamiltonian"):
        find(["sharp-hamiltonain"])
    with pytest.raises(EquilibriaError, match="--list"):
        find(["xyzzy"])


def test_all_is_every_one_once_and_in_order():
    assert [experiment.id for experiment in find(["sharp-hamiltonian", "all"])] == list(experiments())


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no committed results here (an installed package)")
def test_the_committed_results_are_of_the_present_versions_and_settings():
    stale = {result.id for _, result in open_results(RESULTS).results() if is_stale(result)}
    assert stale == {"eq-forecast"}  # it waits for a run on all 50,000 images


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no committed results here (an installed package)")
def test_the_committed_page_follows_from_the_committed_results():
    folder = open_results(RESULTS)
    assert (RESULTS / "RESULTS.md").read_text() == results_page(folder)
    for place, result in folder.results():
        if result.kind == "synthetic":  # a network may contradict a paper, and the page says so
            assert not result.fails, result.id
        assert all(place.figure(name, "png").is_file() for name in result.figures)
