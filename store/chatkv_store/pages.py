"""Looking at LMDB's pages from outside, before LMDB follows them.

LMDB trusts its tree pages: a flipped bit in one can lead it outside of its map, which kills the
process (SIGSEGV, SIGBUS), or make it hand out a page that is in use. So the trees of one snapshot
are walked here first, with `pread`, which cannot kill: every page is what its parent says, every
node lies inside its page, every page number inside the file, and no page has two owners, the list
of free pages included. Values are not read; their digests are checked when they are.
Only a thorough walk looks at the pages on which they begin.

`page_format` says what one page must be.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from chatkv_store.page_format import (
    BIG,
    DATABASE,
    DIRTY,
    DUPFIXED,
    DUPLICATES,
    DUPSORT,
    INTEGER_KEY,
    LEAF,
    LEAF2,
    MAGIC,
    MAX_DEPTH,
    META,
    META_PAGES,
    META_TAIL,
    NO_PAGE,
    OVERFLOW,
    PAGE,
    SUBDATABASE,
    SUBPAGE,
    VERSION,
    PagesDamaged,
    Place,
    Record,
    branches,
    fixed_values,
    leaf_keys,
    leaf_nodes,
    record_at,
    sortable,
)


class SnapshotGone(Exception):
    """The snapshot has been replaced meanwhile: look at the new one."""


@dataclass
class Pages:
    """What a snapshot's pages are used for."""

    page_bytes: int
    num_pages: int
    tree: list[int] = field(default_factory=list)  # of all trees, the free list's included
    free: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (freed by, numbers)
    values: list[tuple[int, int]] = field(default_factory=list)  # (first, count) of big ones


def precheck(file: int) -> None:
    """What opening the environment relies on, before it is opened; nothing for a short file."""
    head = os.pread(file, PAGE.size + META.size + DATABASE.size, 0)
    if len(head) < PAGE.size + META.size + DATABASE.size:
        return
    magic, version, _, _ = META.unpack_from(head, PAGE.size)
    pad, flags, *_ = DATABASE.unpack_from(head, PAGE.size + META.size)
    if (magic, version) != (MAGIC, VERSION):
        return  # LMDB says so itself
    if not 512 <= pad <= 65536 or pad & (pad - 1) or flags & ~INTEGER_KEY:
        raise PagesDamaged("its first page makes no sense")


def check(
    file: int, txnid: int, page_bytes: int, flags: Mapping[bytes, int], *, thorough: bool = False
) -> Pages:
    """Walk the trees of snapshot `txnid`, which a read transaction must be holding.

    `flags` are those of the named databases (`flags_of`). A `thorough` walk reads the head of every
    value too, somewhere else on the disk each. Raises PagesDamaged or SnapshotGone.
    """
    for number in range(META_PAGES):
        page = os.pread(file, page_bytes, number * page_bytes)
        if len(page) < page_bytes:
            raise PagesDamaged(f"page {number} is missing")
        at = PAGE.size + META.size
        last_page, found = META_TAIL.unpack_from(page, at + 2 * DATABASE.size)
        if found == txnid:
            break
    else:
        raise SnapshotGone
    map_bytes = META.unpack_from(page, PAGE.size)[3]
    if not META_PAGES - 1 <= last_page < max(map_bytes, os.fstat(file).st_size) // page_bytes:
        raise PagesDamaged(f"it ends at page {last_page}, outside of its map")
    free, main = (record_at(page, at + n * DATABASE.size) for n in range(2))
    walk = _Walk(file, Pages(page_bytes, last_page + 1), flags)
    if free.flags != INTEGER_KEY or main.flags != 0:
        raise PagesDamaged("its roots are of another kind")
    walk.free_list(free, txnid)
    walk.named_databases(main)
    walk.claim_free()
    if thorough:
        walk.value_heads()
    return walk.pages


def flags_of(options: Mapping[str, bool]) -> int:
    """LMDB's flags of a database that is opened with `options`."""
    known = {"dupsort": DUPSORT, "dupfixed": DUPFIXED, "integerkey": INTEGER_KEY}
    return sum(known[name] for name, is_on in options.items() if is_on)


