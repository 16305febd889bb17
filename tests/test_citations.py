"""Every law says where it comes from, and `CITATION.cff` credits the same papers."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

from equilibria import theory
from equilibria.errors import EquilibriaError
from equilibria.theory import PAPERS, cite

ROOT = Path(__file__).parents[1]
THE_FIVE = {"smd", "smd+", "nrq", "explr", "sharp"}

# Modules that state no law. A module whose name starts with "_" holds helpers and is left out as well.
WITHOUT_LAWS = {
    "citations": "the registry itself",
    "schedules": "shapes that the user chooses",
    "validity": "words and thresholds that go with other modules' laws",
}

# Public functions that state no law of their own; say why.
NO_LAW = {
    "adam.adam_step": "inner loop of `transient.evolve` and `approach.adam_approach`, which cite the recursion",
    "approach.adam_linearisation": "derivatives behind `approach.adam_approach` and `fluctuation.fluctuation`",
    "approach.fixed_point": "linear algebra: the fixed point of any moment map",
    "approach.map_linearisation": "derivatives behind `approach.nesterov_approach` and `fluctuation.fluctuation`",
    "equilibrium.adam_l2_decay": "part of the solution that `equilibrium.adam_l2` cites",
    "equilibrium.decay_product": "a check of the input",
    "equilibrium.homogeneous_coordinates": "words that go with the laws of Adam",
    "fixed_points.adam_l2_norm_sq": "unchecked formula of `equilibrium.adam_l2`, cited there",
    "fixed_points.adam_step_size": "unchecked formula of `equilibrium.adam_l2`, cited there",
    "fixed_points.adamw_point": "unchecked formula of `equilibrium.adamw`, cited there",
    "fixed_points.constant_update_point": "unchecked formula of `equilibrium.constant_update`, cited there",
    "fixed_points.heavy_ball_point": "unchecked formula of `equilibrium.heavy_ball`, cited there",
    "fixed_points.nesterov_point": "unchecked formula of `equilibrium.nesterov`, cited there",
    "fixed_points.sgdw_point": "unchecked formula of `equilibrium.sgdw`, cited there",
    "lion.settled_lion": "the fixed point of `lion.LionPull`",
    "memory.arcsine_coefficients": "a power series",
    "linear.linearise": "numerical differentiation of any recursion",
    "moments.angle_from_chord_sq": "plane geometry",
    "moments.chord_sq": "plane geometry",
    "moments.nesterov_correlation": "unchecked formula of `unit_gradient.momentum_unit_grad_sq`, cited there",
    "moments.step_map": "the matrix of a step that is cited itself",
    "settling.equilibrium_norm_sq": "the norm of `states.settled`",
    "states.cold_start": "a starting point that the user chooses",
    "states.settled": "the state at the fixed point that the rule's `equilibrium` cites",
    "states.memory_size": "a count",
    "states.step_of": "a table of step functions",
}


def registered() -> set[str]:
    return {citation.law for citation in cite()}


def public_functions() -> set[str]:
    """``module.function`` for every public function defined in a module that states laws."""
    found = set()
    for info in pkgutil.iter_modules(theory.__path__):
        if info.name.startswith("_") or info.name in WITHOUT_LAWS:
            continue
        module = importlib.import_module(f"{theory.__name__}.{info.name}")
        found |= {
            f"{info.name}.{name}"
            for name, item in vars(module).items()
            # Classes are results and optimizer rules; a law is a function, perhaps wrapped (a cache).
            if callable(item) and not isinstance(item, type) and hasattr(item, "__qualname__")
            if item.__module__ == module.__name__ and not name.startswith("_")
        }
    return found


def uncited() -> list[str]:
    return sorted(public_functions() - registered() - set(NO_LAW))


def test_every_public_function_is_cited():
    missing = uncited()
    assert not missing, f"decorate with @law, or say in NO_LAW why not: {', '.join(missing)}"


def test_exemptions_are_needed():
    modules = {info.name for info in pkgutil.iter_modules(theory.__path__)}
    assert set(WITHOUT_LAWS) <= modules
    assert sorted(set(NO_LAW) - public_functions()) == []
    assert sorted(set(NO_LAW) & registered()) == []


def test_the_check_sees_a_function_without_citation(monkeypatch):
    some_law = min(public_functions() & registered())
    module = importlib.import_module(f"{theory.__name__}.{some_law.split('.')[0]}")

    def planted():
        """A law nobody registered."""

    planted.__module__ = module.__name__
    monkeypatch.setattr(module, "planted", planted, raising=False)
    assert f"{some_law.split('.')[0]}.planted" in uncited()


def test_every_citation_is_complete():
    for citation in cite():
        module, _, name = citation.law.partition(".")
        law = importlib.import_module(f"{theory.__name__}.{module}")
        for part in name.split("."):
            law = getattr(law, part)
        assert cite(law) == citation
        assert citation.where, citation
        assert citation.status in {"as printed", "corrected", "derived"}
        assert bool(citation.note) == (citation.status != "as printed"), citation
        assert citation.paper or citation.status == "derived", f"{citation}: no paper, and not derived here"
        assert citation.bibtex == (PAPERS[citation.paper].bibtex if citation.paper else "")


def test_an_unknown_law_is_named():
    with pytest.raises(EquilibriaError, match=r"got 'nonsense'; expected one law"):
        cite("nonsense")


@pytest.fixture(scope="module")
def cff() -> dict:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_file_describes_the_software(cff):
    assert cff["cff-version"] == "1.2.0"
    assert cff["title"] == "equilibria"
    assert cff["authors"] == [{"name": "The equilibria authors"}]
    assert cff["message"]
    assert cff["license"] == "MIT"


def test_the_citation_file_lists_the_papers_of_the_laws(cff):
    keys = [reference["abbreviation"] for reference in cff["references"]]
    assert len(keys) == len(set(keys))
    assert set(PAPERS) >= THE_FIVE
    assert set(keys) == set(PAPERS)


@pytest.mark.parametrize("key", sorted(PAPERS))
def test_a_paper_reads_the_same_in_both_places(cff, key):
    reference = next(entry for entry in cff["references"] if entry["abbreviation"] == key)
    bibtex = dict(re.findall(r"^  (\w+) = \{(.*)\},$", PAPERS[key].bibtex, flags=re.MULTILINE))
    assert reference["title"] == PAPERS[key].title == bibtex["title"]
    assert str(reference["year"]) == bibtex["year"]
    names = [
        person.get("name") or f"{person['family-names']}, {person['given-names']}" for person in reference["authors"]
    ]
    assert " and ".join(names) == bibtex["author"]
    assert reference.get("collection-title") == bibtex.get("booktitle")
    assert reference.get("notes") == bibtex.get("howpublished")
    if "eprint" in bibtex:
        assert reference["url"] == f"https://arxiv.org/abs/{bibtex['eprint']}"
