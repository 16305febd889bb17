"""What twenty viewers of a million-sample run cost: the first paint, the server's memory, and CPU time of training.

A process trains and appends to a run of 50 layers x 20,000 samples while the viewers watch: each loads the page,
fetches every new view and keeps its stream of events open. CPU time per training step is measured with and without
viewers, in turns. Chromium, if installed, opens the page with an empty cache while the twenty watch. Run it with
`make bench`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from equilibria.records import RecordWriter
from equilibria.records.tables import NUMBERS
from publishing import publish

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.helpers

if TYPE_CHECKING:
    from tests.helpers.browser import Browser

LAYERS, SAMPLES, VIEWERS, ROUNDS, STEPS = 50, 20_000, 20, 9, 250
NAMES = [f"layer{place // 10}.{place % 10}.conv.weight" for place in range(LAYERS)]
LIMITS = {"paint": 2.0, "data": 2.0, "memory": 500.0, "training": 1.05}

TRAINING = """
import sys, time
import numpy as np, torch
sys.path.insert(0, {here!r})
from serving import LAYERS, SAMPLES, columns
from equilibria.records import RecordWriter
torch.set_num_threads(1)
layers = [(torch.nn.Linear(256, 256, bias=False), torch.nn.BatchNorm1d(256)) for _ in range(4)]
model = torch.nn.Sequential(*[part for layer in layers for part in layer])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
inputs, step = torch.randn(64, 256), SAMPLES
with RecordWriter(sys.argv[1], metadata={{}}, resume=True, flush_seconds=1.0) as writer:
    for line in sys.stdin:
        begin = time.process_time()
        for _ in range(int(line)):
            optimizer.zero_grad()
            (model(inputs) ** 2).mean().backward()
            optimizer.step()
            writer.append(columns(np.array([step])))
            step += 1
            time.sleep(0.01)
        print((time.process_time() - begin) / int(line), flush=True)
"""


def columns(steps: np.ndarray) -> dict[str, object]:
    """Samples of every layer at these steps: equilibrium, with scatter."""
    random = np.random.default_rng(int(steps[0]))
    rows = len(steps) * LAYERS
    scattered = np.exp(random.normal(0, 0.12, rows))
    levels = {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "angle_equilibrium": 0.01, "angle_predicted": 0.01}
    levels |= {"norm": 3.0, "norm_equilibrium": 3.0, "norm_predicted": 3.0, "cosine": 1e-4, "steps_to_settle": 0.0}
    numbers = {name: np.full(rows, levels.get(name, 1.0)) for name in NUMBERS}
    return {
        "step": np.repeat(steps, LAYERS),
        "param": NAMES * len(steps),
        **numbers,
        "angle": 0.01 * scattered,
        "state": ["settled"] * rows,
    }


def metadata() -> dict[str, object]:
    rule = {"kind": "SGD", "momentum": 0.9, "nesterov": False, "dampening": 0.0}
    params = [
        {"name": name, "entries": 9216, "optimizer": 0, "group": 0, "rule": rule, "law": "SGD", "no_law": None}
        for name in NAMES
    ]
    return {"steps_per_epoch": 100, "optimizers": [{"class": "SGD", "settings": "SGD"}], "params": params}


def write_run(directory: Path) -> None:
    with RecordWriter(directory, metadata=metadata()) as writer:
        for begin in range(0, SAMPLES, 100):
            writer.append(columns(np.arange(begin, begin + 100)))


# ---- the server, its viewers, the training


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    """Process id and port."""
    command = [sys.executable, "-m", "equilibria", "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            match = re.search(r":(\d+)/", process.stdout.readline())
            assert match is not None
            yield process.pid, int(match[1])
        finally:
            process.send_signal(signal.SIGINT)


class Viewer(threading.Thread):
    """One open page: fetches every new view until `end`.

    Attributes:
        first: seconds from the request of the page to the arrival of its first view.
        views: the number of views it fetched.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self._ended = port, False
        self.first, self.views = float("nan"), 0

    def run(self) -> None:
        began = time.perf_counter()
        self._get("/run/1")
        self._get("/run/1/view")
        self.first, self.views = time.perf_counter() - began, 1
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", "/run/1/events")
        stream, view = connection.getresponse(), None
        while not self._ended:
            line = stream.readline()
            if line.startswith(b"data: "):
                now = json.loads(line[6:])["view"]
                if now != view:
                    view = now
                    self._get("/run/1/view")
                    self.views += 1
        connection.close()

    def end(self) -> None:
        self._ended = True

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", path)
        content = connection.getresponse().read()
        connection.close()
        return content


@contextmanager
def viewers(port: int) -> Iterator[list[Viewer]]:
    watching = [Viewer(port) for _ in range(VIEWERS)]
    for viewer in watching:
        viewer.start()
    yield watching
    for viewer in watching:
        viewer.end()
    for viewer in watching:
        viewer.join(60)


