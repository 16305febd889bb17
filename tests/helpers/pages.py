"""What every page is checked for: nothing from elsewhere, only its own scripts, strict JSON, elements that close."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

EVIL = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\"'&%{x}$data"
_VOID = {"meta", "input", "wbr"}


class Reader(HTMLParser):
    """Elements, their attributes, and the text inside each kind of element."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))


def read_page(page: str) -> Reader:
    """The elements of a page, all of which are closed."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def words_of(page: str) -> str:
    """What a person reads, without styles and scripts; spaces that keep words together are plain ones again."""
    shown = "".join(text for tag, text in read_page(page).text if tag not in {"script", "style"})
    return re.sub(r"\s+", " ", shown)


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
