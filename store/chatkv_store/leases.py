"""One writer per session: a lock on a small file, which the kernel drops when its holder dies.

`flock` belongs to the open file, so it also keeps two threads of one process apart, and no
kill -9 leaves it behind. The file's content is the holder's pid, for the message only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chatkv_store.errors import StoreBusy, StoreError, StoreFull, StoreReadOnly

# `recover` holds a lease for a few milliseconds; a session that opens just then should not fail.
_PATIENCE_S = 0.25

# Locks taken by this process. A forked child shares the open files, and would keep a lease alive
# after its holder's death: it closes its copies, which does not unlock the parent's.
_open_files: set[int] = set()


def _forget_the_parents() -> None:
    for file in _open_files:
        with suppress(OSError):
            os.close(file)
    _open_files.clear()


os.register_at_fork(after_in_child=_forget_the_parents)


class Leases:
    """The lock files of one conversations file, in a folder beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: set[str] = set()

    def holds(self, session_id: str) -> bool:
        """Whether this object holds the lease now."""
        return session_id in self._held

    @contextmanager
    def hold(self, session_id: str, *, patience_s: float = _PATIENCE_S) -> Iterator[None]:
        """Hold the session's lease; StoreBusy names the process that has it."""
        path = self._folder / f"{session_id}.lock"
        file = self._acquire(path, session_id, time.monotonic() + patience_s)
        self._held.add(session_id)
        _open_files.add(file)
        try:
            yield
        finally:
            self._held.discard(session_id)
            if file in _open_files:  # not in a forked child: the lease is its parent's
                with suppress(OSError):
                    path.unlink()  # while still locked, so that nobody locks a nameless file
                _open_files.discard(file)
                os.close(file)

    def _acquire(self, path: Path, session_id: str, deadline: float) -> int:
        while True:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise _named(error, path) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still_named(file, path):
                    os.ftruncate(file, 0)
                    with suppress(OSError):  # a full disk costs the message its pid, no more
                        os.pwrite(file, str(os.getpid()).encode(), 0)
                    return file
                os.close(file)  # its last holder removed it between our open and our lock
                continue
            except BlockingIOError as error:
                holder = os.pread(file, 32, 0).decode("ascii", "replace").strip()
                os.close(file)
                if time.monotonic() > deadline:
                    raise StoreBusy(_in_use(session_id, holder)) from error
                time.sleep(0.01)
            except BaseException:
                os.close(file)
                raise


def _in_use(session_id: str, holder: str) -> str:
    if holder == str(os.getpid()):
        return f"session {session_id} is already open in this process"
    who = f"process {holder}" if holder.isdigit() else "another process"
    return f"session {session_id} is in use by {who}; close it there, or fork the session"


def _is_still_named(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _named(error: OSError, path: Path) -> StoreError:
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return StoreReadOnly(f"{path.parent} cannot be written; check its permissions")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"{path}: the disk is full; free some space, nothing was lost")
    return StoreError(f"{path}: {error.strerror}")
