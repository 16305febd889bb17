"""Sphinx: the site is built from the whole repository, so that links between pages are the same here and on a forge.

`make docs` builds it, strictly: `sphinx-build -W -n -c docs . build/docs`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent / "src"))

from equilibria._version import __version__  # noqa: E402

project = "equilibria"
author = "the equilibria contributors"
copyright = "the equilibria contributors, MIT licence"
release = version = __version__

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "results/RESULTS.md",
    "benchmarks/*.md",
    "examples/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".venv", "build", "src", "tests", "**/records-*"]
source_suffix = {".md": "markdown"}

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml", "public_names", "plain_docstrings"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

html_theme = "furo"
html_title = f"equilibria {__version__}"
html_static_path = ["_static"]
html_extra_path = ["_root"]  # the first page, which leads to docs/index.html
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"  # no script, no font, nothing from elsewhere

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
default_role = "py:obj"  # `name` in a docstring is a link where there is something to link to
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

nitpick_ignore_regex = [
    ("py:obj", r".*"),  # a name in backticks need not be a link
    ("py:class", r"(abc|collections|contextlib|os|pathlib|types|typing|numpy|np|torch|nn|optim|pyarrow|plotly|go)\..*"),
    ("py:(class|func)", r"(pa|click|pyarrow)\..*"),
    (
        "py:class",
        r"Tensor|Figures?|Arrays|TaskResults|Config|equilibria\.lab\.harness\.experiment\.Config|_?[A-Z]|.*\._?[A-Z]",
    ),
    ("py:class", r"equilibria\.(.*\.)?_.*"),  # private bases
    ("py:class", r"equilibria\.(lab\.harness\.workers|optimizers\.(rules|controllers|experiment))\..*"),
    ("py:class", r"equilibria\.(findings\.Findings|theory\.schedules\.TorchScheduler)"),  # a tuple; a protocol
]
