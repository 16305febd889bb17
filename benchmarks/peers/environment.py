"""An environment of their own for the peers: build/peers-venv, with the versions of requirements.lock where those go.

Every peer is one call of pip; one that fails is kept as a failure and shown, the others go on without it.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "peers-venv"
PYTHON = FOLDER / "bin" / "python"
_OUTCOMES = FOLDER / "peers.json"
_LOCK = ROOT / "requirements.lock"
_OURS = ("numpy", "scipy", "numba", "pyarrow", "rich", "plotly", "scikit-learn", "threadpoolctl", "click")


@dataclass(frozen=True)
class Peer:
    """A tool, and how pip gets it.

    Attributes:
        name: as people call it.
        package: its name on the index.
        arguments: of pip beside the name.
    """

    name: str
    package: str
    arguments: tuple[str, ...] = ()

    @property
    def requests(self) -> tuple[str, ...]:
        """What follows ``pip install``."""
        return (*self.arguments, self.package)


PEERS = (
    Peer("cockpit", "cockpit-for-pytorch", ("setuptools<81",)),  # imports pkg_resources, which newer ones lack
    Peer("PyHessian", "pyhessian", ("--no-deps",)),  # asks for torchvision, for its examples
    Peer("curvlinops", "curvlinops-for-pytorch"),
    Peer("hessian-eigenthings", "hessian-eigenthings", ("--pre",)),
    Peer("AdamP", "adamp"),
    Peer("pytorch_optimizer", "pytorch_optimizer"),
    Peer("wandb", "wandb"),
    Peer("composer", "mosaicml>=0.32"),  # left to itself pip goes back to a version of 2021
)


@dataclass(frozen=True)
class Outcome:
    """What pip said: the version that is installed, or the line that says why there is none."""

    peer: str
    command: str
    version: str | None
    failure: str | None


def make() -> list[Outcome]:
    """Install what is not there yet; a second call does nothing."""
    if not _OUTCOMES.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True)
        # torch comes first and pinned: a later, unpinned request for it would bring in another build.
        _pip(next(line for line in _LOCK.read_text().splitlines() if line.startswith("torch==")))
        _pip("--constraint", str(_constraints()), *_OURS)
        outcomes = [_install(peer) for peer in PEERS]
        _OUTCOMES.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return read()


def read() -> list[Outcome]:
    """What was installed, and what was not."""
    return [Outcome(**each) for each in json.loads(_OUTCOMES.read_text())]


def _constraints() -> Path:
    """Our locked versions: what runs beside the peers is what is tested."""
    file = FOLDER / "constraints.txt"
    file.write_text(_LOCK.read_text())
    return file


def _pip(*arguments: str) -> None:
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _install(peer: Peer) -> Outcome:
    shown = " ".join(
        ["pip install", *(f'"{request}"' if set("<>") & set(request) else request for request in peer.requests)]
    )
    print(shown, flush=True)
    before = _versions()
    try:
        _pip("--constraint", str(_constraints()), *peer.requests)
    except subprocess.CalledProcessError as error:
        return Outcome(peer.name, shown, None, _reason(error.stdout + error.stderr))
    changed = {name for name, version in _versions().items() if before.get(name, version) != version}
    assert not changed & {"torch", "numpy", "scipy"}, f"{peer.name} replaced {changed}"
    return Outcome(peer.name, shown, _versions()[_normal(peer.package)], None)


def _reason(output: str) -> str:
    """What pip says of the cause: the two requests that contradict each other, or its first error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "The conflict is caused by:" in lines:
        first = lines.index("The conflict is caused by:") + 1
        return "; ".join(lines[first : first + 2])
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[0]


def _versions() -> dict[str, str]:
    places = [str(place) for place in FOLDER.glob("lib/python*/site-packages")]
    return dict(_named(importlib.metadata.distributions(path=places)))


def _named(found: object) -> Iterator[tuple[str, str]]:
    for each in found:  # type: ignore[attr-defined]
        yield _normal(each.metadata["Name"]), each.version


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
