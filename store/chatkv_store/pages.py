"""Looking at LMDB's pages from outside, before LMDB follows them.

LMDB trusts its tree pages: a flipped bit in one can lead it outside of its map, which kills the
process (SIGSEGV, SIGBUS), or make it hand out a page that is in use. So the trees of one snapshot
are walked here first, with `pread`, which cannot kill: every page is what its parent says, every
node lies inside its page, every page number inside the file, and no page has two owners, the list
of free pages included. Values are not read; their digests are checked when they are.
Only a thorough walk looks at the pages on which they begin.

The format is that of LMDB 0.9 (lmdb.h and mdb.c of https://git.openldap.org/openldap/openldap):

    page     number u64, pad u16, flags u16, lower u16, upper u16; then node offsets u16 up to
             `lower`, and the nodes from `upper` to the end of the page
    node     size or child's page number u32, flags u16 (upper part of a child's number), key size
             u16; key; data, or the number of the first page of a value that fills whole pages
    database pad u32, flags u16, depth u16, 3 page counts and the entries u64 each, root u64
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

META_PAGES = 2
PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_DATABASE = struct.Struct("<IHH5Q")
_META = struct.Struct("<IIQQ")  # magic, version, address, map size
_META_TAIL = struct.Struct("<QQ")  # last page, transaction
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW, _LEAF2, _SUBPAGE = 0x01, 0x02, 0x04, 0x20, 0x40
_DIRTY = 0x10  # left on pages inside of nodes
_BIG, _SUBDATABASE, _DUPLICATES = 0x01, 0x02, 0x04
_DUPSORT, _INTEGER_KEY, _DUPFIXED = 0x04, 0x08, 0x10
_NO_PAGE = (1 << 64) - 1
_MAX_DEPTH, _MAX_KEY_BYTES = 32, 511


class PagesDamaged(Exception):
    """A page is not what LMDB wrote; the text says which and why."""


class SnapshotGone(Exception):
    """The snapshot has been replaced meanwhile: look at the new one."""


@dataclass(frozen=True, slots=True)
class _Record:
    """One tree's entry in a meta page or in the main tree."""

    pad: int
    flags: int
    depth: int
    root: int


@dataclass(frozen=True, slots=True)
class _Place:
    """A page of a tree, and between which keys those below it must lie."""

    number: int
    low: bytes
    high: bytes | None  # excluded; None: no end

    def check_order(self, keys: list[bytes]) -> None:
        """A search that is led astray may never end."""
        if (
            any(one >= other for one, other in pairwise(keys))
            or keys[0] < self.low
            or (self.high is not None and keys[-1] >= self.high)
        ):
            raise PagesDamaged(f"page {self.number} is not sorted")


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
    head = os.pread(file, PAGE.size + _META.size + _DATABASE.size, 0)
    if len(head) < PAGE.size + _META.size + _DATABASE.size:
        return
    magic, version, _, _ = _META.unpack_from(head, PAGE.size)
    pad, flags, *_ = _DATABASE.unpack_from(head, PAGE.size + _META.size)
    if (magic, version) != (_MAGIC, _VERSION):
        return  # LMDB says so itself
    if not 512 <= pad <= 65536 or pad & (pad - 1) or flags & ~_INTEGER_KEY:
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
        at = PAGE.size + _META.size
        last_page, found = _META_TAIL.unpack_from(page, at + 2 * _DATABASE.size)
        if found == txnid:
            break
    else:
        raise SnapshotGone
    map_bytes = _META.unpack_from(page, PAGE.size)[3]
    if not META_PAGES - 1 <= last_page < max(map_bytes, os.fstat(file).st_size) // page_bytes:
        raise PagesDamaged(f"it ends at page {last_page}, outside of its map")
    free, main = (_record(page, at + n * _DATABASE.size) for n in range(2))
    walk = _Walk(file, Pages(page_bytes, last_page + 1), flags)
    if free.flags != _INTEGER_KEY or main.flags != 0:
        raise PagesDamaged("its roots are of another kind")
    walk.free_list(free, txnid)
    walk.named_databases(main)
    walk.claim_free()
    if thorough:
        walk.value_heads()
    return walk.pages


def flags_of(options: Mapping[str, bool]) -> int:
    """LMDB's flags of a database that is opened with `options`."""
    known = {"dupsort": _DUPSORT, "dupfixed": _DUPFIXED, "integerkey": _INTEGER_KEY}
    return sum(known[name] for name, is_on in options.items() if is_on)


def unused_part(page: bytes) -> tuple[int, int]:
    """Where a tree page holds nothing, between its offsets and its nodes; (0, 0) for LEAF2."""
    _, _, flags, lower, upper = PAGE.unpack_from(page)
    return (0, 0) if flags & _LEAF2 else (lower, upper)


