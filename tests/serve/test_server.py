"""The server under clients that send nothing, too slowly, or nonsense."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("uvicorn", reason='the server needs pip install "equilibria[serve]"')

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from equilibria.errors import EquilibriaError
from equilibria.serve import server

HEADER_SECONDS = 0.4


class _Answering:
    """An application that answers every request at once."""

    def __init__(self):
        self.asgi = Starlette(routes=[Route("/", lambda _: PlainTextResponse("here"))])

    def close(self):
        pass


@pytest.fixture
def address(monkeypatch):
    """Host and port of a server in a thread; it stops with the process."""
    monkeypatch.setattr(server, "_HEADER_SECONDS", HEADER_SECONDS)
    monkeypatch.setattr(server.os, "nice", lambda _: None)
    listening, started = server.bind("127.0.0.1", 0), threading.Event()
    run = {"on_start": lambda _: started.set(), "browser": False}
    threading.Thread(target=server.run, args=(_Answering(), listening), kwargs=run, daemon=True).start()
    assert started.wait(20)
    return listening.getsockname()


def _closed(client):
    """Whether the server has closed the connection; waits for it."""
    client.settimeout(20)
    try:
        while client.recv(1024):
            pass
    except ConnectionError:
        pass
    return True


def test_silent_connections_are_closed(address):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(50)]
        assert all(_closed(client) for client in clients)


def test_a_header_that_arrives_letter_by_letter_is_cut_off(address):
    with socket.create_connection(address) as client:
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() < begun + 20:
                client.sendall(b"G")
                time.sleep(HEADER_SECONDS / 8)


def test_a_second_header_on_the_same_connection_has_the_same_time(address):
    with socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.settimeout(20)
        received = b""
        while not received.endswith(b"here"):
            received += client.recv(1024)
        client.sendall(b"GET ")
        assert _closed(client)


def test_a_complete_request_is_not_timed(address):
    """The clock stops with the header: event streams stay open."""
    with socket.create_connection(address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(2 * HEADER_SECONDS)
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.settimeout(20)
        received = b""
        while received.count(b"here") < 2:
            part = client.recv(1024)
            assert part
            received += part


@pytest.mark.parametrize("host", ["a" * 70, "a..b", "☃" * 70])
def test_impossible_host_names_are_one_sentence(host):
    with pytest.raises(EquilibriaError, match="expected an address of this machine"):
        server.bind(host, 0)
