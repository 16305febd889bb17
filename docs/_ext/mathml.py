"""Equations as MathML, by docutils' own converter: every current browser shows it without a script or a font."""

from __future__ import annotations

import html
import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

LOGGER = logging.getLogger(__name__)
APPLIED = re.compile(r"(<mo>&ApplyFunction;</mo>)(?!\s*(?:<mrow>\s*)?<mo)")


def converted(equation: str, *, block: bool) -> str:
    """LaTeX to MathML, with the space between a function and a name that browsers leave out."""
    return APPLIED.sub(r'\1<mspace width="0.17em"/>', latex2mathml.tex2mathml(equation, as_block=block))


def _mathml(node: nodes.math | nodes.math_block, *, block: bool) -> str:
    try:
        return converted(node.astext(), block=block)
    except MathError as error:
        LOGGER.warning("no MathML for %r: %s", node.astext(), error, location=node)
        return f"<code>{html.escape(node.astext())}</code>"


def inline(self: Any, node: nodes.math) -> None:
    """Write an equation within a line."""
    self.body.append(f'<span class="math">{_mathml(node, block=False)}</span>')
    raise nodes.SkipNode


def display(self: Any, node: nodes.math_block) -> None:
    """Write an equation of its own line, numbered if it has a label."""
    number = get_node_equation_number(self, node) if node.get("number") else ""
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(f"{_mathml(node, block=True)}{f'<span>({number})</span>' if number else ''}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer as `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
