"""Run the server until Ctrl-C, which ends it at once."""

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

_NICENESS = 5  # a training on the same cores goes first


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        EquilibriaError: the port is taken, or the address is not one of this machine's.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
    except OSError as error:
        raise EquilibriaError(f"got --host {host}; expected an address of this machine: {error.strerror}") from error
    try:
        if sys.platform != "win32":  # there it would let two servers share a port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise EquilibriaError(
                f"port {port} is taken, perhaps by another `equilibria serve`; choose another with --port {port + 1}, "
                "or --port 0 for any that is free"
            ) from error
        if error.errno == errno.EACCES:
            raise EquilibriaError(
                f"port {port} needs rights that this user does not have; choose one from 1024"
            ) from error
        raise EquilibriaError(
            f"got --host {host}; expected an address of this machine, such as 127.0.0.1: {error.strerror}"
        ) from error
    return found


def run(app: App, listening: socket.socket, *, tell: Callable[[str], None], browser: bool) -> None:
    """Serve until Ctrl-C.

    Args:
        app: what answers.
        listening: from `bind`.
        tell: told the address once requests are answered.
        browser: whether to open it.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            tell(address(listening))
            if browser:
                threading.Thread(target=webbrowser.open, args=(address(listening),), daemon=True).start()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.close()  # ends the streams and the waiting, which would be waited for
            await super().shutdown(sockets=sockets)

    with contextlib.suppress(AttributeError, OSError):  # Windows has no such thing
        os.nice(_NICENESS)
    config = uvicorn.Config(
        app.asgi, log_level="warning", access_log=False, timeout_graceful_shutdown=1, server_header=False
    )
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])


def address(listening: socket.socket) -> str:
    """The address to type."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
