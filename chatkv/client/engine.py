"""Finding the engine's process, starting one, ending it. Needs no torch."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatkv import __version__
from chatkv.client.link import EngineGone, Link
from chatkv.errors import ChatkvError
from chatkv.paths import Folders

START_S, STOP_S = 60.0, 30.0
_POLL_S = 0.02
_LOG_BYTES = 1 << 20
# The engine lives in no folder of its own, so what leads it to files has to be whole.
_PATHS = ("CHATKV_HOME", "CHATKV_KEY_FILE")


class EngineBusy(ChatkvError):
    """An engine is answering, and would have to end."""


@dataclass(frozen=True)
class Engine:
    """One that has answered; `status` is what it said of itself."""

    link: Link
    status: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        """Whether it speaks this version's language."""
        return self.status.get("version") == __version__

    @property
    def urls(self) -> list[str]:
        """Where it serves others than chatkv's own programs, as this machine reaches it."""
        urls = self.status.get("urls", ())
        return [url.replace("//0.0.0.0", "//127.0.0.1").replace("[::]", "[::1]") for url in urls]

    @property
    def is_answering(self) -> bool:
        return bool(self.status.get("answering"))


def find(folders: Folders) -> Engine | None:
    """The engine that is running, of whatever version; None where none answers."""
    link = Link(folders.socket)
    if not link.path.exists():
        return None
    try:
        return Engine(link, link.call("GET", "/status"))
    except EngineGone:
        return None


def running(folders: Folders) -> Link | None:
    """The engine that is running, None where none is or another version's."""
    found = find(folders)
    return found.link if found is not None and found.is_ours else None


def start(folders: Folders) -> Link:
    """The running engine, or a new one: a process that outlives this one. One of another version
    is replaced where it is idle.

    Raises EngineGone, EngineBusy, and OSError where its folder cannot be written.
    """
    folders.make()
    found = find(folders)
    if found is not None and found.is_ours:
        return found.link
    if found is not None:
        _end_idle(folders, found)
    process = _spawn(folders.engine_log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (link := running(folders)) is not None:
            return link
        if process.poll() not in (None, 0):
            said = _last_line(folders.engine_log)
            raise EngineGone(f"the engine did not start: {said or folders.engine_log}")
        if process.poll() == 0 and _holder(folders) is None:  # the other one was just ending
            process = _spawn(folders.engine_log)
        time.sleep(_POLL_S)
    raise EngineGone(
        f"the engine did not answer within {START_S:.0f} s: {folders.engine_log} may say why"
    )


def serving(folders: Folders, options: Sequence[str] = ()) -> str:
    """The address of the engine that serves pages and other programs; where none does, one is
    started as `chatkv serve OPTIONS`, and an idle one makes way for it.

    Raises EngineGone, EngineBusy, and OSError where its folder cannot be written.
    """
    folders.make()
    found = find(folders)
    if found is not None and found.is_ours and found.urls:
        return found.urls[0]
    if found is not None:
        _end_idle(folders, found)
    process = _spawn(folders.engine_log, ["serve", *options])
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (found := find(folders)) is not None and found.urls:
            return found.urls[0]
        if process.poll() is not None:
            said = _last_line(folders.engine_log).removeprefix("chatkv: ")
            raise EngineGone(f"the server did not start: {said or folders.engine_log}")
        time.sleep(_POLL_S)
    raise EngineGone(
        f"the server did not answer within {START_S:.0f} s: {folders.engine_log} may say why"
    )


def process(folders: Folders) -> int | None:
    """The id of the engine's process, also of one that does not answer; None where none runs."""
    return _holder(folders)


def stop(folders: Folders, force: bool = False) -> bool:
    """End the engine, once it has saved everything; False where none runs. Raises what it says
    where something cannot be saved, unless by `force`."""
    holder = _holder(folders)
    if holder is None:
        return False
    try:
        Link(folders.socket).call("POST", "/stop", {"force": True} if force else None)
    except EngineGone:  # busy, or its socket is gone
        with suppress(ProcessLookupError):
            os.kill(holder, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while _holder(folders) == holder:
        if time.monotonic() > deadline:
            raise EngineGone(f"process {holder} does not end: try kill -9 {holder}")
        time.sleep(_POLL_S)
    return True


def make_way(folders: Folders) -> bool:
    """End an idle engine, so that the store can be had alone; the next chat starts another. Raises
    EngineBusy where it is answering; False where none runs."""
    found = find(folders)
    return found is not None and _end_idle(folders, found)


def release(folders: Folders, session_id: str) -> None:
    """Have the engine, where one runs, close a session and drop its KV from memory: it is about to
    be deleted. Raises what it says where the session is answering."""
    link = running(folders)
    if link is not None:
        with suppress(EngineGone):
            link.call("POST", f"/sessions/{session_id}/release")


def _end_idle(folders: Folders, found: Engine) -> bool:
    if found.is_answering:
        version = "" if found.is_ours else f" of version {found.status.get('version')}"
        raise EngineBusy(f"the engine{version} is answering: wait for it, or `chatkv stop`")
    return stop(folders)


def _spawn(
    log: Path, arguments: Sequence[str] = ("serve", "--socket-only")
) -> subprocess.Popen[bytes]:
    paths = {name: os.path.abspath(os.environ[name]) for name in _PATHS if os.environ.get(name)}
    with open(log, "ab") as output:
        if output.tell() > _LOG_BYTES:
            output.truncate(0)
        return subprocess.Popen(
            [sys.executable, "-m", "chatkv", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for it
            cwd="/",
            env={**os.environ, **paths},
        )


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")
    return ""


def _holder(folders: Folders) -> int | None:
    """The process that holds the engine's lock."""
    try:
        file = os.open(folders.engine_lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(ValueError):
            return int(os.pread(file, 32, 0) or b"")
    finally:
        os.close(file)
    return None
