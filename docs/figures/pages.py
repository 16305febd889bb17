"""Pictures of two offline pages: docs/plan.png of README's plan, docs/forecast-page.png of the run of docs/forecast.md.

Needs a Chromium and the `lab` extra. Run from a checkout: ``python docs/figures/pages.py``.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from equilibria.cli import app
from equilibria.forecasting import Scenario, what_if
from equilibria.theory.schedules import FromValues, MultiStep

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.browser import Browser, find  # noqa: E402

KNOWN, DROP, STEPS, WD = 1000, 1500, 4000, 0.01  # as docs/forecast.md has them


def plan(page: Path) -> None:
    """The page of the command in README."""
    (command,) = re.findall(r"^equilibria (plan .*) --html plan.html$", (ROOT / "README.md").read_text(), re.MULTILINE)
    result = CliRunner().invoke(app, [*shlex.split(command), "--html", str(page)])
    assert result.exit_code == 0, result.output


def forecast(page: Path) -> None:
    """The page of docs/forecast.md: its training as far as it is known, its three scenarios."""
    (code,) = re.findall(
        r"^```python\n(from contextlib .*?)^plain = ", (ROOT / "docs/forecast.md").read_text(), re.M | re.S
    )
    code = code.replace('f"runs/{name}"', "name")
    names: dict[str, Any] = {}
    exec(code, names)
    names["STEPS"] = KNOWN  # the scheduler and the weight decay change later
    names["train_once"](str(page.parent / "plain"), 0, False, WD)
    schedule = MultiStep(0.1, milestones=[DROP], factor=0.1)
    less = FromValues(np.where(np.arange(STEPS) < DROP, WD, WD / 10))
    scenarios = {
        "plain": schedule,
        "rescaled": Scenario(schedule, rescale=True),
        "less decay": Scenario(schedule, weight_decay=less),
    }
    what_if(page.parent / "plain", scenarios, steps=STEPS, start=KNOWN).report(page, title="What if")


PICTURES = (  # the page, its file, what to show first, the pixels that fixed controls cover, height
    (plan, "plan", "section[aria-labelledby=angle-heading]", 90, 580),
    (forecast, "forecast-page", ".choices, .toggles, fieldset", 0, 760),
)


def main() -> None:
    """Write both pages and take their pictures."""
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(find() or "chromium", Path(folder) / "profile")
        try:
            for write, name, top, covered, height in PICTURES:
                page = Path(folder) / f"{name}.html"
                write(page)
                browser.open(page, width=1020, height=height)
                browser.run(f"document.querySelector({top!r}).scrollIntoView({{behavior: 'instant'}})")
                browser.run(f"window.scrollBy(0, -{covered})")
                browser.screenshot(ROOT / "docs" / f"{name}.png", whole=False)
                assert browser.problems == [], browser.problems
        finally:
            browser.close()


if __name__ == "__main__":
    main()
