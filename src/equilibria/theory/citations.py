"""The source of each law: paper, equation, and whether it was corrected.

`law` registers a public law with its source; `cite` returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from equilibria.errors import EquilibriaError, one_of

T = TypeVar("T")
Status: TypeAlias = Literal["as printed", "corrected", "derived"]


@dataclass(frozen=True, slots=True)
class Paper:
    """A source document.

    Attributes:
        key: short name used by `law` and in `CITATION.cff`.
        title: the paper's title.
        bibtex: its BibTeX entry.
    """

    key: str
    title: str
    bibtex: str


def _paper(key: str, kind: str, title: str, **fields: str) -> Paper:
    body = "".join(f"  {name} = {{{text}}},\n" for name, text in {"title": title, **fields}.items())
    return Paper(key, title, f"@{kind}{{{key},\n{body}}}")


PAPERS: dict[str, Paper] = {
    paper.key: paper
    for paper in (
        _paper(
            "smd",
            "misc",
            "Spherical Motion Dynamics: Learning Dynamics of Neural Network with Normalization, Weight Decay, and SGD",
            author="Wan, Ruosi and Zhu, Zhanxing and Zhang, Xiangyu and Sun, Jian",
            year="2020",
            eprint="2006.08419",
            archiveprefix="arXiv",
        ),
        _paper(
            "smd+",
            "inproceedings",
            "Spherical Motion Dynamics: Learning Dynamics of Normalized Neural Network using SGD and Weight Decay"
            " (Appendix)",
            author="Wan, Ruosi and Zhu, Zhanxing and Zhang, Xiangyu and Sun, Jian",
            booktitle="Advances in Neural Information Processing Systems",
            year="2021",
        ),
        _paper(
            "nrq",
            "misc",
            "How Normalization and Weight Decay Can Affect SGD? Insights from a Simple Normalized Model",
            author="Anonymous",
            howpublished="Submitted to ICLR 2023, OpenReview k-JvYGkA9o",
            year="2023",
        ),
        _paper(
            "explr",
            "inproceedings",
            "An Exponential Learning Rate Schedule for Batch Normalized Networks",
            author="Li, Zhiyuan and Arora, Sanjeev",
            booktitle="International Conference on Learning Representations",
            year="2020",
            eprint="1910.07454",
            archiveprefix="arXiv",
        ),
        _paper(
            "sharp",
            "inproceedings",
            "Understanding the Generalization Benefit of Normalization Layers: Sharpness Reduction",
            author="Lyu, Kaifeng and Li, Zhiyuan and Arora, Sanjeev",
            booktitle="Advances in Neural Information Processing Systems",
            year="2022",
            eprint="2206.07085",
            archiveprefix="arXiv",
        ),
        _paper(
            "rotational",
            "misc",
            "Rotational Equilibrium: How Weight Decay Balances Learning Across Neural Networks",
            author="Kosson, Atli and Messmer, Bettina and Jaggi, Martin",
            year="2023",
            eprint="2305.17212",
            archiveprefix="arXiv",
        ),
        _paper(
            "eos",
            "inproceedings",
            "Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability",
            author="Cohen, Jeremy M. and Kaur, Simran and Li, Yuanzhi and Kolter, J. Zico and Talwalkar, Ameet",
            booktitle="International Conference on Learning Representations",
            year="2021",
            eprint="2103.00065",
            archiveprefix="arXiv",
        ),
        _paper(
            "aeos",
            "misc",
            "Adaptive Gradient Methods at the Edge of Stability",
            author="Cohen, Jeremy M. and Ghorbani, Behrooz and Krishnan, Shankar and Agarwal, Naman and "
            "Medapati, Sourabh and Badura, Michal and Suo, Daniel and Cardoze, David and Nado, Zachary and "
            "Dahl, George E. and Gilmer, Justin",
            year="2022",
            eprint="2207.14484",
            archiveprefix="arXiv",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Citation:
    """The source of one law.

    Attributes:
        law: dotted name below ``equilibria.theory``.
        paper: key into `PAPERS`, or ``""`` for a law derived in this project alone.
        where: equation, theorem or section of the paper.
        status: ``"as printed"``, ``"corrected"`` or ``"derived"``.
        note: the correction, or the derivation.
    """

    law: str
    paper: str
    where: str
    status: Status
    note: str

    @property
    def bibtex(self) -> str:
        """The BibTeX entry of the paper; empty for a law derived in this project."""
        return PAPERS[self.paper].bibtex if self.paper else ""

    def __str__(self) -> str:
        source = f"{PAPERS[self.paper].title}, {self.where}" if self.paper else self.where
        return f"{self.law}: {source} [{self.status}]" + (f" - {self.note}" if self.note else "")


_LAWS: dict[str, Citation] = {}


def law(paper: str, where: str, *, corrected: str = "", derived: str = "") -> Callable[[T], T]:
    """Register a public law with its source.

    Args:
        paper: key into `PAPERS`; ``""`` only together with ``derived``.
        where: equation, theorem or section.
        corrected: the error in the paper and its correction.
        derived: why the law holds although no paper states it.

    Returns:
        A decorator that returns the function or class unchanged.
    """
    if paper:
        one_of("paper", paper, PAPERS)
    status: Status = "corrected" if corrected else "derived" if derived else "as printed"

    def register(target: T) -> T:
        module = target.__module__.removeprefix("equilibria.theory.")
        name = f"{module}.{target.__qualname__}"  # type: ignore[attr-defined]
        _LAWS[name] = Citation(name, paper, where, status, corrected or derived)
        return target

    return register


def cite(target: object = None) -> Citation | tuple[Citation, ...]:
    """The source of one law, or of all laws.

    Args:
        target: a law of `equilibria.theory` (the function or class itself, or its name). A name is found by its last
            part, whatever module stands before it: records and results keep the name that a law had when they were
            written. Without a target, the citations of every registered law.

    Returns:
        One `Citation`, or all of them sorted by name. `Citation.bibtex` is the entry to paste.

    Raises:
        EquilibriaError: the target is not a registered law.

    Example:
        >>> from equilibria import theory
        >>> print(theory.cite("equilibrium.heavy_ball").status)
        corrected
    """
    # Importing a module registers its laws, and theory imports its modules lazily.
    from equilibria import theory

    theory.load_all()
    if target is None:
        return tuple(_LAWS[name] for name in sorted(_LAWS))
    if isinstance(target, str):
        name = target.removeprefix("equilibria.").removeprefix("theory.")
    else:
        module = str(getattr(target, "__module__", "")).removeprefix("equilibria.theory.")
        name = f"{module}.{getattr(target, '__qualname__', '')}"
    last = name.rsplit(".", 1)[-1]
    matches = [name] if name in _LAWS else [key for key in _LAWS if key.rsplit(".", 1)[-1] == last]
    if len(matches) != 1:
        raise EquilibriaError(
            f"got {target!r}; expected one law of equilibria.theory, such as 'equilibrium.heavy_ball' "
            f"(call cite() without arguments for all {len(_LAWS)})",
            argument="target",
        )
    return _LAWS[matches[0]]
