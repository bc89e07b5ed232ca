"""Which prefill workers of this home are running, and where: a note of each, held while it lasts.

The kernel drops a lock with its holder, however that ends, so a note that nobody holds is of one
that is gone. Needs no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chatkv.errors import ChatkvError
from chatkv.paths import Folders

END_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Running:
    """A prefill worker that is running."""

    pid: int
    urls: list[str]
    note: Path

    @property
    def words(self) -> str:
        return f"the prefill worker at {', '.join(self.urls)} (process {self.pid})"


@contextmanager
def noted(folders: Folders, urls: Sequence[str]) -> Iterator[None]:
    """Say that this process is a prefill worker there, as long as the block of code goes on."""
    folders.prefill_notes.mkdir(mode=0o700, exist_ok=True)
    path = folders.prefill_notes / f"{os.getpid()}.json"
    fresh = path.with_suffix(".new")
    with open(fresh, "w", encoding="utf-8") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        json.dump({"pid": os.getpid(), "urls": list(urls)}, note)
        note.flush()
        os.replace(fresh, path)  # held before anybody sees it
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running(folders: Folders) -> list[Running]:
    """Those of this home. Notes that others have left behind are removed."""
    held = (_held(path) for path in sorted(folders.prefill_notes.glob("*.json")))
    return [one for one in held if one is not None]


def end(worker: Running) -> None:
    """End one, once what it is doing has ended. Raises ChatkvError where it does not end."""
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while _held(worker.note) is not None:
        if time.monotonic() > deadline:
            raise ChatkvError(f"{worker.words} does not end: try kill -9 {worker.pid}")
        time.sleep(_POLL_S)


def _held(path: Path) -> Running | None:
    """What a note says, None where nobody holds it any more."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(path, encoding="utf-8") as note:
        try:
            fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            said = json.load(note)
            return Running(int(said["pid"]), [str(url) for url in said["urls"]], path)
        path.unlink(missing_ok=True)
    return None
