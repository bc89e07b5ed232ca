"""The LMDB environment under the block store: its map grows by itself, its errors are ours.

LMDB maps the whole file, and remapping moves every page under the readers' feet. So each
transaction runs inside a gate: any number of them at once, or one remapping, never both.

Transactions here are short by construction. A reader that stays keeps every page freed since it
began from being reused, and the file grows until it is full.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from chatkv_store import pages
from chatkv_store.budget import disk_free_bytes
from chatkv_store.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreVersionError,
)
from chatkv_store.failpoints import failpoint
from chatkv_store.gate import Gate
from chatkv_store.page_format import PagesDamaged
from chatkv_store.sealing import SealedTransaction, Sealer
from chatkv_store.users import Users

DATA_FILE, LOCK_FILE = "data.mdb", "lock.mdb"
LATER = ("uses",)  # databases that a store from before them lacks
COMPACTION_FOLDER = "compaction"  # where `compact` writes; a dead one's is removed at an open
START_MAP_BYTES = 1 << 30
NEARLY_FULL_BYTES = 1 << 20
LOCK_FILE_BYTES = 40 << 10  # LMDB's head and 64 bytes to a reader, in whole pages
MAX_READERS = 512  # reader slots over all processes; a dead process's are freed at the next open
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

T = TypeVar("T")


class Environment:
    """One LMDB environment with `databases`, opened once per process.

    `max_bytes` caps the data file. `num_stale_readers` slots of dead processes were freed when it
    was opened; a `thorough` open looks at the head of every value. Raises StoreBusy (already open
    in this process), StoreReadOnly, StoreDamaged, StoreVersionError, StoreFull or StoreError.
    """

    def __init__(
        self,
        path: Path,
        databases: dict[str, dict[str, bool]],
        *,
        read_only: bool = False,
        max_bytes: int | None = None,
        start_map_bytes: int = START_MAP_BYTES,
        thorough: bool = False,
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._max_bytes = max_bytes
        self._gate = Gate()
        self.sealer: Sealer | None = None
        self._names: dict[int, str] = {}
        if read_only and not (path / DATA_FILE).is_file():
            raise StoreError(f"no KV cache in {path}")
        with _translated(path):
            if not read_only:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._users = Users(path)
            if not read_only:  # as one of the users: nobody can be compacting now
                shutil.rmtree(path / COMPACTION_FOLDER, ignore_errors=True)
        try:
            with _translated(path):
                size = _file_bytes(path)
                map_bytes = max(2 * size, start_map_bytes)
                if max_bytes is not None:
                    map_bytes = max(size, min(map_bytes, _cap_pages(max_bytes)))
                self._env = _open(path, _whole_pages(map_bytes), len(databases), read_only)
        except BaseException:
            self._users.leave()
            raise
        self.map_bytes: int = self._env.info()["map_size"]
        # Without a lock file, a writer would not know of our readers and could use their pages.
        self.snapshots_hold: bool = self._env.flags()["lock"]
        try:
            with _translated(path):
                self.num_stale_readers: int = self._env.reader_check()
                self._check_pages(databases, thorough)
                self._cover_whole_file()
                self.databases = self._open_databases(databases)
        except BaseException:
            self.close()
            raise

    def read(self) -> AbstractContextManager[Any]:
        """A read transaction whose values are memoryviews of the map, valid until it ends."""
        return _Read(self)

    def write(self, work: Callable[[Any], T], limit_bytes: int | None = None) -> T:
        """Commit `work(txn)` and return its result; nothing is written when it raises.

        `work` may run again from its start, when the map had to grow; for this it grows to
        `limit_bytes` at most, and never beyond the cap.
        """
        if self.read_only:
            raise StoreReadOnly(f"the KV cache in {self.path} is open for reading only")
        while True:
            full_at = self.map_bytes
            try:
                with self._gate.shared(), _translated(self.path):
                    with self._begin(write=True) as txn:
                        failpoint("blocks.begun")
                        result = work(self.seen(txn))
                        failpoint("blocks.written")
                    failpoint("blocks.committed")
                    return result
            except _MapIsFull:
                self._grow(full_at, limit_bytes)

    def fit_map(self, limit_bytes: int) -> None:
        """Let the file not grow beyond `limit_bytes`, until a write asks for more.

        The map is what LMDB cannot outgrow, so that is what is cut; pages in use stay.
        """
        if self.map_bytes <= limit_bytes:
            return
        with self._gate.exclusive(), _translated(self.path):
            end = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            wanted = max(end, limit_bytes // PAGE_BYTES * PAGE_BYTES)
            if wanted < self.map_bytes:
                self._env.set_mapsize(wanted)
                self.map_bytes = self._env.info()["map_size"]

    def info(self) -> dict[str, int]:
        """Bytes of the file, of the map, and of pages that are free for reuse; reader slots."""
        with self._gate.shared(), _translated(self.path), self._begin(write=False) as txn:
            info = self._env.info()
            page_bytes = self._env.stat()["psize"]
            used = sum(
                stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                for stat in (txn.stat(db) for db in (None, *self.databases.values()))
            )
        total = info["last_pgno"] + 1
        return {
            "file_bytes": _file_bytes(self.path),
            "map_bytes": self.map_bytes,
            "used_bytes": used * page_bytes,
            "free_bytes": max(0, total - used - 2) * page_bytes,  # 2: the meta pages
            "readers": info["num_readers"],
        }

    def seen(self, txn: Any) -> Any:
        """The transaction as the store uses it: through `sealer` where there is one."""
        if self.sealer is None:
            return txn
        return SealedTransaction(txn, self.sealer, self._names)

    def seal(self, sealer: Sealer | None) -> None:
        """Encrypt and decrypt from now on."""
        self._names = {id(handle): name for name, handle in self.databases.items()}
        self.sealer = sealer

    def look_alone(self, work: Callable[[Any], T]) -> T:
        """`work(txn)` while nobody can write, this process included; nothing is committed."""
        with self._gate.shared(), _translated(self.path):
            txn = self._begin(write=True)
            try:
                return work(txn)
            finally:
                txn.abort()

    def sync(self) -> None:
        """Have every commit on the disk, the last one included."""
        with self._gate.shared(), _translated(self.path):
            self._env.sync(True)

    @property
    def page_bytes(self) -> int:
        return int(self._env.stat()["psize"])

    def readers(self) -> str:
        """LMDB's reader table as text."""
        with self._gate.shared():
            return str(self._env.readers())

    def close(self) -> None:
        """Wait for the transactions of this process and unmap. Closing twice is fine."""
        with self._gate.exclusive():
            self._env.close()
            self._users.leave()

    def _begin(self, *, write: bool) -> Any:
        """A transaction; adopts the larger map first where another process has grown it.

        Called inside the gate, which it leaves for the moment of remapping.
        """
        while True:
            try:
                return self._env.begin(write=write, buffers=True)
            except lmdb.MapResizedError:
                with self._gate.upgraded():
                    self._env.set_mapsize(0)
                    self.map_bytes = self._env.info()["map_size"]
                    if self._max_bytes is not None and self.map_bytes > self._max_bytes:
                        self._env.set_mapsize(_cap_pages(self._max_bytes))  # or what is used
                        self.map_bytes = self._env.info()["map_size"]

    def _grow(self, full_at: int, limit_bytes: int | None) -> None:
        """Double the map that was full at `full_at` bytes, up to the limit and the cap."""
        with self._gate.exclusive():
            if self.map_bytes > full_at:
                return  # another thread has grown it meanwhile
            wanted = 2 * full_at
            if self._max_bytes is not None:
                wanted = min(wanted, _cap_pages(self._max_bytes))
            if limit_bytes is not None and min(wanted, _cap_pages(limit_bytes)) <= full_at:
                raise NoRoom(f"the KV cache in {self.path} has no room within {limit_bytes} bytes")
            if limit_bytes is not None:
                wanted = min(wanted, _cap_pages(limit_bytes))
            if wanted <= full_at:
                raise NoRoom(
                    f"the KV cache in {self.path} has reached its cap of {self._max_bytes} bytes; "
                    "raise the cap or prune it"
                )
            with _translated(self.path):
                failpoint("blocks.grow")
                self._env.set_mapsize(wanted)
                self.map_bytes = self._env.info()["map_size"]
                failpoint("blocks.grown")

    def _check_pages(self, databases: dict[str, dict[str, bool]], thorough: bool) -> None:
        """Raise StoreDamaged where LMDB would be led astray by a tree page (pages.py says why).

        Measured for SmolLM2's blocks: 20 ms where the store holds 1 GB, 0.3 s where it holds 20.
        """
        flags = {name.encode(): pages.flags_of(options) for name, options in databases.items()}
        with (self.path / DATA_FILE).open("rb") as file:
            while True:
                with self.read() as txn:  # keeps the snapshot's pages from being used again
                    try:
                        page_bytes = self._env.stat()["psize"]
                        pages.check(file.fileno(), txn.id(), page_bytes, flags, thorough=thorough)
                        return
                    except pages.SnapshotGone:
                        continue
                    except PagesDamaged as error:
                        raise StoreDamaged(f"{file.name} is damaged: {error}") from None

    def _cover_whole_file(self) -> None:
        """Make the file as long as its index says.

        Touching a mapped page beyond the end of the file kills the process (SIGBUS). After this,
        pages that were cut off read as zeros, which no digest and no page check accepts. A sound
        file may be short too: LMDB does not write a page that one transaction took and gave back.
        """
        page_bytes = self._env.stat()["psize"]

        def end_of_index() -> int:
            return int(self._env.info()["last_pgno"] + 1) * int(page_bytes)

        if _file_bytes(self.path) >= end_of_index():
            return
        if self.read_only:
            raise StoreDamaged(f"{self.path / DATA_FILE} has been cut short; open it for writing")
        with self._env.begin(write=True):  # no other process can be writing meanwhile
            if _file_bytes(self.path) < end_of_index():
                os.truncate(self.path / DATA_FILE, end_of_index())

    def _open_databases(self, databases: dict[str, dict[str, bool]]) -> dict[str, Any]:
        if self.read_only:
            found = {}
            for name, options in databases.items():
                try:
                    found[name] = self._env.open_db(name.encode(), create=False, **options)
                except lmdb.NotFoundError:
                    if name not in LATER:
                        raise StoreDamaged(f"{self.path / DATA_FILE} is no KV cache") from None
            return found
        with self._env.begin(write=True) as txn:
            return {
                name: self._env.open_db(name.encode(), txn=txn, **options)
                for name, options in databases.items()
            }


