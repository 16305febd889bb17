"""Run the server until Ctrl-C, which stops it at once."""

from __future__ import annotations

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

_NICENESS = 5  # training on the same cores goes first


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        EquilibriaError: if the port is taken, or the address is not one of this machine's.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
    except OSError as error:
        raise EquilibriaError(f"got --host {host}; expected an address of this machine: {error.strerror}") from error
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
    import uvicorn

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
        app.asgi, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])


def server_url(listening: socket.socket) -> str:
    """The address to type into a browser."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
