"""The pictures of docs/serve.md: a small ResNet on digits, trained with two weight decays and once more live.

Needs a Chromium and the `serve` extra. Run from a checkout: ``python docs/figures/serve.py``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import equilibria as eq
from equilibria.lab.data import Batches, load_digits
from equilibria.lab.nets import BasicBlockResNet

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.helpers.browser import Browser, find  # noqa: E402
from tests.helpers.served import serving, wait_for, write_damaged  # noqa: E402

STEPS, DROP, SLOWED = 900, 600, 0.01
FORECAST = "/forecast?steps=2500&schedule=step&lr=0.1&milestones=600,1200&factor=0.2"


def train(directory: Path, weight_decay: float, *, steps: int = STEPS, stop: threading.Event | None = None) -> None:
    """Train and watch; lr falls to a fifth at step `DROP`. With ``stop`` slowly, until that is set."""
    torch.manual_seed(0)
    digits = load_digits()
    net = BasicBlockResNet(8, (1, 1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=weight_decay)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [DROP], 0.2)
    batches = Batches(digits.train_images, digits.train_labels, batch_size=32, label_noise=0.3)
    with eq.watch(net, optimizer, log_dir=directory, every=5):
        for _, (images, labels) in zip(range(steps), batches, strict=False):
            optimizer.zero_grad()
            cross_entropy(net(images), labels).backward()
            optimizer.step()
            scheduler.step()
            if stop is not None and stop.wait(SLOWED):
                return


def take(browser: Browser, base: str, runs: dict[str, Any]) -> None:
    """Open every page and save what its window shows."""

    def picture(name: str, path: str, ready: str, *, width: int = 1200, height: int = 980, **look: Any) -> None:
        browser.open(f"{base}{path}", width=width, height=height, **look)
        wait_for(lambda: browser.run(ready), seconds=180)
        if name == "run":
            browser.run("document.getElementById('controls').scrollIntoView({behavior: 'instant'})")
        wait_for(_pause())
        browser.screenshot(ROOT / "docs" / f"serve-{name}.png", whole=False)
        assert browser.problems == [], browser.problems

    drawn = "document.querySelector('#angle-chart .trace path') !== null"
    up_to_date = "document.getElementById('state').textContent === 'Up to date'"
    first, second, live = runs["resnet-wd-0.005"], runs["resnet-wd-0.02"], runs["resnet-live"]
    picture("runs", "/", "!document.body.innerText.includes('reading …')", height=760)
    picture("run", live, drawn)
    picture("run-dark", first, drawn, height=900, dark=True)
    picture("phone", live, drawn, width=390, height=844, phone=True)
    chosen = "&".join(f"run={path.rsplit('/', 1)[1]}" for path in (first, second, live))
    compared = "document.querySelector('#compare-chart .trace path') !== null"
    picture("compare", f"/compare?{chosen}&layer=stem.conv.weight", compared, height=1000)
    picture("plan", "/plan", f"{up_to_date} && {drawn}")
    picture("forecast", f"{second}{FORECAST}", f"{up_to_date} && {drawn}", height=1100)


def _pause(rounds: int = 15) -> Callable[[], bool]:
    """A condition that is true after some rounds of `wait_for`: time for the browser to paint."""
    left = iter(range(rounds))
    return lambda: next(left, None) is None


def main() -> None:
    """Train, serve, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        for decay in (0.005, 0.02):
            train(runs / f"resnet-wd-{decay:g}", decay)
        write_damaged(runs / "half-copied")
        stop = threading.Event()
        live = threading.Thread(target=train, args=(runs / "resnet-live", 0.005), kwargs={"steps": 10**6, "stop": stop})
        live.start()
        try:
            with serving(runs, results=runs / "none") as base:
                browser = Browser(find(), Path(folder) / "profile")
                try:
                    browser.open(base)
                    listed = "[...document.querySelectorAll('#runs a')].map((a) => [a.textContent, a.pathname])"
                    wait_for(lambda: len(browser.run(listed)) == 4, seconds=120)
                    take(browser, base, dict(browser.run(listed)))
                finally:
                    browser.close()
        finally:
            stop.set()
            live.join()


if __name__ == "__main__":
    main()
