"""Checks on every request: reading only, only under names of this server, and not for pages of other sites."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/\s]+))(?::[0-9]{1,5})?", re.ASCII)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Guard:
    """Rejects foreign Host headers, requests by pages of other sites, and methods other than GET and HEAD.

    A page of another site could have its own name point at this machine and then read the runs: the Host header
    reveals it. It could also send requests without reading the answers, to keep the server busy: Sec-Fetch-Site reveals
    that. A Content-Security-Policy keeps the pages of this server from loading anything from elsewhere.

    Args:
        app: the application to protect.
        hosts: names under which browsers may call this server.
        any_address: also by any IP address, for a server that listens on all of them.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] = LOOPBACK, any_address: bool = False) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._rejection(scope) or self._app)(scope, receive, send_with_headers)

    def _rejection(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        host = host_name(headers.get("host", ""))
        if host not in self._hosts and not (self._any_address and _is_address(host)):
            names = ", ".join(sorted(self._hosts))
            message = (
                f"This server does not answer to the name {headers.get('host', '')!r}; its names are: {names} "
                "(--host adds one).\n"
            )
            return PlainTextResponse(message, status_code=403)
        if headers.get("sec-fetch-site") == "cross-site" and not _opens_a_page(scope["path"], headers):
            message = "A page of another site sent this request; only the pages of this server may.\n"
            return PlainTextResponse(message, status_code=403)
        if scope["method"] not in ("GET", "HEAD"):
            message = f"This server is read-only: got {scope['method']}; expected GET or HEAD.\n"
            return PlainTextResponse(message, status_code=405, headers={"allow": "GET, HEAD"})
        return None


def host_name(header: str) -> str:
    """The name in a Host header, without its port; empty if it is not one.

    Example:
        >>> host_name("Localhost:8000"), host_name("[::1]:8000"), host_name("[::1]evil.example")
        ('localhost', '::1', '')
    """
    match = _HOST.fullmatch(header.strip().lower())
    return (match["address"] or match["name"]) if match else ""


def _opens_a_page(path: str, headers: Headers) -> bool:
    """Whether a person follows a link to a page, and not to the data that its script fetches, which may take long."""
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_link and not path.endswith("/view")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