def memory(pid: int, what: str) -> float:
    """Megabytes: VmRSS now, VmHWM the most so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"{what}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def paint(port: int, profile: Path) -> dict[str, float] | None:
    """Seconds until Chromium has painted, shown the findings and drawn the charts, in two visits; None without it.

    On the first visit its caches are empty and it compiles plotly. CPU is that of the page's thread.
    """
    from tests.helpers.browser import Browser, find

    program = find()
    if program is None:
        return None
    browser = Browser(program, profile)
    browser.count_cpu()
    try:
        first, second = (_visit(browser, port) for _ in range(2))
    finally:
        browser.close()
    return {**first, "again": second["cpu"], "again, clock": second["charts"]}


def _visit(browser: Browser, port: int) -> dict[str, float]:
    browser.open(f"http://127.0.0.1:{port}/run/1")
    browser.run(
        """new Promise((done) => { const look = () => document.documentElement.dataset.view
        ? done(0) : setTimeout(look, 10); look(); })"""
    )
    cpu = browser.cpu_seconds()
    names = {"paint": "first-contentful-paint", "words": "words", "charts": "charts"}
    codes = {key: f"performance.getEntriesByName('{name}')[0].startTime / 1000" for key, name in names.items()}
    return {"cpu": cpu, **{key: float(browser.run(code)) for key, code in codes.items()}}


# ---- measuring


def measure(folder: Path) -> dict[str, object]:
    write_run(folder / "run")
    results: dict[str, object] = {}
    code = TRAINING.format(here=str(Path(__file__).parent))
    (folder / "empty").mkdir()
    with server(folder / "empty") as (pid, _):
        time.sleep(1)
        results["memory without runs"] = memory(pid, "VmRSS")
    with server(folder) as (pid, port):
        time.sleep(1)  # it reads the runs at once; a person takes a second to open a browser
        with viewers(port) as watching:
            while any(np.isnan(viewer.first) for viewer in watching):
                time.sleep(0.05)
            results["first data"] = max(viewer.first for viewer in watching)
            results["paint"] = paint(port, folder / "profile")
        results["memory at rest"] = memory(pid, "VmRSS")
        with subprocess.Popen(
            [sys.executable, "-c", code, str(folder / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as training:
            results |= _alternate(training, pid, port)
            assert training.stdin is not None
            training.stdin.close()
        results["memory at most"] = memory(pid, "VmHWM")
    return results


def _alternate(training: subprocess.Popen[str], pid: int, port: int) -> dict[str, object]:
    alone, watched, shares, views = [], [], [], []
    _segment(training, 50)
    for _ in range(ROUNDS):
        alone.append(_segment(training, STEPS))
        with viewers(port) as watching:
            began, spent = time.perf_counter(), cpu_seconds(pid)
            watched.append(_segment(training, STEPS))
            shares.append((cpu_seconds(pid) - spent) / (time.perf_counter() - began))
            views.append(min(viewer.views for viewer in watching))
    return {"alone": alone, "watched": watched, "share": statistics.median(shares), "views": min(views)}


def _segment(training: subprocess.Popen[str], steps: int) -> float:
    """CPU seconds per step."""
    assert training.stdin is not None
    assert training.stdout is not None
    training.stdin.write(f"{steps}\n")
    training.stdin.flush()
    return float(training.stdout.readline())


def table(results: dict[str, object]) -> tuple[list[str], int]:
    """Markdown lines, and the number of missed limits."""
    alone, watched = results["alone"], results["watched"]
    assert isinstance(alone, list)
    assert isinstance(watched, list)
    ratios = [with_viewers / without for with_viewers, without in zip(watched, alone, strict=True)]
    ratio = statistics.median(ratios)
    lines = [
        "# What twenty viewers cost",
        "",
        f"A run of {LAYERS} layers x {SAMPLES:,} samples = {LAYERS * SAMPLES:,}, growing; {VIEWERS} viewers, each with "
        "its stream open and fetching every new view. Everything on one machine, "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f} at the end: a busy machine stretches seconds.",
        "",
        "| what | measured | limit | |",
        "|---|---|---|---|",
    ]
    rows = [("first view fetched, slowest viewer", f"{results['first data']:.2f} s", "data", results["first data"])]
    if isinstance(results["paint"], dict):
        rows_of_paint = {
            "paint": ("first paint in Chromium, empty cache", "paint"),
            "words": ("findings and table shown, empty cache", "paint"),
            "charts": ("charts drawn, empty cache (plotly is compiled, once per browser)", ""),
            "again": ("charts drawn on the next visit, CPU of the page's thread", "paint"),
            "again, clock": ("the same, by the clock", ""),
        }
        for key, (what, limit) in rows_of_paint.items():
            rows.append((what, f"{results['paint'][key]:.2f} s", limit, results["paint"][key]))
    rows += [
        ("server memory without a run", f"{results['memory without runs']:.0f} MB", "", 0.0),
        ("server memory at rest, run loaded", f"{results['memory at rest']:.0f} MB", "", 0.0),
        ("server memory, the most", f"{results['memory at most']:.0f} MB", "memory", results["memory at most"]),
        ("server CPU while the run grows, of one core", f"{100 * float(str(results['share'])):.0f} %", "", 0.0),
        ("new views that every viewer fetched", f"{results['views']}", "", 0.0),
        ("training, CPU per step, no viewer", f"{1e3 * statistics.median(alone):.2f} ms", "", 0.0),
        ("training, CPU per step, 20 viewers", f"{1e3 * statistics.median(watched):.2f} ms", "", 0.0),
        (f"median of {ROUNDS} ratios ({min(ratios):.2f} to {max(ratios):.2f})", f"{ratio:.3f}", "training", ratio),
    ]
    missed = 0
    units = {"data": " s", "paint": " s", "memory": " MB", "training": ""}
    for what, shown, limit, value in rows:
        met = not limit or float(str(value)) <= LIMITS[limit]
        missed += not met
        verdict = f"{LIMITS[limit]:g}{units[limit]} | {'met' if met else '**MISSED**'}" if limit else "|"
        lines.append(f"| {what} | {shown} | {verdict} |")
    return lines, missed


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        lines, missed = table(measure(Path(folder)))
    print("\n".join(lines))
    publish(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