class _Walk:
    def __init__(self, file: int, pages: Pages, flags: Mapping[bytes, int]) -> None:
        self._file = file
        self.pages = pages
        self._flags = flags
        self._used = bytearray(pages.num_pages)
        self._used[:META_PAGES] = b"\1" * META_PAGES

    # --- the trees ------------------------------------------------------------------------------

    def free_list(self, record: _Record, txnid: int) -> None:
        """Pages that may be used again, by the transaction that freed them."""
        before = 0
        for number, page in self._leaves(record, min_branch_keys=1):
            for key, data, flags in self._nodes(number, page):
                if len(key) != 8 or flags & ~_BIG:
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

    def named_databases(self, main: _Record) -> None:
        for number, page in self._leaves(main):
            for name, at, size, flags in self._raw_nodes(number, page):
                if flags != _SUBDATABASE or size != _DATABASE.size:
                    raise PagesDamaged(f"page {number} names something that is no database")
                record = _record(page, at)
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
            if (number, flags) != (first, _OVERFLOW) or said < count:
                raise PagesDamaged(f"page {first} does not begin a value")
            self._claim_value(first + count, said - count)

    def _database(self, record: _Record) -> None:
        for number, page in self._leaves(record):
            for _, at, size, flags in self._raw_nodes(number, page):
                if not flags & _DUPLICATES:
                    if flags & _SUBDATABASE:
                        raise PagesDamaged(f"page {number} holds a node of another kind")
                elif not record.flags & _DUPSORT:
                    raise PagesDamaged(f"page {number} holds a node of another kind")
                elif flags & _SUBDATABASE:
                    if size != _DATABASE.size:
                        raise PagesDamaged(f"page {number} holds a node that is cut short")
                    self._duplicates(_record(page, at), record)
                else:
                    self._subpage(number, page[at : at + size], record)

    def _duplicates(self, record: _Record, outer: _Record) -> None:
        """The tree of one key's values, which all have the same size (dupfixed)."""
        if not outer.flags & _DUPFIXED or record.flags != _DUPFIXED:
            raise PagesDamaged("a key's values are of another kind")
        for _ in self._leaves(record, fixed_bytes=record.pad):
            pass

    def _subpage(self, number: int, page: bytes, outer: _Record) -> None:
        """A few values of one key, as a page inside of its node."""
        if len(page) < PAGE.size:
            raise PagesDamaged(f"page {number} holds a node that is cut short")
        _, pad, flags, _, _ = PAGE.unpack_from(page)
        if not outer.flags & _DUPFIXED or flags & ~_DIRTY != _LEAF | _SUBPAGE | _LEAF2:
            raise PagesDamaged(f"page {number} holds values of another kind")
        values = _fixed_values(number, page, pad)
        _Place(number, b"", None).check_order(values)

    # --- pages ----------------------------------------------------------------------------------

    def _leaves(
        self, record: _Record, min_branch_keys: int = 2, fixed_bytes: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """A tree's leaves by number and content, each checked and claimed, as are its branches."""
        if record.root == _NO_PAGE:
            if record.depth:
                raise PagesDamaged("a tree without root is not empty")
            return
        if not 1 <= record.depth <= _MAX_DEPTH:
            raise PagesDamaged(f"a tree is {record.depth} pages deep")
        is_integer = bool(record.flags & _INTEGER_KEY)
        level = [_Place(record.root, b"", None)]
        for _ in range(record.depth - 1):
            below: list[_Place] = []
            for place in level:
                self._claim(place.number, 1)
                below += self._children(place, min_branch_keys, is_integer)
            level = below
        for place in level:
            self._claim(place.number, 1)
            page = self._page(place.number)
            keys = self._leaf_keys(place.number, page, fixed_bytes)
            place.check_order([_sortable(key, is_integer) for key in keys])
            yield place.number, page

    def _children(self, place: _Place, min_keys: int, is_integer: bool) -> list[_Place]:
        number = place.number
        page = self._page(number)
        offsets = self._offsets(number, page, _BRANCH)
        if len(offsets) < min_keys:
            raise PagesDamaged(f"page {number} has {len(offsets)} branches")
        keys, children, ends = [place.low], [], []
        for index, at in enumerate(offsets):
            low, high, top, key_bytes = _NODE.unpack_from(page, at)
            end = at + _NODE.size + key_bytes
            if end > len(page) or key_bytes > _MAX_KEY_BYTES:
                raise PagesDamaged(f"page {number} has a key that leaves it")
            ends.append(end)
            children.append(low | high << 16 | top << 32)
            if index:  # what stands before the first branch is not looked at
                keys.append(_sortable(page[at + _NODE.size : end], is_integer))
        place.check_order(keys)
        _check_no_gaps(number, page, offsets, ends)
        return [
            _Place(child, low, high)
            for child, low, high in zip(children, keys, [*keys[1:], place.high], strict=True)
        ]

    def _leaf_keys(self, number: int, page: bytes, fixed_bytes: int | None) -> list[bytes]:
        if fixed_bytes is not None:
            if page[: PAGE.size - 4] != PAGE.pack(number, fixed_bytes, _LEAF | _LEAF2, 0, 0)[:-4]:
                raise PagesDamaged(f"page {number} is not where it belongs")
            return _fixed_values(number, page, fixed_bytes)
        offsets = self._offsets(number, page, _LEAF)
        if not offsets:
            raise PagesDamaged(f"page {number} is empty")
        nodes = ((at + _NODE.size, _NODE.unpack_from(page, at)[3]) for at in offsets)
        return [page[at : at + key_bytes] for at, key_bytes in nodes]

    def _offsets(self, number: int, page: bytes, kind: int) -> tuple[int, ...]:
        """Where the nodes of a page begin, all of them inside it."""
        found, _, flags, lower, upper = PAGE.unpack_from(page)
        if found != number or flags != kind:
            raise PagesDamaged(f"page {number} is not where it belongs")
        if not PAGE.size <= lower <= upper <= len(page) or lower % 2:
            raise PagesDamaged(f"page {number} is longer than a page")
        offsets = struct.unpack_from(f"<{(lower - PAGE.size) // 2}H", page, PAGE.size)
        if offsets and not upper <= min(offsets) <= max(offsets) <= len(page) - _NODE.size:
            raise PagesDamaged(f"page {number} has a node outside of it")
        return offsets

    def _raw_nodes(self, number: int, page: bytes) -> Iterator[tuple[bytes, int, int, int]]:
        """(key, where the data begins, its bytes, flags) of a leaf's nodes; claims big values."""
        page_bytes = len(page)
        offsets = self._offsets(number, page, _LEAF)
        ends = []
        for at in offsets:
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            size = low | high << 16
            data = at + _NODE.size + key_bytes
            inside = 8 if flags & _BIG else size
            if not 0 < key_bytes <= _MAX_KEY_BYTES or data + inside > page_bytes or flags > 7:
                raise PagesDamaged(f"page {number} has a node that leaves it")
            if flags & _BIG:
                first = int.from_bytes(page[data : data + 8], "little")
                count = -(-(PAGE.size + size) // page_bytes)
                self._claim_value(first, count)
                self.pages.values.append((first, count))
            ends.append(data + inside)
            yield page[at + _NODE.size : data], data, size, flags
        _check_no_gaps(number, page, offsets, ends)

    def _nodes(self, number: int, page: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, data and flags of a leaf's nodes; big values are read too."""
        for key, at, size, flags in self._raw_nodes(number, page):
            if not flags & _BIG:
                yield key, page[at : at + size], flags
                continue
            first = int.from_bytes(page[at : at + 8], "little")
            start = first * len(page)
            head = os.pread(self._file, PAGE.size + size, start)
            if len(head) < PAGE.size + size or PAGE.unpack_from(head)[2] != _OVERFLOW:
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


def _check_no_gaps(number: int, page: bytes, offsets: Sequence[int], ends: Sequence[int]) -> None:
    """Nodes fill a page from `upper` to its end, each padded to an even length.

    LMDB deletes a node by moving those before it. Were one longer than its place, that would move
    its neighbours too, and take with them where their values lie.
    """
    expected = PAGE.unpack_from(page)[4]
    for at, end in sorted(zip(offsets, ends, strict=True)):
        if at != expected:
            raise PagesDamaged(f"page {number} has nodes that overlap or leave a gap")
        expected = end + end % 2
    if expected != len(page):
        raise PagesDamaged(f"page {number} has nodes that overlap or leave a gap")


def _fixed_values(number: int, page: bytes, size: int) -> list[bytes]:
    """The values, of one size, that a LEAF2 page holds."""
    _, _, _, lower, upper = PAGE.unpack_from(page)
    count = (lower - PAGE.size) // 2
    if not PAGE.size < lower <= upper <= len(page) or PAGE.size + count * size > len(page):
        raise PagesDamaged(f"page {number} holds values that make no sense")
    if not count or not size:
        raise PagesDamaged(f"page {number} holds no values")
    if upper != len(page) - count * (size - 2):  # how LMDB counts the room that is left
        raise PagesDamaged(f"page {number} holds values that make no sense")
    return [page[at : at + size] for at in range(PAGE.size, PAGE.size + count * size, size)]


def _sortable(key: bytes, is_integer: bool) -> bytes:
    """LMDB compares keys as bytes, or as integers, which are little-endian."""
    return key[::-1] if is_integer else key


def _record(page: bytes, at: int) -> _Record:
    pad, flags, depth, _, _, _, _, root = _DATABASE.unpack_from(page, at)
    return _Record(pad, flags, depth, root)
