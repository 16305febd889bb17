"""Writes the outputs in docs/transformer-in-five-minutes.md: runs its examples and shows what they print.

`make docs-generated` runs it (half a minute of CPU time). Words and last digits differ between machines, so that no
test compares them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

PAGE = Path(__file__).parent / "transformer-in-five-minutes.md"
EXAMPLE = re.compile(r"(?P<code>```python\n(?P<source>.*?)```\n\n)```text\n.*?```", flags=re.DOTALL)


def main() -> None:
    """Run the examples in order, in one namespace, and write what each prints behind it."""
    os.environ["COLUMNS"] = "100"
    world: dict[str, object] = {"__name__": "page"}

    def with_output(example: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example["source"], PAGE.name, "exec"), world)
        lines = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
        return f"{example['code']}```text\n{chr(10).join(lines)}\n```"

    PAGE.write_text(EXAMPLE.sub(with_output, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
