"""Write the two lock files from what is installed: for development, and for `make demo` the part that it needs."""

from __future__ import annotations

from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINUX_ONLY = ("triton",)
DEMO = ("equilibria[fast]", "scikit-learn", "hatchling", "editables")  # the last two install the checkout itself


def needed(requirement: Requirement, seen: set[tuple[str, str]]) -> None:
    """Add the names that a requirement brings with it, once per extra."""
    name = canonicalize_name(requirement.name)
    for extra in {"", *requirement.extras}:
        if (name, extra) not in seen:
            seen.add((name, extra))
            for text in distribution(name).requires or []:
                below = Requirement(text)
                if below.marker is None or below.marker.evaluate({"extra": extra}):
                    needed(below, seen)


def main() -> None:
    """Both files, sorted by name, without this package itself."""
    versions = {canonicalize_name(found.name): f"{found.name}=={found.version}" for found in distributions()}
    pinned = {
        name: line.partition("+")[0] + ('; sys_platform == "linux"' if name in LINUX_ONLY else "")
        for name, line in versions.items()
        if name not in {"equilibria", "pip", "setuptools"}
    }
    demo: set[tuple[str, str]] = set()
    for root in DEMO:
        needed(Requirement(root), demo)
    wanted = {name for name, _ in demo} & pinned.keys()
    for file, names in (("requirements.lock", pinned.keys()), ("requirements-demo.lock", wanted)):
        (ROOT / file).write_text("".join(f"{pinned[name]}\n" for name in sorted(names)))


if __name__ == "__main__":
    main()
