"""The answers of the server: which requests it answers, with what, and with which errors."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("starlette", reason='the server needs pip install "equilibria[serve]"')
pytest.importorskip("httpx", reason="the test client of starlette needs httpx")

from starlette.testclient import TestClient
from tests.helpers.report_helpers import layer_names
from tests.helpers.report_helpers import run as made_up_run
from tests.helpers.served import columns, events, serving, write_damaged, write_run

from equilibria.cli.serve import build_app, missing_folders, read_plan
from equilibria.errors import EquilibriaError
from equilibria.planning import plan
from equilibria.records import RecordWriter
from equilibria.serve import hub as hubs
from equilibria.serve.catalogue import Catalogue
from equilibria.serve.server import bind, server_url
from equilibria.theory import SGD

PLAN = {"optimizer": "sgd", "lr": "0.1", "wd": "5e-3", "momentum": "0.9", "steps": "2000"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "good", 3, outlier=1)
    write_run(folder / "deep" / "er" / "other", 2)
    write_damaged(folder / "bad")
    (folder / "secret.txt").write_text("not for anybody")
    return folder


@pytest.fixture(scope="module")
def client(folder):
    with TestClient(build_app((folder,), results=folder / "none").asgi, base_url="http://localhost:8000") as client:
        yield client


@pytest.fixture(scope="module")
def numbers(client):
    return {run["name"]: run["id"] for run in client.get("/runs").json()["runs"]}


PAGES = ("/", "/runs", "/compare", "/compare/view", "/plan", "/gallery", "/run/1", "/run/1/view", "/run/1/forecast")


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_answered_and_loads_nothing_from_elsewhere(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert re.findall(r"https?:", policy) == []
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", answer.text)


@pytest.mark.parametrize("path", PAGES)
def test_head_is_answered_without_a_body(client, path):
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(client, method):
    answer = client.request(method, "/runs")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert method in answer.text


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:9", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.example:8000", 403),
        ("192.168.0.7", 403),
        ("", 403),
        ("[localhost]evil.example", 403),
        ("[::1]evil.example", 403),
        ("[localhost]", 403),
        ("localhost:8731@evil.example", 403),
        ("localhost:evil", 403),
        ("localhost:", 403),
        ("localhost:80:80", 403),
    ],
)
def test_only_names_of_this_server_are_answered(client, host, code):
    answer = client.get("/runs", headers={"host": host})
    assert answer.status_code == code
    assert code == 200 or "does not answer to the name" in answer.text


LINK = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/runs", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}, 403),
        ("/plan", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}, 403),
        ("/run/1/view", {"sec-fetch-site": "cross-site"} | LINK, 403),
        ("/run/1", {"sec-fetch-site": "cross-site"} | LINK, 200),
        ("/run/1/view", {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ("/run/1/view", {"sec-fetch-site": "none"} | LINK, 200),
    ],
)
def test_a_page_of_another_site_can_link_here_and_request_nothing(client, path, headers, code):
    answer = client.get(path, headers=headers)
    assert answer.status_code == code
    assert code == 200 or "A page of another site" in answer.text


@pytest.mark.parametrize(
    ("option", "host", "code"),
    [("box.lan", "box.lan", 200), ("box.lan", "other.lan", 403), ("0.0.0.0", "10.1.2.3", 200), ("0.0.0.0", "a.b", 403)],
)
def test_the_host_option_adds_a_name(folder, option, host, code):
    client = TestClient(build_app((folder,), host=option).asgi)
    assert client.get("/plan", headers={"host": host}).status_code == code


@pytest.mark.parametrize(
    "path",
    [
        "/run/99",
        "/run/-1",
        "/run/a",
        "/run/1/../../secret.txt",
        "/run/%2e%2e%2fsecret.txt",
        "/secret.txt",
        "/asset/x/page.py",
        "/asset/x/..%2fserver.py",
        "/asset/wrong/plotly.js",
        "/gallery/secret.txt",
        "/run/99999999999999999999",
        "/run/" + 5000 * "9",
    ],
)
def test_there_is_no_way_to_a_file(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert "not for anybody" not in answer.text
    assert answer.text.strip().endswith((".", "/."))


def test_assets_are_sent_once(client):
    page = client.get("/run/1").text
    scripts = re.findall(r'(?:src|href)="(/asset/[^"]+)"', page)
    assert any(path.endswith("plotly.js") for path in scripts)
    for path in scripts:
        answer = client.get(path)
        assert "immutable" in answer.headers["cache-control"]
        again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_the_list_has_states_and_findings(client, numbers):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        runs = {run["name"]: run for run in client.get("/runs").json()["runs"]}
        if all(run["headline"] is not None for run in runs.values()):
            break
        time.sleep(0.05)
    assert set(runs) == {"good", "bad", "deep/er/other"}
    assert runs["good"]["state"] == "finished"
    assert (runs["good"]["steps"], runs["good"]["samples"]) == (2991, 900)
    assert runs["good"]["severity"] == "note"
    assert runs["bad"]["state"] == "damaged"
    assert "not the description of a run" in runs["bad"]["message"]


def test_the_length_of_a_run_is_the_one_recorded_at_its_end(tmp_path):
    """The last sample comes some steps before it."""
    samples, metadata = made_up_run(1, steps=60, every=10)
    writer = RecordWriter(tmp_path / "a", metadata={**metadata, "steps_per_epoch": None})
    writer.append(columns(samples))
    writer.close(metadata={"steps": 58})
    with TestClient(build_app((tmp_path,)).asgi, base_url="http://localhost") as client:
        assert "58 steps" in re.sub(r"<[^>]*>", "", client.get("/run/1/view").json()["inside"])
        assert client.get("/runs").json()["runs"][0]["steps"] == 58


def test_a_view_is_the_report_and_is_sent_once(client, numbers):
    answer = client.get(f"/run/{numbers['good']}/view")
    view = answer.json()
    assert len(view["data"]["layers"]) == 3
    assert 'id="angle-chart"' in view["inside"]
    assert "<script" not in view["inside"]
    assert (
        client.get(f"/run/{numbers['good']}/view", headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    )


def test_a_bad_run_shows_a_message(client, numbers):
    assert "not the description" in client.get(f"/run/{numbers['bad']}/view").json()["damaged"]
    answer = client.get(f"/run/{numbers['bad']}/forecast/view?steps=9000")
    assert answer.status_code == 400
    assert "not the description" in answer.json()["error"]


# ---- plans, forecasts, comparisons


def test_a_plan_is_computed_by_the_planner(client):
    view = client.get("/plan/view", params=PLAN | {"schedule": "step", "milestones": "1000", "factor": "0.1"}).json()
    expected = plan(SGD(0.1, 5e-3, momentum=0.9), lambda step: 0.1 if step < 1000 else 0.01, steps=2000)
    assert view["data"]["angle"][0] == pytest.approx(expected.curve.angle[0], rel=1e-5)
    assert view["data"]["angle"][-1] == pytest.approx(expected.curve.angle[-1], rel=1e-5)
    assert expected.findings[0].evidence.split(":")[0][-20:] in view["inside"]
    assert view["command"].startswith("equilibria plan --optimizer sgd --lr 0.1")
    assert view["data"]["alternatives"] == []


def test_alternatives_come_on_request(client):
    query = PLAN | {"schedule": "step", "milestones": "1000", "alternatives": "1"}
    assert [
        alternative["name"] for alternative in client.get("/plan/view", params=query).json()["data"]["alternatives"]
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": "fast"}, "finite number"),
        ({"lr": "nan"}, "finite number"),
        ({"optimizer": "sdg"}, "expected one of: sgd"),
        ({"momentum": "1.5"}, "momentum"),
        ({"schedule": "step"}, "milestones"),
        ({"steps": "1e12"}, "steps"),
        ({"betas": "0.9,0.99"}, "expected it only with"),
        ({"steps": "1000001"}, "at most 1,000,000 on this page (equilibria plan in a terminal"),
        ({"schedule": "file"}, "expected one of: constant"),
        ({"html": "/tmp/x.html"}, "expected only"),
        ({"lr_file": "/etc/passwd"}, "expected only"),
        ({"colour": "red"}, "expected only"),
        ({"schedule": "bogus"}, "wsd."),
        ({"schedule": "constant", "end_lr": "1"}, "end_lr with schedule constant"),
        ({"lr": "1e308", "wd": "1e3"}, "lr"),
        ({"wd": "0"}, "init_norm"),
    ],
)
def test_an_impossible_plan_is_answered_with_a_sentence(client, change, words):
    answer = client.get("/plan/view", params=PLAN | change)
    assert answer.status_code == 400
    message = answer.json()["error"]
    assert words in message
    assert "--" not in message
    assert message.endswith(".")


def test_a_name_twice_in_a_query_is_an_error(client):
    answer = client.get("/plan/view?lr=1&lr=2")
    assert (answer.status_code, answer.json()["error"]) == (400, "got lr more than once; expected it once.")


def test_a_forecast_has_alternatives(client, numbers):
    answer = client.get(f"/run/{numbers['good']}/forecast/view?steps=6000&schedule=step&milestones=4000")
    assert answer.status_code == 200
    assert [scenario["name"] for scenario in answer.json()["data"]["scenarios"]] == [
        "as planned",
        "rescaled",
        "wd x2",
        "wd x0.5",
    ]


def test_a_forecast_has_the_warm_up_of_the_schedule(client, numbers):
    assert 'name="warmup"' in client.get(f"/run/{numbers['good']}/forecast").text
    query = "steps=6000&schedule=cosine&lr=0.1&warmup=500"
    answer = client.get(f"/run/{numbers['good']}/forecast/view?{query}").json()
    (schedule, *_) = answer["data"]["scenarios"][0]["schedules"]
    for epoch, lr in zip(schedule["x"], schedule["lr"], strict=True):
        step = 6000 * epoch / answer["data"]["end"]
        assert lr == pytest.approx(0.05 * (1 + math.cos(math.pi * (step - 500) / 5500)), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("steps=100", "steps left to forecast"),
        ("steps=6000&suggest=magic", "expected one of"),
        ("steps=1e7", "at most 1,000,000 on this page"),
        ("steps=6000&wd=lots", "weight decay"),
        ("", "steps"),
    ],
)
def test_an_impossible_forecast_is_answered_with_a_sentence(client, numbers, query, words):
    answer = client.get(f"/run/{numbers['good']}/forecast/view?{query}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_too_few_samples_for_a_forecast_are_an_error(tmp_path):
    write_run(tmp_path / "short", 1, steps=60)
    with TestClient(build_app((tmp_path,)).asgi, base_url="http://localhost") as client:
        answer = client.get("/run/1/forecast/view?steps=6000")
        assert answer.status_code == 400
        assert "6 samples, 3 of them in the second half" in answer.json()["error"]


def test_a_comparison_has_the_logged_numbers_of_every_run(tmp_path):
    write_run(tmp_path / "a", 1, steps=600)
    write_run(tmp_path / "b", 1, steps=600)
    names = ["loss", "<b>", "loss", "accuracy"]
    with RecordWriter(tmp_path / "b", metadata={}, resume=True) as writer:
        writer.append({"step": [0, 0, 1, 1], "name": names, "value": [20.0, 1.0, 1.0, float("nan")]}, table="metrics")
    with TestClient(build_app((tmp_path,)).asgi, base_url="http://localhost") as client:
        first, second = client.get("/compare/view", params=[("run", 1), ("run", 2)]).json()["runs"]
    assert first["metrics"] == []
    assert [metric["name"] for metric in second["metrics"]] == ["loss", "<b>", "accuracy"]
    loss, _, accuracy = second["metrics"]
    assert (loss["x"], loss["y"], loss["log"]) == ([0.0, 1.0], [20.0, 1.0], True)
    assert accuracy["y"] == [None]


def test_a_comparison_has_the_layer_of_every_run(client, numbers):
    chosen = [("run", numbers["good"]), ("run", numbers["deep/er/other"])]
    comparison = client.get("/compare/view", params=chosen).json()
    assert comparison["layer"] == "layer1.0.conv1.weight"  # of the outlier in one of them
    assert comparison["layers"][:2] == ["conv1.weight", "layer1.0.conv1.weight"]  # those that both have come first
    assert [run["name"] for run in comparison["runs"]] == ["good", "deep/er/other"]
    for run in comparison["runs"]:
        ratio = [angle / equilibrium for angle, equilibrium in zip(run["angle"], run["angle_equilibrium"], strict=True)]
        assert run["ratio"] == pytest.approx(ratio, rel=1e-3)


def test_a_comparison_opens_on_the_layer_that_differs_most(tmp_path):
    for name, factor in (("a", 1.0), ("b", 1.7)):
        samples, metadata = made_up_run(4, steps=300, lawless=0)
        wanted = [row == layer_names(4)[2] for row in samples["param"].to_pylist()]
        first = [row == layer_names(4)[0] for row in samples["param"].to_pylist()]  # differs more, without a law
        angle = samples["angle"].to_numpy() * np.where(wanted, factor, np.where(first, factor**3, 1.0))
        samples = samples.set_column(samples.column_names.index("angle"), "angle", pa.array(angle))
        with RecordWriter(tmp_path / name, metadata=metadata) as writer:
            writer.append({column: samples[column].combine_chunks() for column in samples.column_names})
    with TestClient(build_app((tmp_path,)).asgi, base_url="http://localhost") as client:
        comparison = client.get("/compare/view?run=1&run=2").json()
        assert comparison["layer"] == layer_names(4)[2]
        assert client.get("/compare/view?run=1").json()["layer"] == layer_names(4)[1]  # the first with an equilibrium


def test_two_runs_are_explained(client, numbers):
    chosen = [("run", numbers["good"]), ("run", numbers["deep/er/other"])]
    answer = client.get("/compare/explain/view", params=chosen).json()
    assert (answer["a"], answer["b"]) == ("good", "deep/er/other")
    assert "times as far as B" in answer["headline"]
    assert '<section aria-labelledby="causes">' in answer["inside"]
    one = client.get("/compare/explain/view", params=chosen[:1])
    assert one.status_code == 400
    assert "expected two to explain" in one.json()["error"]


@pytest.mark.parametrize(
    "query", ["run=x", "run=77", "run=1&layer=none", "color=red", "&".join(f"run={n}" for n in range(9))]
)
def test_a_bad_comparison_is_answered_with_a_sentence(client, query):
    answer = client.get(f"/compare/view?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"].endswith(".")


def test_a_plan_is_read_as_on_the_command_line():
    query = read_plan(PLAN | {"nesterov": "1"})
    assert query.rule == SGD(0.1, 5e-3, momentum=0.9, nesterov=True)
    assert "--nesterov" in query.command


# ---- waiting


def request(path, *, leaves):
    """The scope of a request, and a receive function that waits until its viewer leaves."""
    headers = [(b"host", b"localhost")]
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": headers}

    async def receive():
        await leaves.wait()
        return {"type": "http.disconnect"}

    return scope | {"root_path": "", "http_version": "1.1", "scheme": "http"}, receive


@pytest.fixture
def blocked_planner(folder):
    """An app whose planner waits for a signal, and the learning rates it was called with."""
    app = build_app((folder,), results=folder / "none")
    signal, computed = threading.Event(), []

    def compute(query):
        computed.append(dict(query)["lr"])
        assert signal.wait(30)
        return b"{}"

    app._plan = compute
    yield app, signal, computed
    signal.set()


async def ask(app, path, *, leaves):
    sent = []

    async def send(message):
        sent.append(message)

    await app.asgi(*request(path, leaves=leaves), send)
    return sent[0]["status"]


def test_a_plan_is_not_computed_for_a_viewer_who_left(blocked_planner):
    app, signal, computed = blocked_planner

    async def visit():
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask(app, "/plan/view?lr=1", leaves=stays))
        while not computed:
            await asyncio.sleep(0.01)
        left = [asyncio.create_task(ask(app, f"/plan/view?lr={lr}", leaves=leaves)) for lr in (2, 3)]
        last = asyncio.create_task(ask(app, "/plan/view?lr=4", leaves=stays))
        await asyncio.sleep(0.05)
        leaves.set()
        await asyncio.gather(*left)
        page = await ask(app, "/gallery", leaves=stays)  # does not wait for plans
        signal.set()
        return page, await first, await last

    assert asyncio.run(asyncio.wait_for(visit(), 30)) == (200, 200, 200)
    assert computed == ["1", "4"]


def test_waiting_requests_are_answered_when_the_server_stops(blocked_planner):
    app, _, computed = blocked_planner

    async def visit():
        stays = asyncio.Event()
        waiting = [asyncio.create_task(ask(app, f"/plan/view?lr={lr}", leaves=stays)) for lr in (1, 2, 3)]
        while not computed:
            await asyncio.sleep(0.01)
        app.close()
        return [*await asyncio.gather(*waiting), await ask(app, "/runs", leaves=stays)]

    assert asyncio.run(asyncio.wait_for(visit(), 30)) == [503] * 4
    assert computed == ["1"]


# ---- the stream


def test_the_streams_announce_new_samples_and_new_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(hubs, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(hubs, "SCAN_SECONDS", 0.02)
    samples = write_run(tmp_path / "a", 1, steps=1000)

    async def watch():
        hub = hubs.Hub(Catalogue([tmp_path]))
        await hub.view(1)
        stream, listing = hub.run_events(1), hub.list_events()
        first = events(await anext(stream))[0]
        names = [[run["name"] for run in events(await anext(listing))[0][1]["runs"]]]
        with RecordWriter(tmp_path / "a", metadata={}, resume=True) as writer:
            later = columns(samples)
            writer.append(later | {"step": later["step"] + 1000})
            writer.flush()
            sent = [first]
            while sent[-1][1]["samples"] < 200 or sent[-1][1]["view"] == first[1]["view"]:
                sent += events(await anext(stream))
        write_run(tmp_path / "b", 1, steps=100)
        while "b" not in names[-1]:
            names += [[run["name"] for run in data["runs"]] for _, data in events(await anext(listing))]
        hub.close()
        return sent

    sent = asyncio.run(asyncio.wait_for(watch(), 60))
    assert {kind for kind, _ in sent} == {"status"}
    assert (sent[0][1]["state"], sent[0][1]["samples"]) == ("finished", 100)
    assert any(data["state"] == "training now" for _, data in sent)
    assert max(len(json.dumps(data)) for _, data in sent) < 300  # small, whatever the run is


def test_streams_end_when_the_server_stops(tmp_path):
    write_run(tmp_path / "a", 1, steps=100)

    async def watch():
        hub = hubs.Hub(Catalogue([tmp_path]))
        await hub.view(1)
        stream = hub.run_events(1)
        await anext(stream)
        hub.close()
        return [message async for message in stream]

    assert len(asyncio.run(asyncio.wait_for(watch(), 20))) <= 1


# ---- memory, and starting


def test_only_some_runs_stay_in_memory(tmp_path):
    for name in "abcd":
        write_run(tmp_path / name, 1, steps=200)
    catalogue = Catalogue([tmp_path], most_loaded=2)
    catalogue.scan()
    for number in catalogue.runs:
        catalogue.loaded(number).show()
    assert [run.is_loaded for run in catalogue.runs.values()] == [False, False, True, True]
    assert all(run.headline for run in catalogue.runs.values())
    assert catalogue.loaded(1).status.samples == 20


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    write_run(tmp_path / "outside", 1, steps=100)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    catalogue = Catalogue([tmp_path / "inside"])
    catalogue.scan()
    assert catalogue.runs == {}
    assert catalogue.empty == ("inside",)


def test_a_file_instead_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(EquilibriaError, match="which is a file"):
        Catalogue([tmp_path / "a"])


def test_a_missing_folder_is_reported_and_awaited(tmp_path):
    assert missing_folders((tmp_path, tmp_path / "later")) == [tmp_path / "later"]
    catalogue = Catalogue([tmp_path / "later"])
    catalogue.scan()
    assert catalogue.empty == ("later",)
    write_run(tmp_path / "later" / "a", 1, steps=100)
    catalogue.scan()
    assert [run.name for run in catalogue.runs.values()] == ["a"]


def test_a_taken_port_is_an_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(EquilibriaError, match=f"port {port} is taken.*--port {port + 1}"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(EquilibriaError, match="expected an address of this machine"):
        bind("192.0.2.1", 0)


def test_the_address_can_be_typed_into_a_browser():
    with bind("127.0.0.1", 0) as listening:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server_url(listening))


def test_a_missing_extra_is_an_error(tmp_path):
    code = (
        "import sys\nsys.modules['uvicorn'] = None\nsys.argv = ['equilibria', 'serve', '.']\n"
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
        "from equilibria.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'needs uvicorn: pip install "equilibria[serve]"' in done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_at_once_with_an_open_stream(tmp_path):
    import httpx

    write_run(tmp_path / "a", 1, steps=200)
    with serving(tmp_path) as base, httpx.stream("GET", f"{base}/run/1/events", timeout=30) as stream:
        next(stream.iter_bytes())
        began = time.monotonic()
    assert time.monotonic() - began < 15  # of which the interpreter takes some on a busy machine
