"""Prefill workers for tests: real processes, forked from a server that has torch loaded; and links
to them that are slow, or do what links should not."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import engines
from chatkv.apart.over_http import HttpTransport
from chatkv.apart.transport import RemoteError
from chatkv.apart.transports import transport_to
from chatkv.paths import Folders, folders
from chatkv.restore.prefill_worker import PrefillWorker
from chatkv.server.listen import Access, Listen, Tls
from forked import CONTEXT


@dataclass
class Prefiller:
    """A running worker."""

    url: str
    process: Any

    def kill(self) -> None:
        os.kill(self.process.pid, 9)

    def at(self, token: str | None = None, url: str | None = None) -> PrefillWorker:
        """The worker as a decode worker knows it, also behind another address."""
        return PrefillWorker(transport_to(url or self.url, token))


@contextmanager
def prefiller(
    home: Path,
    model: str,
    *,
    access: Access = Access(),  # noqa: B008
    tls: Tls | None = None,
    min_value_bytes: int | None = None,
    token: str | None = None,
) -> Iterator[Prefiller]:
    """A worker that has loaded `model`; min_value_bytes: how large values are at least, by which
    even a tiny model has several."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    listen = Listen(port=0, access=access, models=(model,), tls=tls)
    environment = {**os.environ, "CHATKV_HOME": str(home)}
    process = CONTEXT.Process(
        target=_serve, args=(theirs, environment, listen, min_value_bytes), daemon=True
    )
    process.start()
    theirs.close()
    try:
        found = Prefiller(ours.recv(), process)

        def has_model() -> bool:
            with suppress(RemoteError):
                return bool(HttpTransport(found.url, token).state(5).models)
            assert process.is_alive()
            return False

        engines.eventually(has_model)
        yield found
    finally:
        process.terminate()
        process.join(10)


def _serve(
    listening: Connection,
    environment: dict[str, str],
    listen: Listen,
    min_value_bytes: int | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.umask(0o077)
    os.setsid()
    from chatkv.server.prefill_process import serve_prefill
    from chatkv_store import layout

    if min_value_bytes is not None:
        layout.MIN_VALUE_BYTES = min_value_bytes  # type: ignore[misc]
    serve_prefill(folders(), listen, "float32", on_listening=lambda urls: listening.send(urls[0]))


def folders_in(home: Path) -> Folders:
    """The folders of another home than the one that is in force."""
    before = os.environ["CHATKV_HOME"]
    os.environ["CHATKV_HOME"] = str(home)
    try:
        found = folders()
        found.make()
        return found
    finally:
        os.environ["CHATKV_HOME"] = before


@dataclass
class Link:
    """A TCP proxy in front of a worker. Everything may be changed while it runs.

    bytes_per_s: what passes towards the client, evenly; delay_s: how long a request is on its way;
    on_kv(n): so many bytes of answers with KV have passed. tamper(frames): what becomes
    of the frames of an answer with KV, which is held back until it is complete.
    """

    target: str
    bytes_per_s: float | None = None
    delay_s: float = 0.0
    on_kv: Callable[[int], None] = lambda num_bytes: None
    tamper: Callable[[list[bytes]], Sequence[bytes]] | None = None
    num_kv_bytes: int = 0
    _open: list[socket.socket] = field(default_factory=list)

    @contextmanager
    def url(self) -> Iterator[str]:
        listener = socket.create_server(("127.0.0.1", 0))
        self._open.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            self.cut()

    def cut(self) -> None:
        """End every connection."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                place = urlsplit(self.target)
                try:
                    worker = socket.create_connection((place.hostname, place.port), 5)
                except OSError:
                    client.close()
                    continue
                self._open += [client, worker]
                threading.Thread(target=self._carry, args=(client, worker), daemon=True).start()

    def _carry(self, client: socket.socket, worker: socket.socket) -> None:
        """Until either end closes."""
        is_kv, held = False, b""
        with suppress(OSError, ValueError), client, worker:
            while True:
                readable, _, _ = select.select([client, worker], [], [])
                if client in readable:
                    data = client.recv(1 << 16)
                    is_kv = is_kv or data.startswith(b"POST /prefill/kv")
                    if not data:
                        return
                    time.sleep(self.delay_s)
                    worker.sendall(data)
                if worker in readable:
                    data = worker.recv(1 << 14)
                    if is_kv and self.tamper is not None:
                        held += data
                        if data and not held.endswith(b"\r\n0\r\n\r\n"):
                            continue
                        client.sendall(_tampered(held, self.tamper))
                        return
                    if not data:
                        return
                    if self.bytes_per_s:
                        time.sleep(len(data) / self.bytes_per_s)
                    client.sendall(data)
                    if is_kv:
                        self.num_kv_bytes += len(data)
                        self.on_kv(self.num_kv_bytes)


def _tampered(response: bytes, tamper: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
    """A chunked response with other chunks. One that lacks its end is not complete: so is this."""
    head, _, rest = response.partition(b"\r\n\r\n")
    frames = []
    while rest and not rest.startswith(b"0\r\n"):
        size, _, rest = rest.partition(b"\r\n")
        frames.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    found = tamper(frames)
    body = b"".join(b"%x\r\n%s\r\n" % (len(frame), frame) for frame in found if frame)
    end = b"" if b"" in found else b"0\r\n\r\n"
    return head + b"\r\n\r\n" + body + end
