"""The store of a process that is a guest's: one, however many parts of the host ask for it.

LMDB lets a process open an environment once; vLLM may run its scheduler and a worker in the same.
"""

from __future__ import annotations

import atexit
import threading
from pathlib import Path

from chatkv.paths import Folders, folders, folders_below
from chatkv.restore.disk import Disk
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations
from chatkv_store.writer import BlockWriter

_lock = threading.Lock()
_open: dict[Path, tuple[Disk, Conversations, int]] = {}


class SharedDisk:
    """A share of this process' open store, until `close`. `store` and `writer` are None where it
    cannot be used, and `notices` say why."""

    def __init__(self, place: Folders) -> None:
        self._path: Path | None = place.kv
        with _lock:
            disk, conversations, users = _open.get(place.kv) or (*_opened(place), 0)
            _open[place.kv] = disk, conversations, users + 1
        self.store: BlockStore | None = disk.store
        self.writer: BlockWriter | None = disk.writer
        self.notices = disk.notices
        atexit.register(self.close)  # hosts end without a word, too

    def close(self) -> None:
        """Give the share up; with the last one, write what is queued. Twice is fine."""
        path, self._path = self._path, None
        if path is None:
            return
        atexit.unregister(self.close)
        with _lock:
            disk, conversations, users = _open.pop(path)
            if users > 1:
                _open[path] = disk, conversations, users - 1
                return
            disk.close()
            conversations.close()


def _opened(place: Folders) -> tuple[Disk, Conversations]:
    place.make()
    # They say what else the cache is for, and so what may go from it; unreadable, they are none.
    conversations = Conversations(place.conversations, must_open=False)
    return Disk(place, conversations), conversations


def folders_of(home: str | None) -> Folders:
    """The folders below `home`, or the user's own."""
    return folders() if home is None else folders_below(Path(home))
