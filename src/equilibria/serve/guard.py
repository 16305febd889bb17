"""What every answer has to pass: only reading, only for names of this server, nothing from elsewhere."""

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
    """Refuses foreign Host headers, what pages of other sites ask for, and all but GET and HEAD; keeps pages at home.

    A page of another site could have its own name point at this machine and then read what is served here: the Host
    header gives it away. It could also ask without reading, to keep the server busy: Sec-Fetch-Site gives that away.

    Args:
        app: what answers.
        hosts: names under which this server may be called.
        any_address: also by any IP address: for a server that listens on all of them.
    """

    def __init__(self, app: ASGIApp, *, hosts: Iterable[str] = LOOPBACK, any_address: bool = False) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        host = host_name(headers.get("host", ""))
        if host not in self._hosts and not (self._any_address and _is_address(host)):
            names = ", ".join(sorted(self._hosts))
            said = (
                f"This server does not answer to the name {headers.get('host', '')!r}; it is reached as: "
                f"{names} (--host adds a name).\n"
            )
            return PlainTextResponse(said, status_code=403)
        if headers.get("sec-fetch-site") == "cross-site" and not _opens_a_page(scope["path"], headers):
            said = "A page of another site asked for this; only the pages of this server may.\n"
            return PlainTextResponse(said, status_code=403)
        if scope["method"] not in ("GET", "HEAD"):
            said = f"This server only shows: {scope['method']} is not answered, GET and HEAD are.\n"
            return PlainTextResponse(said, status_code=405, headers={"allow": "GET, HEAD"})
        return None


def host_name(header: str) -> str:
    """The name in a Host header, without its port; empty if it is not one.

    Example:
        >>> host_name("Localhost:8000"), host_name("[::1]:8000"), host_name("[::1]evil.example")
        ('localhost', '::1', '')
    """
    found = _HOST.fullmatch(header.strip().lower())
    return (found["address"] or found["name"]) if found else ""


def _opens_a_page(path: str, headers: Headers) -> bool:
    """Whether somebody follows a link to a page, and not to what its script fetches, which may take long."""
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_link and not path.endswith("/view")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
