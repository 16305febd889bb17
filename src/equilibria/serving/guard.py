"""What every answer has to pass: only reading, only for names of this server, nothing from elsewhere."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """Refuses foreign Host headers and everything but GET and HEAD, and adds the headers that keep a page at home.

    A page of another site could have its own name point at this machine and then read what is served here: the Host
    header gives it away.

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
        host = host_name(Headers(scope=scope).get("host", ""))
        if host not in self._hosts and not (self._any_address and _is_address(host)):
            names = ", ".join(sorted(self._hosts))
            said = (
                f"This server does not answer to the name {host!r}; it is reached as: {names} (--host adds a name).\n"
            )
            return PlainTextResponse(said, status_code=403)
        if scope["method"] not in ("GET", "HEAD"):
            said = f"This server only shows: {scope['method']} is not answered, GET and HEAD are.\n"
            return PlainTextResponse(said, status_code=405, headers={"allow": "GET, HEAD"})
        return None


def host_name(header: str) -> str:
    """The name in a Host header, without its port.

    Example:
        >>> host_name("Localhost:8000"), host_name("[::1]:8000"), host_name("")
        ('localhost', '::1', '')
    """
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