class _Read:
    """`Environment.read`. A class, because a generator costs more than the transaction."""

    __slots__ = ("_env", "_txn")

    def __init__(self, env: Environment) -> None:
        self._env = env

    def __enter__(self) -> Any:
        self._env._gate.enter()
        try:
            self._txn = self._env._begin(write=False)
        except BaseException as error:
            self._env._gate.leave()
            raise _as_ours(error, self._env.path) from None
        return self._env.seen(self._txn)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._txn.abort()
        finally:
            self._env._gate.leave()
        if isinstance(error, lmdb.Error):
            raise _as_ours(error, self._env.path) from None


class NoRoom(StoreFull):
    """The map may grow no further, or the pages that are free lie too scattered for a value."""


class _MapIsFull(Exception):
    """Inside `Environment` only: the write has to be repeated with a larger map."""


def remove_damaged(path: Path, damaged: int | None) -> None:
    """Delete the environment in `path`, if its data file is still `damaged`, see `held_open`.

    Raises StoreBusy where anybody has it open: who opens the new data file with the old lock file,
    or the other way round, would write at the same time as somebody else.
    """
    with _translated(path):
        users = Users(path, alone=True)
        try:
            if damaged is None or _is_same(damaged, path / DATA_FILE):
                for name in (DATA_FILE, LOCK_FILE):
                    (path / name).unlink(missing_ok=True)
        finally:
            users.leave()


