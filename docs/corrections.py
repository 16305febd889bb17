"""Write docs/corrections.md: what `equilibria.theory` corrects in the papers, and the register of all laws.

`make docs-generated` runs this script, and a test compares the page with its output. The corrections come from the
`corrected=` of each law, the test files from the tests that import it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from equilibria.theory import PAPERS, Citation, cite

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "corrections.md"
PAPER_PAGES = {"smd": "smd", "smd+": "smd", "nrq": "nrq", "explr": "explr", "sharp": "sharp"}

HEAD = """# Corrections to the papers

<!-- Written by docs/corrections.py from the laws themselves: do not edit. -->

Each law is tested against an independent slow computation, not copied from its paper. Where a paper prints something
else, the law's source states the correction, and this page is generated from those statements; `eq.cite(name)` returns
the same text. {corrected} of {total} laws are corrected, in {rows} rows: laws with the same erratum share a row. Laws
that only cover more cases than the paper are [listed separately](#extended-here); errata in proofs that no law uses
are on the papers' pages.
"""

EXTENDED = {
    "folding.advance",
    "moments.heavy_ball_step",
    "targets.targets",
    "transient.evolve",
    "translation.translate_batch",
}
"""Laws that cover more than the paper without contradicting it."""

SHARES = {
    "rayleigh.equilibrium_angle": "rayleigh.angular_update",
    "rayleigh.norm_sq_along": "rayleigh.equilibrium_norm_sq",
    "rayleigh.norm_sq_at": "rayleigh.equilibrium_norm_sq",
    "states.rescale_factors": "states.rescaled",
    "rules.Lion": "memory.lion_memory",
    "stability.edge_of_stability": "hamiltonian.mean_square_displacement",
    "switching.to_folded": "folding.fold",
    "switching.to_weight_decay": "folding.fold",
    "texp.taper": "texp.texp",
    "watson.watson_cdf": "watson.watson_log_density",
    "watson.watson_moments": "watson.watson_log_density",
    "watson.watson_risk": "rayleigh_risk.stationary_risk",
}
"""Laws that share the erratum, and the row, of another law."""


def tests_of(law: str) -> list[str]:
    """The test files that use a law, those named after its module first."""
    module, _, name = law.partition(".")
    used = {(home, name) for home in ("eq", "equilibria", "theory", module)}
    users = [path for path, uses in _uses().items() if uses & used]
    users += [path for path in _uses() if not users and path.stem == f"test_{module}"]  # through a rule
    theirs = sorted(users, key=lambda path: (module not in path.stem, path.parent.name != "theory", path.name))
    return [str(path.relative_to(ROOT)) for path in theirs]


@functools.cache
def _uses() -> dict[Path, set[tuple[str, str]]]:
    """The (module, name) pairs that each test file uses: `from equilibria.theory.angles import x`, `angles.x`."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return {path: set(_uses_in(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}


def _uses_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equilibria"):
            yield from ((str(node.module).rsplit(".", 1)[-1], alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield str(getattr(node.value, "id", getattr(node.value, "attr", ""))), node.attr


def status(citation: Citation) -> str:
    """The citation's status, or "extended" for a law that covers more than its paper."""
    return "extended" if citation.law in EXTENDED else citation.status


def corrected() -> list[Citation]:
    """The laws that contradict a paper."""
    stale = (EXTENDED | SHARES.keys() | set(SHARES.values())) - {
        citation.law for citation in cite() if citation.status == "corrected"
    }
    if stale:
        raise SystemExit(f"docs/corrections.py names laws that correct nothing: {', '.join(sorted(stale))}")
    return [citation for citation in cite() if status(citation) == "corrected"]


def corrections(paper: str) -> str:
    """Table of the corrections to one paper."""
    rows = [_row(citation) for citation in corrected() if citation.paper == paper and citation.law not in SHARES]
    if not rows:
        return ""
    more = f"\n\nIts experiments, re-run: [page](papers/{PAPER_PAGES[paper]}.md)." if paper in PAPER_PAGES else ""
    head = "| where | correction | law, and its test |\n|---|---|---|\n"
    return f"\n## {PAPERS[paper].title}\n\n`{paper}`{more}\n\n{head}" + "\n".join(rows) + "\n"


def _row(citation: Citation) -> str:
    laws = [citation, *(other for other in cite() if SHARES.get(other.law) == citation.law)]
    where = "; ".join(dict.fromkeys(law.where for law in laws))
    return f"| {_cell(where)} | {_cell(citation.note)} | {_named(laws)} |"


def _named(laws: list[Citation]) -> str:
    """The laws, and below them the first test of each."""
    names, tests = [f"`{law.law}`" for law in laws], [f"`{_test(law)}`" for law in laws]
    return "<br>".join(dict.fromkeys(names + tests))


def _test(citation: Citation) -> str:
    tests = tests_of(citation.law)
    if not tests:
        raise SystemExit(f"{citation.law} is marked {status(citation)}, but no test uses it")
    return Path(tests[0]).name


def extensions() -> str:
    """Table of the laws that go beyond their paper without contradicting it."""
    rows = [
        f"| {citation.paper}, {_cell(citation.where)} | {_cell(citation.note)} | {_named([citation])} |"
        for citation in cite()
        if status(citation) == "extended"
    ]
    head = "| where | extension | law, and its test |\n|---|---|---|\n"
    words = "The papers are right; the law covers more cases or is restated (`eq.cite` calls these corrected, too)."
    return f"\n## Extended here\n\n{words}\n\n{head}" + "\n".join(rows) + "\n"


def register() -> str:
    """Table of all laws."""
    rows = [f"| `{law.law}` | {law.paper or '-'} | {_cell(law.where)} | {status(law)} |" for law in cite()]
    return "\n## Register\n\n| law | paper | where | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Text for a Markdown table, with the characters of formulas that Markdown would interpret escaped."""
    return re.sub(r"([|*<>_\[\]$~])", r"\\\1", text)


def page() -> str:
    """The whole page."""
    laws = corrected()
    rows = sum(law.law not in SHARES for law in laws)
    head = HEAD.format(corrected=len(laws), total=len(cite()), rows=rows)
    return head + "".join(corrections(paper) for paper in PAPERS) + extensions() + register()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
