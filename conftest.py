"""What collecting doctests leaves alone: modules that import a whole framework, and have no doctest."""

from __future__ import annotations

collect_ignore = [f"src/equilibria/integrations/{name}.py" for name in ("lightning", "transformers")]
