"""Memory of a mapped file: giving back what was copied out of it."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache

from torch import Tensor

_PAGE = mmap.PAGESIZE


def drop_pages(weight: object) -> None:
    """Let go of the pages that the file of a tensor, or of the parts of a weight, was read into,
    where it is a mapped one: they stay in the system's page cache, and come again if they are read
    again. Whoever has made a copy in another layout would else hold both."""
    if isinstance(weight, Tensor):
        _drop(weight)
    elif isinstance(weight, tuple):
        for part in weight:
            drop_pages(part)


def _drop(tensor: Tensor) -> None:
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    stop = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    if tensor.device.type == "cpu" and stop > start and _is_mapped_file(start, stop):
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def _is_mapped_file(start: int, stop: int) -> bool:
    """Whether the whole stretch is one mapping of a file. (What madvise would do to any other
    memory is to fill it with zeros.)"""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, inode, *_ = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= start < last:
                return inode != "0" and stop <= last
    return False


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
