"""What every page is checked for: nothing from elsewhere, only its own scripts, strict JSON, elements that close."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

from tests.helpers.page_reader import read_page

EVIL = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\"'&%{x}$data"


def data_of(page: str) -> dict[str, Any]:
    """The data of a page, which are strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    (content,) = re.findall(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(content, parse_constant=refuse)


def check_nothing_is_loaded(page: str, *, style: str) -> None:
    """Raise if a page could load anything; ``style`` is a part of its style sheet."""
    reader = read_page(page)
    for tag, attributes in reader.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form", "a"}
        assert not {"src", "href", "srcset", "action", "style", "data"} & set(attributes)
        assert not any(key.startswith("on") for key in attributes)
    styles = "".join(text for tag, text in reader.text if tag == "style")
    assert style in styles
    assert not re.search(r"url\(|@import|@font-face|//", styles)


def check_policy(page: str) -> None:
    """Raise unless the content security policy allows exactly the two scripts of the page."""
    policy = next(a["content"] for _, a in read_page(page).elements if a.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert len(scripts) == 2
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests
    assert policy.startswith("default-src 'none';")
