"""A response's body written by a thread: straight into the connection where that is possible.

uvicorn copies what it is given into a buffer of h11's and a buffer of asyncio's, on the thread that
serves everybody. KV is large and lies ready in memory, so on a plain connection a frame goes from
there into the socket in one call, as a chunk of the response. TLS has to see every byte: there, and
where the connection cannot be had, frames go the usual way.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Scope, Send

from chatkv.apart.over_http import LANDING_HEADER
from chatkv.server.bounded import TRANSPORT, UNREAD_S

# How often who waits for a slow reader looks whether it is still there.
_POLL_MS = 100
# Parts that one call takes: Linux allows 1024.
_MAX_PARTS = 512

Parts = Sequence[memoryview | bytes]


class Sink(Protocol):
    """Where frames go."""

    def send(self, parts: Parts) -> None:
        """Send one frame, given in parts that nobody writes meanwhile. Raises OSError where nobody
        takes it any more."""

    def close(self) -> None:
        """No more frames come."""


class AsgiSink:
    """Frames as the bodies of ASGI messages; `loop` runs the server."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, send: Send, cancelled: threading.Event
    ) -> None:
        self._loop, self._send, self._cancelled = loop, send, cancelled

    def send(self, parts: Parts) -> None:
        """Returns when the connection takes more. Raises OSError where it has ended."""
        if self._cancelled.is_set():
            raise BrokenPipeError
        message = {"type": "http.response.body", "body": b"".join(parts), "more_body": True}
        try:
            asyncio.run_coroutine_threadsafe(self._told(message), self._loop).result(UNREAD_S)
        except (RuntimeError, TimeoutError):  # the server has ended, or nobody reads
            raise BrokenPipeError from None

    def close(self) -> None: ...

    async def _told(self, message: Message) -> None:
        await self._send(message)


class SocketSink:
    """Frames as chunks of a chunked response whose head has gone out already."""

    def __init__(self, connection: socket.socket, cancelled: threading.Event) -> None:
        self._socket, self._cancelled = connection, cancelled
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)

    def send(self, parts: Parts) -> None:
        """Returns when the system has all of it. Raises OSError where the connection has ended."""
        size = sum(len(part) for part in parts)
        left = [memoryview(part) for part in (b"%x\r\n" % size, *parts, b"\r\n") if len(part)]
        at = 0
        while at < len(left):
            sent = self._some(left[at : at + _MAX_PARTS])
            while at < len(left) and sent >= len(left[at]):
                sent -= len(left[at])
                at += 1
            if sent:
                left[at] = left[at][sent:]

    def _some(self, parts: Sequence[memoryview]) -> int:
        deadline = time.monotonic() + UNREAD_S
        while True:
            if self._cancelled.is_set() or time.monotonic() > deadline:
                raise BrokenPipeError
            with suppress(BlockingIOError):
                return self._socket.sendmsg(parts)
            self._writable.poll(_POLL_MS)

    def close(self) -> None:
        """Give up the connection, which stays the server's."""
        self._socket.close()


def sink_for(scope: Scope, send: Send, cancelled: threading.Event) -> Sink:
    """Where another thread may write frames, one after the other, until it is closed: the body of a
    request's response, whose head has been sent, or a ring of the client's (`over_nixl`)."""
    body = _body_for(scope, send, cancelled)
    for name, value in scope["headers"]:
        if name == LANDING_HEADER.lower().encode():
            from chatkv.apart.over_nixl import Landing, NixlSink

            landing = msgspec.json.decode(value, type=Landing)
            return NixlSink(landing, body, cancelled.is_set, UNREAD_S)
    return body


def _body_for(scope: Scope, send: Send, cancelled: threading.Event) -> AsgiSink | SocketSink:
    transport: Any = scope.get(TRANSPORT)
    if transport is not None and transport.get_extra_info("sslcontext") is None:
        found = transport.get_extra_info("socket")
        if found is not None and not transport.get_write_buffer_size():
            return SocketSink(socket.socket(fileno=os.dup(found.fileno())), cancelled)
    return AsgiSink(asyncio.get_running_loop(), send, cancelled)