@contextmanager
def held_open(path: Path) -> Iterator[int | None]:
    """The data file, open, None where there is none: as long as it is open, no other file can be
    taken for it."""
    try:
        file = os.open(path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def copy_compact(path: Path, folder: Path, room_bytes: int) -> None:
    """Write the environment in `path` into `folder` without its free pages.

    The caller must be the store's only user. Raises StoreFull where the copy takes more than
    `room_bytes`, before it is begun.
    """
    with _translated(path), lmdb.open(str(path), readonly=True, lock=False, max_dbs=8) as env:
        with env.begin() as txn:
            stats = [env.stat(), *(txn.stat(env.open_db(name, txn)) for name, _ in txn.cursor())]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        if (pages + 2) * stats[0]["psize"] > room_bytes:
            raise StoreFull(
                f"a compact copy of {path} takes {(pages + 2) * stats[0]['psize']} bytes and the "
                f"disk has {room_bytes}: free some, or prune the cache first"
            )
        env.copy(str(folder), compact=True)


def _reserve_lock_file(path: Path) -> None:
    """Take the disk space of a new lock file at once: LMDB would touch it page by page through a
    map, and on a disk that has filled up meanwhile that kills the process (SIGBUS).

    An existing one is never opened here: closing it would drop LMDB's locks of this process.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.posix_fallocate(file, 0, LOCK_FILE_BYTES)
    except OSError as error:
        path.unlink()
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system without it
            raise
    finally:
        os.close(file)


def _open(path: Path, map_bytes: int, num_databases: int, read_only: bool) -> Any:
    with suppress(FileNotFoundError), (path / DATA_FILE).open("rb") as file:
        try:
            pages.precheck(file.fileno())
        except PagesDamaged as error:
            raise StoreDamaged(f"{file.name} is damaged: {error}") from None
    options: dict[str, Any] = {
        "map_size": map_bytes,
        "max_dbs": num_databases,
        "max_readers": MAX_READERS,
        "max_spare_txns": 1,
        "mode": 0o700,
        "readonly": read_only,
        "create": not read_only,
        "metasync": False,  # a power cut may undo the last commit, and never harms an older one
        "readahead": True,  # off, cold reads were 10x slower
    }
    if not read_only:
        _reserve_lock_file(path / LOCK_FILE)
        return lmdb.open(str(path), **options)
    try:
        return lmdb.open(str(path), **options)
    except lmdb.ReadonlyError:  # the lock file cannot be written, so nobody can be writing here
        return lmdb.open(str(path), lock=False, **options)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """LMDB's and the system's errors as ours."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise _as_ours(error, path) from None
    except SystemError as error:  # py-lmdb's, where a deletion leaves a cursor on a damaged page
        if isinstance(error.__cause__, lmdb.Error):
            raise _as_ours(error.__cause__, path) from None
        raise


def _as_ours(error: BaseException, path: Path) -> BaseException:
    """What to raise instead of `error`."""
    cache, text = f"the KV cache in {path}", str(error)
    match error:
        case lmdb.MapFullError():
            return _MapIsFull()
        case lmdb.VersionMismatchError():
            return StoreVersionError(f"{cache} was written by a newer LMDB ({text}); delete it")
        case lmdb.DiskError() | lmdb.TxnFullError():
            return StoreFull(f"no room to write {cache}: {text}")
        case lmdb.ReadonlyError() | PermissionError():
            return StoreReadOnly(f"no permission to write {cache}: {text}")
        case lmdb.ReadersFullError():
            return StoreBusy(f"{cache} has too many readers; try again")
        case lmdb.LockError():
            return StoreBusy(f"{cache} is locked by another process: {text}")
        case lmdb.Error() if isinstance(error, _DAMAGE):
            return StoreDamaged(f"{path / DATA_FILE} is damaged: {text}")
        case lmdb.Error() if "already open in this process" in text:
            return StoreBusy(f"{cache} is already open in this process")
        case lmdb.Error() if "Read-only file system" in text:
            return StoreReadOnly(f"{cache} lies on a read-only file system")
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFull(f"no room to write {cache}: {text}")
        case lmdb.Error() | OSError() if "Input/output error" in text and _is_nearly_full(path):
            return StoreFull(f"no room to write {cache}: the disk is full")
        case lmdb.Error() | OSError():
            return StoreError(f"{cache} cannot be used: {text}")
    return error


def _is_nearly_full(path: Path) -> bool:
    """LMDB calls a write that came through in part an I/O error."""
    try:
        return disk_free_bytes(path) < NEARLY_FULL_BYTES
    except OSError:
        return False


_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.IncompatibleError,
    lmdb.BadDbiError,
    lmdb.BadTxnError,
)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _cap_pages(num_bytes: int) -> int:
    """The whole pages that a cap has room for."""
    return num_bytes // PAGE_BYTES * PAGE_BYTES


def _file_bytes(path: Path) -> int:
    try:
        return (path / DATA_FILE).stat().st_size
    except FileNotFoundError:
        return 0
