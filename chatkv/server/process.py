"""The engine's process: one per user, behind a Unix socket in the runtime folder, and behind a TCP
port where other programs' clients are to be served too.

A lock file keeps it single: a second one finds it taken and ends. It ends by itself when nobody
has asked for anything for a while, after what was said and computed is saved.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chatkv.paths import Folders
from chatkv.server.ports import listening_on, url_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from chatkv.restore.prefill_worker import PrefillWorker
    from chatkv.server.hub import Hub
    from chatkv.server.listen import Listen

log = logging.getLogger("chatkv.server")

IDLE_S = 900.0
_TICK_S = 0.5
# Who looks for the engine takes its lock for an instant; that must not end one that is starting.
_LOCK_PATIENCE_S = 0.5


class Activity:
    """When anything was last asked for, and how many requests are being answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_open = 0
        self.last_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1
            self.last_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return 0.0 if self.num_open else time.monotonic() - self.last_s


def serve(
    folders: Folders,
    idle_s: float | None = None,
    listen: Listen | None = None,
    on_listening: Callable[[Sequence[str]], None] = lambda urls: None,
) -> bool:
    """Be the engine until it is stopped or idle for long; False where another one is already.

    Who comes while torch is still being imported waits at the socket, and starts no second one.
    `listen`: serve other programs' clients too, and do not end when they are silent; on_listening
    hears where.
    """
    folders.make()
    with _only_one(folders.engine_lock) as is_ours:
        if not is_ours:
            return False
        with ExitStack() as open:
            ports = open.enter_context(_ports(listen))
            listener = open.enter_context(listening(folders.socket))
            if idle_s is None:
                idle_s = _idle_s(IDLE_S if listen is None else math.inf)
            asyncio.run(_serve(folders, listener, idle_s, listen, ports, on_listening))
    return True


def _ports(listen: Listen | None) -> AbstractContextManager[list[socket.socket]]:
    if listen is None:
        return nullcontext([])
    return listening_on(listen.host, listen.port, bool(listen.access.tokens))


async def _serve(
    folders: Folders,
    listener: socket.socket,
    idle_s: float,
    listen: Listen | None,
    ports: list[socket.socket],
    on_listening: Callable[[Sequence[str]], None],
) -> None:
    from starlette.applications import Starlette

    from chatkv.server.api import application
    from chatkv.server.bounded import bounded
    from chatkv.server.hub import Hub
    from chatkv.server.own import EXCEPTION_HANDLERS, OwnApi
    from chatkv.server.servers import end, http_server

    hub = Hub(folders, prefill=_prefill_worker(listen))

    def stop() -> None:
        end(servers)
        hub.cancel_all()

    tls = listen.tls if listen is not None else None
    urls = [url_of(port, tls is not None) for port in ports]
    own = OwnApi(hub, stop, urls)
    apps = [Activity(Starlette(routes=own.routes(), exception_handlers=EXCEPTION_HANDLERS))]
    servers = [http_server(apps[0])]
    if listen is not None:
        apps.append(Activity(application(hub, listen, own)))
        servers.append(http_server(apps[1], bounded(), tls))
        on_listening(urls)
    watch = asyncio.create_task(_watch(hub, apps, partial(end, servers), idle_s))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        sockets = [[listener], ports]
        await asyncio.gather(
            *(server.serve(sockets=mine) for server, mine in zip(servers, sockets, strict=False))
        )
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
        await loop.run_in_executor(None, hub.close)


def _prefill_worker(listen: Listen | None) -> PrefillWorker | None:
    if listen is None or listen.prefill_url is None:
        return None
    from chatkv.apart.transports import transport_to
    from chatkv.restore.prefill_worker import PrefillWorker

    return PrefillWorker(transport_to(listen.prefill_url, listen.prefill_token))


async def _watch(
    hub: Hub, apps: Sequence[Activity], end: Callable[[], None], idle_s: float
) -> None:
    """Close what is not used, and end when nothing is."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_TICK_S)
        await loop.run_in_executor(None, hub.tidy)
        since_s = min(app.idle_s for app in apps)
        if since_s > idle_s and not hub.num_running and not hub.num_unsaved:
            log.warning("idle for %d s: ending", int(since_s))
            end()


def _idle_s(default: float) -> float:
    try:
        return float(os.environ.get("CHATKV_IDLE_S", default))
    except ValueError:
        return default


@contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Hold the lock file, with this process's id in it; False where another process does."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _lock(file):
            yield False
            return
        os.ftruncate(file, 0)
        with suppress(OSError):
            os.pwrite(file, str(os.getpid()).encode(), 0)
        yield True
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket that only its owner may open; the path may be longer than the 107
    bytes that an address holds."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        with suppress(FileNotFoundError):
            path.unlink()  # of a process that was killed: the lock is ours
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        listener.listen(64)
    finally:
        os.umask(before)
        os.close(folder)
    try:
        yield listener
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        listener.close()
