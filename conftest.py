"""What collecting doctests leaves alone: whole frameworks, and a script that is only type-checked."""

from __future__ import annotations

collect_ignore = [
    *(f"src/equilibria/integrations/{name}.py" for name in ("lightning", "transformers")),
    "tests/typing/user_script.py",
]
