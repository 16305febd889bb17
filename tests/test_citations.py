"""Every law names its source, and `CITATION.cff` credits the same papers."""

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
FIVE_PAPERS = {"smd", "smd+", "nrq", "explr", "sharp"}

# Modules without laws. Modules whose name starts with "_" hold helpers and are skipped as well.
WITHOUT_LAWS = {
    "citations": "the registry itself",
    "schedules": "shapes that the user chooses",
}

# Public functions that state no law, each with the reason.
NO_LAW = {
    "approach.adam_linearisation": "derivatives behind `approach.adam_approach` and `fluctuation.fluctuation`",
    "approach.fixed_point": "linear algebra: the fixed point of any moment map",
    "approach.linearise": "numerical differentiation of any recursion",
    "approach.map_linearisation": "derivatives behind `approach.nesterov_approach` and `fluctuation.fluctuation`",
    "equilibrium.adam_l2_decay": "part of the solution that `equilibrium.adam_l2` cites",
    "equilibrium.adam_l2_point": "unchecked formula of `equilibrium.adam_l2`, cited there",
    "equilibrium.adam_l2_norm_sq": "unchecked formula of `equilibrium.adam_l2`, cited there",
    "equilibrium.adam_step_size": "unchecked formula of `equilibrium.adam_l2`, cited there",
    "equilibrium.adamw_point": "unchecked formula of `equilibrium.adamw`, cited there",
    "equilibrium.constant_update_point": "unchecked formula of `equilibrium.constant_update`, cited there",
    "equilibrium.decay_product": "a check of the input",
    "equilibrium.equilibrium_from": "assembles the result of the laws that call it",
    "equilibrium.heavy_ball_point": "unchecked formula of `equilibrium.heavy_ball`, cited there",
    "equilibrium.second_moment_shift": "the error that `equilibrium.adamw` states in its validity",
    "equilibrium.nesterov_point": "unchecked formula of `equilibrium.nesterov`, cited there",
    "equilibrium.sgdw_point": "unchecked formula of `equilibrium.sgdw`, cited there",
    "identified.identified_from": "reads a record",
    "identified.identified_step": "inner loop of `transient.evolve`, of the law that `identified.Identified` cites",
    "memory.arcsine_coefficients": "a power series",
    "memory.lion_equilibrium_traces": "the fixed point of `memory.LionPull`",
    "memory.sign_total": "the arcsine series that `memory.lion_memory` cites, summed",
    "moments.adam_step": "inner loop of `transient.evolve` and `approach.adam_approach`, which cite the recursion",
    "moments.angle_from_chord_sq": "plane geometry",
    "moments.chord_sq": "plane geometry",
    "moments.nesterov_correlation": "unchecked formula of `rules.momentum_unit_grad_sq`, cited there",
    "moments.step_map": "the matrix of a step that is cited itself",
    "muon.orthogonalised": "torch.optim.Muon's own iteration",
    "rules.check_rule": "a check of the input",
    "rules.closed_rule": "a check of the input",
    "settling.memory_lengths": "a table of settings",
    "states.adam_settings": "a table of settings",
    "states.cold_start": "a starting point that the user chooses",
    "angles.update_memory": "the autocorrelation that each rule's `memory` cites",
    "states.memory_size": "a count",
    "states.settled": "the state at the fixed point that the rule's `equilibrium` cites",
    "states.step_of": "a table of step functions",
    "targets.rescale_sq_factors": "ratios of the targets that `targets.targets` cites",
    "targets.targets_per_step": "`targets.targets`, solved once per stretch of constant settings",
    "violations.assumptions": "the errors that `violations.violation_error` cites, in words",
    "targets.unscaled_settings": "the scale invariance that `states.rescaled` cites, step by step",
}


def registered() -> set[str]:
    return {citation.law for citation in cite()}


def public_functions() -> set[str]:
    """``module.function`` for every public function defined in a module that states laws."""
    names = set()
    for info in pkgutil.iter_modules(theory.__path__):
        if info.name.startswith("_") or info.name in WITHOUT_LAWS:
            continue
        module = importlib.import_module(f"{theory.__name__}.{info.name}")
        names |= {
            f"{info.name}.{name}"
            for name, item in vars(module).items()
            # Classes are results and optimizer rules; a law is a function, perhaps wrapped (a cache).
            if callable(item) and not isinstance(item, type) and hasattr(item, "__qualname__")
            if item.__module__ == module.__name__ and not name.startswith("_")
        }
    return names


def uncited() -> list[str]:
    return sorted(public_functions() - registered() - set(NO_LAW))


def test_every_public_function_is_cited():
    missing = uncited()
    assert not missing, f"decorate with @law, or give the reason in NO_LAW: {', '.join(missing)}"


def test_exemptions_are_needed():
    modules = {info.name for info in pkgutil.iter_modules(theory.__path__)}
    assert set(WITHOUT_LAWS) <= modules
    assert sorted(set(NO_LAW) - public_functions()) == []
    assert sorted(set(NO_LAW) & registered()) == []


def test_a_function_without_citation_is_reported(monkeypatch):
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


@pytest.mark.parametrize("former", ["rescale.rescale_factors", "theory.thresholds.adam_threshold", "noise_split"])
def test_a_law_is_found_under_the_module_it_once_had(former):
    assert cite(former).law.endswith(f".{former.rsplit('.', 1)[-1]}")


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
    assert set(PAPERS) >= FIVE_PAPERS
    assert set(keys) == set(PAPERS)


@pytest.mark.parametrize("key", sorted(PAPERS))
def test_a_paper_is_described_alike_in_citation_file_and_registry(cff, key):
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
