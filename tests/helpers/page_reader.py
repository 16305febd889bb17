"""Read a page as a browser would: its elements, their attributes and the text between them."""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser

WITHOUT_END = {"meta", "input", "wbr"}


class PageReader(HTMLParser):
    """Elements, their attributes, and the text inside each kind of element."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))


@functools.cache  # megabytes each
def read_page(page: str) -> PageReader:
    reader = PageReader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def words(page: str) -> str:
    """What a person reads, without styles and scripts; spaces that keep words together are plain ones again."""
    shown = "".join(text for tag, text in read_page(page).text if tag not in {"script", "style"})
    return re.sub(r"\s+", " ", shown)
