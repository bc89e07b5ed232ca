"""Finding the engine's process, starting one, ending it. Needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from chatkv import __version__
from chatkv.client.link import EngineGone, Link
from chatkv.errors import ChatkvError
from chatkv.paths import Folders

START_S, STOP_S = 60.0, 30.0


def running(folders: Folders) -> Link | None:
    """The engine that is running, None where none is or another version's."""
    link = Link(folders.socket)
    if not link.path.exists():
        return None
    try:
        status = link.call("GET", "/status")
    except EngineGone:
        return None
    return link if status["version"] == __version__ else None


def start(folders: Folders) -> Link:
    """The running engine, or a new one: a process that outlives this one. Raises EngineGone."""
    folders.make()
    link = running(folders)
    if link is not None:
        return link
    stop(folders)  # one of another version
    log = folders.engine_log
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "chatkv", "serve", "--socket-only"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C in this terminal is not meant for it
            cwd="/",
        )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (link := running(folders)) is not None:
            return link
        if process.poll() not in (None, 0):  # 0: another one was faster, and is starting
            raise EngineGone(f"the engine did not start: {log} says why")
        time.sleep(0.02)
    raise EngineGone(f"the engine did not answer within {START_S:.0f} s: {log} may say why")


def stop(folders: Folders) -> bool:
    """End the engine, once it has saved everything; False where none runs."""
    holder = _holder(folders)
    if holder is None:
        return False
    try:
        Link(folders.socket).call("POST", "/stop")
    except ChatkvError:  # busy, or its socket is gone
        with suppress(ProcessLookupError):
            os.kill(holder, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while _holder(folders) == holder:
        if time.monotonic() > deadline:
            raise EngineGone(f"process {holder} does not end: try kill -9 {holder}")
        time.sleep(0.02)
    return True


def _holder(folders: Folders) -> int | None:
    """The process that holds the engine's lock."""
    import fcntl

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
