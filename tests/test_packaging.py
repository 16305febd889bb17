"""The wheel and the sdist: what they hold, and that what is installed from them works in another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WATCHED = """
import torch, equilibria
from torch import nn
net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with equilibria.watch(net, optimizer, every=1, log_dir="run") as run:
    net(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
print(equilibria.__file__)
print(run.samples().num_rows)
"""


def _build(kind: str, into: Path, source: Path = ROOT) -> Path:
    """By the build backend itself, as pip would."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = into.iterdir()
    return built


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _run(*command: str, folder: Path, **more: str) -> str:
    """With nothing of this checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=folder, env={**clean, "COLUMNS": "100", **more}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return _build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_its_types_and_its_pages_and_nothing_else(wheel):
    names = _names(wheel)
    assert "equilibria/py.typed" in names
    package = ROOT / "src"
    wanted = {
        str(file.relative_to(package))
        for file in package.rglob("*")
        if file.suffix in {".py", ".typed", ".html", ".css", ".js"} and "__pycache__" not in file.parts
    }
    assert any(name.endswith(".js") for name in wanted)
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == wanted


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_metadata_say_which_python_and_what_the_extras_are(wheel):
    metadata = _metadata(wheel)
    assert metadata["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    named = {each.rsplit(" ", 1)[1] for each in metadata.get_all("Classifier") if "Python :: 3." in each}
    assert named == {"3.11", "3.12", "3.13"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel alone; what it needs comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_installed_wheel_works_in_another_folder(installed, tmp_path):
    command, path = str(installed / "bin" / "equilibria"), {"PYTHONPATH": str(installed)}
    assert _run(command, "--version", folder=tmp_path, **path).startswith("equilibria, version ")
    schedule = ["--optimizer", "sgd", "--lr", "0.1", "--wd", "5e-4", "--steps", "1000", "--html", "plan.html"]
    planned = _run(command, "plan", *schedule, folder=tmp_path, **path)
    assert "rad" in planned
    assert "<html" in (tmp_path / "plan.html").read_text()
    where, rows = _run(sys.executable, "-c", WATCHED, folder=tmp_path, **path).split()
    assert Path(where).is_relative_to(installed)
    assert int(rows) == 2
    assert "rad/step" in _run(command, "report", "run", folder=tmp_path, **path)


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel, tmp_path):
    sdist = _build("sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    held = {file.name for file in source.iterdir()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src"} <= held
    assert not {"results", "tests"} & held  # the tests need the results
    again = _build("wheel", tmp_path / "again", source)
    assert _names(again) == _names(wheel)


def _completed(line: str, folder: Path) -> list[str]:
    """What the shell is offered for the last word of a line."""
    asked = {"_EQUILIBRIA_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    here = {"PYTHONPATH": str(ROOT / "src")}
    offered = _run(sys.executable, "-m", "equilibria", folder=folder, **asked, **here)
    return [each.split(",", 1)[1] for each in offered.splitlines()]


def test_the_shell_completes_commands_and_options(tmp_path):
    assert _completed("equilibria pl", tmp_path) == ["plan"]
    assert "--momentum" in _completed("equilibria plan --mo", tmp_path)
