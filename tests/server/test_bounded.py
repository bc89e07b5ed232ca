"""Connections that ask nothing, or do not listen, against a real socket: each is closed in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from chatkv.server.bounded import bounded
from engines import eventually


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with as many bytes as the path says."""
    body = b"x" * int(scope["path"].strip("/") or 0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for start in range(0, len(body), 1 << 16):
        more = {"type": "http.response.body", "body": body[start : start + (1 << 16)]}
        await send(more | {"more_body": True})
    await send({"type": "http.response.body", "body": b"ok"})


class Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        pass


@contextmanager
def serving(**limits: Any) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=bounded(**limits), log_level="error", lifespan="off")
    server = Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        eventually(lambda: server.started)
        yield listener.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()


def is_closed(connection: socket.socket, within_s: float = 5.0) -> bool:
    """Whether the server ends it in that time."""
    connection.settimeout(within_s)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def fetch(place: tuple[str, int]) -> bytes:
    with socket.create_connection(place, timeout=5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = b""
        while piece := connection.recv(4096):
            got += piece
    return got


def test_a_header_has_to_come_in_time() -> None:
    with serving(header_s=0.3) as place:
        began = time.monotonic()
        silent = socket.create_connection(place)
        slow = socket.create_connection(place)
        slow.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        again = socket.create_connection(place)  # a second request on a connection that was used
        again.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in again.recv(4096)
        again.sendall(b"GET / HT")
        for _ in range(8):  # a byte now and then makes it no longer
            time.sleep(0.05)
            try:
                slow.sendall(b"x")
            except OSError:
                break
        assert all(is_closed(one) for one in (silent, slow, again))
        assert time.monotonic() - began > 0.25
        assert fetch(place).endswith(b"ok\r\n0\r\n\r\n")


def test_of_those_that_ask_nothing_the_oldest_makes_way() -> None:
    with serving(header_s=60.0, max_waiting=3) as place:
        silent = []
        for _ in range(10):
            silent.append(socket.create_connection(place))
            assert b"200" in fetch(place)  # whoever asks is heard
        assert all(is_closed(one) for one in silent[:7])
        assert not is_closed(silent[-1], 0.2)
        for one in silent:
            one.close()


def test_a_client_that_does_not_read_is_left() -> None:
    with serving(unread_s=0.3) as place:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(place)
        deaf.sendall(b"GET /50000000 HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(1.0)
        got = 0
        deaf.settimeout(60)
        try:
            while piece := deaf.recv(1 << 16):
                got += len(piece)
        except ConnectionError:
            pass
        assert got < 50_000_000
        assert b"200" in fetch(place)