class _Walk:
    def __init__(self, file: int, pages: Pages, flags: Mapping[bytes, int]) -> None:
        self._file = file
        self.pages = pages
        self._flags = flags
        self._used = bytearray(pages.num_pages)
        self._used[:META_PAGES] = b"\1" * META_PAGES

    # --- the trees ------------------------------------------------------------------------------

    def free_list(self, record: Record, txnid: int) -> None:
        """Pages that may be used again, by the transaction that freed them."""
        before = 0
        for number, page in self._leaves(record, min_branch_keys=1):
            for key, data, flags in self._nodes(number, page):
                if len(key) != 8 or flags & ~BIG:
                    raise PagesDamaged(f"page {number} of the free list makes no sense")
                freed_by = int.from_bytes(key, "little")
                if not before < freed_by <= txnid or len(data) < 8:
                    raise PagesDamaged(f"page {number} of the free list is out of order")
                before = freed_by
                count = int.from_bytes(data[:8], "little")
                if len(data) != 8 * (count + 1):
                    raise PagesDamaged(f"page {number} of the free list is cut short")
                numbers = struct.unpack_from(f"<{count}Q", data, 8)
                if any(one <= other for one, other in pairwise(numbers)):
                    raise PagesDamaged(f"page {number} of the free list is not sorted")
                self.pages.free.append((freed_by, numbers))

    def named_databases(self, main: Record) -> None:
        for number, page in self._leaves(main):
            for name, at, size, flags in self._raw_nodes(number, page):
                if flags != SUBDATABASE or size != DATABASE.size:
                    raise PagesDamaged(f"page {number} names something that is no database")
                record = record_at(page, at)
                if record.flags != self._flags.get(name, record.flags):
                    raise PagesDamaged(f"database {name!r} is of another kind")
                self._database(record)

    def claim_free(self) -> None:
        """No page is free and in use, or free twice. After all trees have claimed theirs."""
        used, end = self._used, self.pages.num_pages
        for _, numbers in self.pages.free:
            if numbers and not META_PAGES <= numbers[-1] <= numbers[0] < end:
                raise PagesDamaged("the free list names a page outside of the file")
            for number in numbers:
                if used[number]:
                    raise PagesDamaged(f"page {number} is free and in use")
                used[number] = 1

    def value_heads(self) -> None:
        """Each value has as many pages as its head says, and no other has them. LMDB believes the
        head when the value is deleted: it frees that many."""
        for first, count in self.pages.values:
            head = os.pread(self._file, PAGE.size, first * self.pages.page_bytes)
            if len(head) < PAGE.size:
                raise PagesDamaged(f"page {first} is missing")
            number, _, flags, low, high = PAGE.unpack(head)
            said = low | high << 16  # more than it needs, where a larger value was there before
            if (number, flags) != (first, OVERFLOW) or said < count:
                raise PagesDamaged(f"page {first} does not begin a value")
            self._claim_value(first + count, said - count)

    def _database(self, record: Record) -> None:
        for number, page in self._leaves(record):
            for _, at, size, flags in self._raw_nodes(number, page):
                if not flags & DUPLICATES:
                    if flags & SUBDATABASE:
                        raise PagesDamaged(f"page {number} holds a node of another kind")
                elif not record.flags & DUPSORT:
                    raise PagesDamaged(f"page {number} holds a node of another kind")
                elif flags & SUBDATABASE:
                    if size != DATABASE.size:
                        raise PagesDamaged(f"page {number} holds a node that is cut short")
                    self._duplicates(record_at(page, at), record)
                else:
                    self._subpage(number, page[at : at + size], record)

    def _duplicates(self, record: Record, outer: Record) -> None:
        """The tree of one key's values, which all have the same size (dupfixed)."""
        if not outer.flags & DUPFIXED or record.flags != DUPFIXED:
            raise PagesDamaged("a key's values are of another kind")
        for _ in self._leaves(record, fixed_bytes=record.pad):
            pass

    def _subpage(self, number: int, page: bytes, outer: Record) -> None:
        """A few values of one key, as a page inside of its node."""
        if len(page) < PAGE.size:
            raise PagesDamaged(f"page {number} holds a node that is cut short")
        _, pad, flags, _, _ = PAGE.unpack_from(page)
        if not outer.flags & DUPFIXED or flags & ~DIRTY != LEAF | SUBPAGE | LEAF2:
            raise PagesDamaged(f"page {number} holds values of another kind")
        values = fixed_values(number, page, pad)
        Place(number, b"", None).check_order(values)

    # --- pages ----------------------------------------------------------------------------------

    def _leaves(
        self, record: Record, min_branch_keys: int = 2, fixed_bytes: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """A tree's leaves by number and content, each checked and claimed, as are its branches."""
        if record.root == NO_PAGE:
            if record.depth:
                raise PagesDamaged("a tree without root is not empty")
            return
        if not 1 <= record.depth <= MAX_DEPTH:
            raise PagesDamaged(f"a tree is {record.depth} pages deep")
        is_integer = bool(record.flags & INTEGER_KEY)
        level = [Place(record.root, b"", None)]
        for _ in range(record.depth - 1):
            below: list[Place] = []
            for place in level:
                self._claim(place.number, 1)
                page = self._page(place.number)
                below += branches(place, page, min_branch_keys, is_integer)
            level = below
        for place in level:
            self._claim(place.number, 1)
            page = self._page(place.number)
            keys = leaf_keys(place.number, page, fixed_bytes)
            place.check_order([sortable(key, is_integer) for key in keys])
            yield place.number, page

    def _raw_nodes(self, number: int, page: bytes) -> Iterator[tuple[bytes, int, int, int]]:
        """A leaf's nodes; claims big values."""
        for node in leaf_nodes(number, page):
            _, at, size, flags = node
            if flags & BIG:
                first = int.from_bytes(page[at : at + 8], "little")
                count = -(-(PAGE.size + size) // len(page))
                self._claim_value(first, count)
                self.pages.values.append((first, count))
            yield node

    def _nodes(self, number: int, page: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, data and flags of a leaf's nodes; big values are read too."""
        for key, at, size, flags in self._raw_nodes(number, page):
            if not flags & BIG:
                yield key, page[at : at + size], flags
                continue
            first = int.from_bytes(page[at : at + 8], "little")
            start = first * len(page)
            head = os.pread(self._file, PAGE.size + size, start)
            if len(head) < PAGE.size + size or PAGE.unpack_from(head)[2] != OVERFLOW:
                raise PagesDamaged(f"page {first} holds no value")
            yield key, head[PAGE.size :], flags

    def _page(self, number: int) -> bytes:
        size = self.pages.page_bytes
        page = os.pread(self._file, size, number * size)
        if len(page) < size:
            raise PagesDamaged(f"page {number} is missing")
        return page

    def _claim(self, number: int, count: int) -> None:
        self._claim_value(number, count)
        self.pages.tree.append(number)

    def _claim_value(self, first: int, count: int) -> None:
        if not META_PAGES <= first <= first + count <= self.pages.num_pages:
            raise PagesDamaged(f"page {first} lies outside of the file")
        if 1 in self._used[first : first + count]:
            raise PagesDamaged(f"page {first} has two owners")
        self._used[first : first + count] = b"\1" * count
