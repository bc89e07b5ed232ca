"""Giving free pages back to the file system: a compact copy takes the place of the file.

The copy is written beside the file and synced, then renamed over it: a process that dies on the
way leaves the old file or the new one, and at most a folder that the next open removes. All of it
happens alone (users.py): somebody who has the old file open would go on writing into nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from chatkv_store.budget import disk_free_bytes
from chatkv_store.environment import COMPACTION_FOLDER, DATA_FILE, copy_compact
from chatkv_store.errors import StoreError, StoreFull, StoreReadOnly
from chatkv_store.users import Users

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Compacted:
    """Bytes of the data file."""

    before_bytes: int
    after_bytes: int


def compact(path: Path) -> Compacted:
    """Rewrite the store in `path` without its free pages.

    Raises StoreBusy where anybody has it open, StoreFull where the disk has no room for the copy,
    StoreReadOnly, StoreDamaged or StoreError; the store then is as it was.
    """
    data, folder = path / DATA_FILE, path / COMPACTION_FOLDER
    try:
        users = Users(path, alone=True)
    except OSError as error:
        raise StoreReadOnly(f"{path} cannot be written: {error.strerror}") from None
    try:
        before = data.stat().st_size
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        copy_compact(path, folder, room_bytes=disk_free_bytes(path))
        copy = folder / DATA_FILE
        copy.chmod(0o600)
        _sync(copy)
        os.rename(copy, data)
        _sync(path)
        return Compacted(before, data.stat().st_size)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StoreFull(f"no room for a compact copy of the KV cache in {path}") from None
        raise StoreError(f"the KV cache in {path} cannot be compacted: {error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        users.leave()


def _sync(path: Path) -> None:
    """Have the file, or the names in the folder, on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
