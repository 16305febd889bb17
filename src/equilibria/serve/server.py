"""Run the server until Ctrl-C, which stops it at once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from typing import TYPE_CHECKING

from equilibria.errors import EquilibriaError

if TYPE_CHECKING:
    from equilibria.serve.app import App

_HEADER_SECONDS = 10  # from the first byte of a request's header to its last, and from connecting to the first byte
_NICENESS = 5  # training on the same cores goes first


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        EquilibriaError: if the port is taken, or the address is not one of this machine's.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty, too long, or no name at all
        reason = getattr(error, "strerror", None) or error
        raise EquilibriaError(f"got --host {host[:80]!r}; expected an address of this machine: {reason}") from error
    try:
        if sys.platform != "win32":  # where it would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise EquilibriaError(
                f"port {port} is taken, perhaps by another `equilibria serve`; choose another with --port {port + 1}, "
                "or --port 0 for any that is free"
            ) from error
        if error.errno == errno.EACCES:
            raise EquilibriaError(
                f"port {port} needs rights that this user does not have; choose 1024 or above"
            ) from error
        raise EquilibriaError(
            f"got --host {host}; expected an address of this machine, such as 127.0.0.1: {error.strerror}"
        ) from error
    return listening


def run(app: App, listening: socket.socket, *, on_start: Callable[[str], None], browser: bool) -> None:
    """Serve until Ctrl-C.

    Args:
        app: the application.
        listening: from `bind`.
        on_start: called with the server's address once it answers requests.
        browser: whether to open a browser.
    """
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        """Closes a connection whose request header is not complete within `_HEADER_SECONDS`.

        uvicorn waits for it forever: each silent socket would hold a descriptor until there are none left.
        """

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_header()

        def _await_header(self) -> None:
            """Start the clock at the first byte of a header, and stop it at the last."""
            is_waiting = self.conn.their_state is h11.IDLE
            if is_waiting and self._deadline is None:
                self._deadline = self.loop.call_later(_HEADER_SECONDS, self.transport.close)
            elif not is_waiting and self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            on_start(server_url(listening))
            if browser:
                threading.Thread(target=webbrowser.open, args=(server_url(listening),), daemon=True).start()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.close()  # or the shutdown would wait for the streams to end
            await super().shutdown(sockets=sockets)

    with contextlib.suppress(AttributeError, OSError):  # Windows has no os.nice
        os.nice(_NICENESS)
    config = uvicorn.Config(
        app.asgi,
        http=TimedProtocol,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])


def server_url(listening: socket.socket) -> str:
    """The address to type into a browser."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
