"""Writes docs/corrections.md: what `equilibria.theory` corrects in the papers, and the register of all laws.

`make docs-generated` runs it; a test compares the page with what it would write. What is corrected comes from the
`corrected=` of a law, "tested in" from the tests that import it.
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

The laws here are not copied from the papers: each is tested against an independent slow computation.
Where a paper prints something else, the law says so in its own source, and this page is generated from there;
`eq.cite(name)` says the same at a prompt. {corrected} of {total} laws are corrected, in {rows} rows: laws with the same
erratum share one. What is only stated for more cases than the paper's is [listed apart](#extended-here), and errata in
proofs that no law uses are listed on the papers' pages.
"""

EXTENDED = {
    "folding.advance",
    "moments.heavy_ball_step",
    "targets.targets",
    "transient.evolve",
    "translation.translate_batch",
}
"""Laws whose note says what they cover beyond the paper, and contradicts nothing in it."""

SHARES = {
    "rayleigh.equilibrium_angle": "rayleigh.angular_update",
    "rayleigh.norm_sq_along": "rayleigh.equilibrium_norm_sq",
    "rayleigh.norm_sq_at": "rayleigh.equilibrium_norm_sq",
    "rescale.rescale_factors": "states.rescaled",
    "rules.Lion": "memory.lion_memory",
    "stability.edge_of_stability": "hamiltonian.mean_square_displacement",
    "switching.to_folded": "folding.fold",
    "switching.to_weight_decay": "folding.fold",
    "tapering.taper": "texp.texp",
    "watson.watson_cdf": "watson.watson_log_density",
    "watson.watson_moments": "watson.watson_log_density",
    "watson.watson_risk": "rayleigh_risk.stationary_risk",
}
"""Laws with the same erratum as another, whose row they share."""


def tests_of(law: str) -> list[str]:
    """The test files that use a law, those named after its module first."""
    module, _, name = law.partition(".")
    used = {(home, name) for home in ("eq", "equilibria", "theory", module)}
    found = [path for path, uses in _uses().items() if uses & used]
    found += [path for path in _uses() if not found and path.stem == f"test_{module}"]  # through a rule
    theirs = sorted(found, key=lambda path: (module not in path.stem, path.parent.name != "theory", path.name))
    return [str(path.relative_to(ROOT)) for path in theirs]


@functools.cache
def _uses() -> dict[Path, set[tuple[str, str]]]:
    """Of every test file what it takes from where: `from equilibria.theory.angles import x`, `angles.x`."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return {path: set(_uses_in(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}


def _uses_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equilibria"):
            yield from ((str(node.module).rsplit(".", 1)[-1], alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield str(getattr(node.value, "id", getattr(node.value, "attr", ""))), node.attr


def status(each: Citation) -> str:
    """As `cite` says it, but an extension is not called a correction."""
    return "extended" if each.law in EXTENDED else each.status


def corrected() -> list[Citation]:
    """The laws that contradict a paper."""
    stale = (EXTENDED | SHARES.keys() | set(SHARES.values())) - {e.law for e in cite() if e.status == "corrected"}
    if stale:
        raise SystemExit(f"docs/corrections.py names laws that correct nothing: {', '.join(sorted(stale))}")
    return [each for each in cite() if status(each) == "corrected"]


def corrections(paper: str) -> str:
    """A table of what is corrected in one paper."""
    rows = [_row(each) for each in corrected() if each.paper == paper and each.law not in SHARES]
    if not rows:
        return ""
    more = f"\n\nIts experiments, re-run: [page](papers/{PAPER_PAGES[paper]}.md)." if paper in PAPER_PAGES else ""
    head = "| where | what is printed, and what is right | law, and its test |\n|---|---|---|\n"
    return f"\n## {PAPERS[paper].title}\n\n`{paper}`{more}\n\n{head}" + "\n".join(rows) + "\n"


def _row(each: Citation) -> str:
    laws = [each, *(other for other in cite() if SHARES.get(other.law) == each.law)]
    where = "; ".join(dict.fromkeys(law.where for law in laws))
    return f"| {_cell(where)} | {_cell(each.note)} | {_named(laws)} |"


def _named(laws: list[Citation]) -> str:
    """The laws, and below them the first test of each."""
    return "<br>".join(dict.fromkeys([f"`{each.law}`" for each in laws] + [f"`{_test(each)}`" for each in laws]))


def _test(each: Citation) -> str:
    tests = tests_of(each.law)
    if not tests:
        raise SystemExit(f"{each.law} is said to be {status(each)}, and no test uses it")
    return Path(tests[0]).name


def extensions() -> str:
    """A table of the laws that go beyond their paper without contradicting it."""
    rows = [
        f"| {each.paper}, {_cell(each.where)} | {_cell(each.note)} | {_named([each])} |"
        for each in cite()
        if status(each) == "extended"
    ]
    head = "| where | what is said here | law, and its test |\n|---|---|---|\n"
    words = "Nothing printed is wrong: the law here covers more, or is restated (`eq.cite` calls these corrected, too)."
    return f"\n## Extended here\n\n{words}\n\n{head}" + "\n".join(rows) + "\n"


def register() -> str:
    """A table of all laws."""
    rows = [f"| `{each.law}` | {each.paper or '-'} | {_cell(each.where)} | {status(each)} |" for each in cite()]
    return "\n## Register\n\n| law | paper | where | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    """Text for a table of Markdown: a star, a bar or an angle bracket in a formula is no markup."""
    return re.sub(r"([|*<>_\[\]$~])", r"\\\1", text)


def page() -> str:
    """The whole page."""
    laws = corrected()
    rows = sum(each.law not in SHARES for each in laws)
    head = HEAD.format(corrected=len(laws), total=len(cite()), rows=rows)
    return head + "".join(corrections(paper) for paper in PAPERS) + extensions() + register()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
