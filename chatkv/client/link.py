"""Talking to the engine's process: HTTP over its Unix socket, JSON and streams of events."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from chatkv.errors import ChatkvError

# An answer may take minutes, but the engine says that it lives several times a second.
SILENCE_S = 30.0


class EngineGone(ChatkvError):
    """The engine's process ended, or never began."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("chatkv", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Through the folder, whose path may be longer than an address holds."""
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(f"/proc/self/fd/{folder}/{self._path.name}")
        finally:
            os.close(folder)


class Link:
    """Requests to the engine that listens at `path`; each on a connection of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def call(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        """One request, one object. Raises EngineGone, and what the engine refuses."""
        with closing(_Connection(self.path, SILENCE_S)) as connection:
            try:
                response = _send(connection, method, url, body)
                data = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise EngineGone(_gone(error)) from error
        if response.status >= 400:
            _refuse(data)
        found: dict[str, Any] = json.loads(data)
        return found

    def stream(self, url: str, body: Any) -> Iterator[Any]:
        """The events of one request as they come. Raises EngineGone, also where the stream ends
        before its last event. Closing the iterator ends the work behind it."""
        from chatkv.server.wire import decode_event

        with closing(_Connection(self.path, SILENCE_S)) as connection:
            try:
                response = _send(connection, "POST", url, body)
                if response.status >= 400:
                    _refuse(response.read())
                is_last = False
                while not is_last:
                    line = response.readline()
                    if not line.endswith(b"\n"):
                        raise http.client.IncompleteRead(line)
                    event = decode_event(line)
                    is_last = event.event in ("result", "session", "error")
                    yield event
            except (OSError, http.client.HTTPException) as error:
                raise EngineGone(_gone(error)) from error


def _send(connection: _Connection, method: str, url: str, body: Any) -> http.client.HTTPResponse:
    import msgspec

    data = None if body is None else msgspec.json.encode(body)
    connection.request(method, url, data, {"Content-Type": "application/json"})
    return connection.getresponse()


def _refuse(data: bytes) -> None:
    from chatkv.server.wire import decode_event, raised

    raise raised(decode_event(data))


def _gone(error: Exception) -> str:
    why = str(error) or type(error).__name__
    return f"the engine's process has ended ({why}); what was said is saved: go on"
