"""Who has the store open: known for certain, because the kernel drops a lock with its holder.

Everybody who opens the store shares a lock on one small file for as long as it is open. Whoever
wants to replace the data file takes that lock alone, and gets it only where nobody shares it.
LMDB's own reader table cannot say this: it lists transactions, and slots of dead processes too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from chatkv_store.errors import StoreBusy

USERS_FILE = "users.lock"
PATIENCE_S = 2.0  # how long an open waits for a compaction to end


class Users:
    """A place among the users of the store in `path`, until `leave`.

    Raises StoreBusy where the store is being replaced (`alone` False), or where anybody else,
    this process included, has it open (`alone` True).
    """

    def __init__(self, path: Path, *, alone: bool = False, patience_s: float = PATIENCE_S) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(path / USERS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if alone or error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
                raise
            return  # a folder that cannot be written: nobody can replace its files either
        try:
            self._lock(path, alone, time.monotonic() + (0.0 if alone else patience_s))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Give the place up; twice is fine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, path: Path, alone: bool, deadline: float) -> None:
        assert self._file is not None
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        while True:
            try:
                fcntl.flock(self._file, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if alone:
                    raise StoreBusy(
                        f"the KV cache in {path} is open elsewhere; close every chat and try again"
                    ) from None
                if time.monotonic() > deadline:
                    raise StoreBusy(
                        f"the KV cache in {path} is being compacted; try again in a moment"
                    ) from None
                time.sleep(0.02)
