"""How long and how many: connections that ask nothing, and clients that do not listen.

uvicorn waits without end for the header of a request, and for a client that no longer reads. Each
such connection is one that others cannot have, so here both waits end, and of those that have not
asked yet the oldest makes way.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# From the connection, or the first byte of a further request, to the end of the header.
HEADER_S = 10.0
# That a client may leave what was sent to it unread.
UNREAD_S = 60.0
# Under which the scope of a request has its connection, for answers that write to it themselves.
TRANSPORT = "chatkv.transport"
# Connections whose request has not come yet.
MAX_WAITING = 64


def bounded(
    header_s: float = HEADER_S, unread_s: float = UNREAD_S, max_waiting: int = MAX_WAITING
) -> type[H11Protocol]:
    """The protocol of one server, for uvicorn's `http`."""
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # the oldest first

    class Bounded(H11Protocol):
        _unread: asyncio.TimerHandle | None = None

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            app = self.app

            async def with_transport(scope: Any, receive: Any, send: Any) -> None:
                scope[TRANSPORT] = self.transport
                await app(scope, receive, send)

            self.app = with_transport

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()
            while len(waiting) > max_waiting:
                next(iter(waiting)).transport.abort()
                waiting.pop(next(iter(waiting))).cancel()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._wait()
            else:
                self._asked()

        def connection_lost(self, exc: Exception | None) -> None:
            self._asked()
            self._is_read()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self._unread or self.loop.call_later(unread_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._is_read()

        def _wait(self) -> None:
            if self not in waiting:
                waiting[self] = self.loop.call_later(header_s, self.transport.abort)

        def _asked(self) -> None:
            timer: Any = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return Bounded
