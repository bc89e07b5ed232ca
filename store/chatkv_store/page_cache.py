"""Which pages the system has in memory, and having it let go of some, so that what comes next finds
them as after a start."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_MADV_DONTNEED = 4


def forget(path: Path) -> bool:
    """Drop a file from the page cache; False where the system has no way to.

    Pages that a process has mapped are not dropped: those of this process's own maps, LMDB's, are
    let go of before. The next look finds them again.
    """
    with suppress(OSError, AttributeError):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            _unmap_pages(path.resolve())
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        return True
    return False


def let_go(start: int, stop: int) -> None:
    """Give the pages that lie whole between two addresses back: those of a file are read again when
    they are looked at, others are zeros then."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    first, last = -(-start // page_bytes) * page_bytes, stop // page_bytes * page_bytes
    if first < last:
        with suppress(OSError, AttributeError):
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def num_in_memory(start: int, stop: int) -> tuple[int, int] | None:
    """Of the pages that a mapped file has between two addresses: how many are in memory, and how
    many there are. None where the system does not tell; of a file that this user may not write,
    Linux says that all are."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    first = start // page_bytes * page_bytes
    count = -(-(stop - first) // page_bytes)
    seen = (ctypes.c_ubyte * count)()
    with suppress(OSError, AttributeError):
        mincore = ctypes.CDLL(None).mincore
        if mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * page_bytes), seen) == 0:
            return sum(one & 1 for one in seen), count
    return None


def _unmap_pages(path: Path) -> None:
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            place, *_, name = line.rstrip("\n").split(maxsplit=5)
            if name == str(path):
                let_go(*(int(end, 16) for end in place.split("-")))
