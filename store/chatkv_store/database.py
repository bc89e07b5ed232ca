"""One SQLite file, opened so that what was committed stays, and every failure has a name.

Choices, and why:
- WAL with synchronous=FULL: a commit is on the disk when it returns, readers never wait.
- secure_delete=ON: what a person deletes is overwritten with zeros in the file. Text is small
  beside KV, so the extra writes do not show.
- A file that can be read but not written (read-only folder, full disk) is opened for reading;
  only writing raises. A full disk must not hide the conversations.
- Such a file is tried again at every write, so it is written as soon as it can be.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chatkv_store import migrations
from chatkv_store.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreVersionError,
)
from chatkv_store.failpoints import failpoint

_NEARLY_FULL_BYTES = 1 << 20  # below this much free space an I/O error is taken for a full disk


class Database:
    """A migrated connection, shared by the threads of this process (one at a time).

    Raises StoreVersionError, StoreDamaged, StoreReadOnly, StoreFull, StoreBusy or StoreError; with
    `must_open` False an empty database in memory takes the file's place until it can be opened.
    """

    def __init__(self, path: Path, *, busy_timeout_s: float = 5.0, must_open: bool = True) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._refusal: StoreError | None = None  # why this file can only be read
        try:
            try:
                _create_private(path)
                self._conn = self._retry_while_busy(lambda: self._open("mode=rw"))
                if not os.access(path, os.W_OK):  # SQLite opened it for reading without a word
                    self._refusal = self._read_only()
            except (OSError, sqlite3.Error) as error:
                self._conn = self._open_for_reading(self._named(error))
        except StoreError as error:
            if must_open:
                raise
            self._conn, self._refusal = _empty_in_memory(), error

    @property
    def refusal(self) -> StoreError | None:
        """What writing would raise, None where it is possible."""
        return self._refusal

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """One consistent view of the file, however many statements look at it."""
        with self._lock, self._transaction("BEGIN", "ROLLBACK"):
            yield self._conn

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it is on the disk when the block ends, or none of it."""
        with self._lock:
            if self._refusal is not None:
                self._open_again()
            with self._transaction("BEGIN IMMEDIATE", "COMMIT"):
                failpoint("conversations.begun")
                yield self._conn
                failpoint("conversations.written")
            failpoint("conversations.committed")

    @contextmanager
    def _transaction(self, begin: str, end: str) -> Iterator[None]:
        try:
            self._conn.execute(begin)
            yield
            self._conn.execute(end)
        except BaseException as error:  # Ctrl-C between two statements must roll back too
            if self._conn.in_transaction:
                with suppress(sqlite3.Error):
                    self._conn.execute("ROLLBACK")
            if isinstance(error, (sqlite3.Error, OSError)):
                raise self._named(error) from error
            raise

    def _open_again(self) -> None:
        """Open for writing what could not be written before; raises where it still cannot be."""
        try:
            _create_private(self.path)
            conn = self._open("mode=rw")
            if not os.access(self.path, os.W_OK):
                conn.close()
                raise self._read_only()
        except (OSError, sqlite3.Error) as error:
            raise self._named(error) from error
        self._conn.close()
        self._conn, self._refusal = conn, None

    def truncate_log(self) -> None:
        """Move the WAL into the file and empty it, as far as other processes' readers allow."""
        with self._lock, suppress(sqlite3.Error):
            self._conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._conn.close()

    def _open(self, mode: str) -> sqlite3.Connection:
        conn = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}",
            uri=True,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._check_origin(conn)
            if mode == "mode=rw":
                for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                    conn.execute(f"PRAGMA {pragma}")
                self._migrate(conn)
            conn.execute("PRAGMA foreign_keys=ON")
        except BaseException:
            conn.close()
            raise
        return conn

    def _check_origin(self, conn: sqlite3.Connection) -> None:
        """Raise for files that are not ours or not yet known, before anything is written.

        In one transaction, so that a file which another process is just creating is seen either
        empty or complete.
        """
        began_here = not conn.in_transaction
        if began_here:
            conn.execute("BEGIN")
        try:
            is_foreign, found = migrations.is_foreign(conn), migrations.version(conn)
        finally:
            if began_here and conn.in_transaction:
                conn.execute("ROLLBACK")
        known = len(migrations.MIGRATIONS)
        if is_foreign:
            raise StoreDamaged(f"{self.path} is not a conversations file of chatkv; move it away")
        if found > known:
            raise StoreVersionError(
                f"{self.path} was written by a newer chatkv (format {found}, this one knows up to "
                f"{known}); update chatkv, or set CHATKV_HOME to another folder"
            )

    def _migrate(self, conn: sqlite3.Connection) -> None:
        if migrations.version(conn) == len(migrations.MIGRATIONS):
            return
        conn.execute("BEGIN IMMEDIATE")
        try:  # another process may have been faster: look again now that we hold the lock
            self._check_origin(conn)
            migrations.migrate(conn)
            failpoint("conversations.migrated")
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise

    def _retry_while_busy(self, attempt: Callable[[], sqlite3.Connection]) -> sqlite3.Connection:
        """Switching a new file to WAL reports "busy" at once, without SQLite's own waiting."""
        deadline = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                return attempt()
            except sqlite3.OperationalError as error:
                if _primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _open_for_reading(self, refusal: StoreError) -> sqlite3.Connection:
        """A connection for a file that cannot be written; raises `refusal` where that fails too."""
        if not isinstance(refusal, (StoreReadOnly, StoreFull)) or not os.path.isfile(self.path):
            raise refusal
        modes = ["mode=ro"]
        log = self.path.with_name(self.path.name + "-wal")
        with suppress(OSError):
            # `immutable` needs no shared-memory file, but does not see a log left by a crash.
            if not log.exists() or log.stat().st_size == 0:
                modes.append("mode=ro&immutable=1")
        for mode in modes:
            with suppress(sqlite3.Error):
                conn = self._open(mode)
                if migrations.version(conn) == len(migrations.MIGRATIONS):
                    self._refusal = refusal
                    return conn
                conn.close()
        raise refusal

    def _named(self, error: OSError | sqlite3.Error) -> StoreError:
        """The store's own error for one of SQLite or of the operating system."""
        if isinstance(error, OSError):
            import errno

            text = f"{self.path}: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return self._full()
            if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
                return StoreReadOnly(f"{text}; check the permissions of {self.path.parent}")
            return StoreError(text)
        match _primary_code(error):
            case sqlite3.SQLITE_FULL:
                return self._full()
            case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN if self._disk_is_nearly_full():
                return self._full()
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
                return self._read_only()
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return StoreDamaged(
                    f"{self.path} is damaged ({error}); move it away and salvage it with "
                    f"`sqlite3 FILE .recover`"
                )
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return StoreBusy(
                    f"{self.path}: another process has been writing for more than "
                    f"{self._busy_timeout_s:g} s; try again"
                )
        # SQLite quotes what it could not read: only as much of it as is a line.
        return StoreError(f"{self.path}: {' '.join(str(error).split())[:200]}")

    def _read_only(self) -> StoreReadOnly:
        return StoreReadOnly(
            f"{self.path} cannot be written; check the permissions of {self.path.parent}"
        )

    def _full(self) -> StoreFull:
        return StoreFull(
            f"{self.path} could not grow: the disk is full; free some space, nothing was lost"
        )

    def _disk_is_nearly_full(self) -> bool:
        try:
            found = os.statvfs(self.path.parent)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < _NEARLY_FULL_BYTES


def _empty_in_memory() -> sqlite3.Connection:
    """What stands in for a file that cannot be opened: it reads as empty."""
    conn = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    migrations.migrate(conn)
    return conn


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its extension, 0 for errors raised by the module itself."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _create_private(path: Path) -> None:
    """Make the file (0600) and its folder (0700) where missing; SQLite gives its log the same.

    An existing file is never opened here: closing it would drop the POSIX locks that other
    connections of this process hold on it (https://sqlite.org/howtocorrupt.html, section 2.2).
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        mode = path.stat().st_mode
        if mode & 0o077:
            with suppress(OSError):
                path.chmod(mode & 0o700)
