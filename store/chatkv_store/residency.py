"""Which values the system has in memory, found without reading them.

py-lmdb touches every page of a value that it hands out, so whoever asks it where a value lies has
brought all of it in. Therefore the value is looked up here, in the tree pages of one snapshot, and
the pages that it fills are mapped and not touched.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from chatkv_store.page_cache import num_in_memory
from chatkv_store.page_format import (
    BIG,
    DATABASE,
    MAX_DEPTH,
    META,
    META_PAGES,
    META_TAIL,
    NO_PAGE,
    PAGE,
    SUBDATABASE,
    PagesDamaged,
    Place,
    Record,
    branches,
    leaf_nodes,
    record_at,
)


class ValuePages:
    """The values of the database `name` in snapshot `txnid` of a data file, which a read
    transaction must be holding. What it says is nobody's to rely on: a snapshot that is gone, or a
    damaged page, is a value that is not found."""

    def __init__(self, file: int, txnid: int, page_bytes: int, name: bytes) -> None:
        self._file, self._page_bytes = file, page_bytes
        with suppress(OSError, AttributeError):  # or a look at one page brings in those behind it
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        self._read: dict[int, bytes] = {}  # tree pages by number: those near the root serve all
        self._record = self._database(txnid, name)

    def in_memory(self, key: bytes) -> tuple[int, int] | None:
        """Of the pages of a value: how many are in memory, and how many there are. None where it is
        not found, or shares its page with others, or the system does not tell."""
        import numpy as np

        pages = self.pages(key)
        if pages is None:
            return None
        num_bytes = len(pages) * self._page_bytes
        try:
            mapped = mmap.mmap(
                self._file, num_bytes, access=mmap.ACCESS_READ, offset=pages[0] * self._page_bytes
            )
        except (OSError, ValueError, OverflowError):  # behind the file's end, or smaller pages
            return None
        with mapped:
            start = np.frombuffer(mapped, np.uint8).ctypes.data
            return num_in_memory(start, start + num_bytes)

    def pages(self, key: bytes) -> range | None:
        """Those that a value fills, the first of which begins with 16 bytes of LMDB's."""
        try:
            node = self._node(self._record, key)
        except PagesDamaged:
            return None
        if node is None:
            return None
        number, at, size, flags = node
        if not flags & BIG:
            return None
        first = int.from_bytes(self._page(number)[at : at + 8], "little")
        return range(first, first - (-(PAGE.size + size) // self._page_bytes))

    def _database(self, txnid: int, name: bytes) -> Record | None:
        at = PAGE.size + META.size
        for number in range(META_PAGES):
            try:
                page = self._page(number)
                if META_TAIL.unpack_from(page, at + 2 * DATABASE.size)[1] == txnid:
                    node = self._node(record_at(page, at + DATABASE.size), name)
                    if node is not None and node[2:] == (DATABASE.size, SUBDATABASE):
                        return record_at(self._page(node[0]), node[1])
            except PagesDamaged:
                break
        return None

    def _node(self, record: Record | None, key: bytes) -> tuple[int, int, int, int] | None:
        """The leaf's number, where the data of `key` begins in it, its bytes and flags."""
        if record is None or record.root == NO_PAGE or record.depth > MAX_DEPTH:
            return None
        place = Place(record.root, b"", None)
        for _ in range(record.depth - 1):
            below = branches(place, self._page(place.number), 1, is_integer=False)
            place = [one for one in below if one.low <= key][-1]
        for found, at, size, flags in leaf_nodes(place.number, self._page(place.number)):
            if found == key:
                return place.number, at, size, flags
        return None

    def _page(self, number: int) -> bytes:
        if number not in self._read:
            page = b""
            with suppress(OSError, OverflowError):
                page = os.pread(self._file, self._page_bytes, number * self._page_bytes)
            if len(page) < self._page_bytes:
                raise PagesDamaged(f"page {number} is missing")
            self._read[number] = page
        return self._read[number]
