"""One page of LMDB's as it must be: what its bytes say, checked before anybody believes them.

The format is that of LMDB 0.9 (lmdb.h and mdb.c of https://git.openldap.org/openldap/openldap):

    page     number u64, pad u16, flags u16, lower u16, upper u16; then node offsets u16 up to
             `lower`, and the nodes from `upper` to the end of the page
    node     size or child's page number u32, flags u16 (upper part of a child's number), key size
             u16; key; data, or the number of the first page of a value that fills whole pages
    database pad u32, flags u16, depth u16, 3 page counts and the entries u64 each, root u64
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

META_PAGES = 2
PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
DATABASE = struct.Struct("<IHH5Q")
META = struct.Struct("<IIQQ")  # magic, version, address, map size
META_TAIL = struct.Struct("<QQ")  # last page, transaction
MAGIC, VERSION = 0xBEEFC0DE, 1
_BRANCH, LEAF, OVERFLOW, LEAF2, SUBPAGE = 0x01, 0x02, 0x04, 0x20, 0x40
DIRTY = 0x10  # left on pages inside of nodes
BIG, SUBDATABASE, DUPLICATES = 0x01, 0x02, 0x04
DUPSORT, INTEGER_KEY, DUPFIXED = 0x04, 0x08, 0x10
NO_PAGE = (1 << 64) - 1
MAX_DEPTH, _MAX_KEY_BYTES = 32, 511


class PagesDamaged(Exception):
    """A page is not what LMDB wrote; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One tree's entry in a meta page or in the main tree."""

    pad: int
    flags: int
    depth: int
    root: int


@dataclass(frozen=True, slots=True)
class Place:
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


def unused_part(page: bytes) -> tuple[int, int]:
    """Where a tree page holds nothing, between its offsets and its nodes; (0, 0) for LEAF2."""
    _, _, flags, lower, upper = PAGE.unpack_from(page)
    return (0, 0) if flags & LEAF2 else (lower, upper)


def branches(place: Place, page: bytes, min_keys: int, is_integer: bool) -> list[Place]:
    """The places of the pages below a branch page, at least min_keys of them."""
    number = place.number
    offsets = _offsets(number, page, _BRANCH)
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
            keys.append(sortable(page[at + _NODE.size : end], is_integer))
    place.check_order(keys)
    _check_no_gaps(number, page, offsets, ends)
    return [
        Place(child, low, high)
        for child, low, high in zip(children, keys, [*keys[1:], place.high], strict=True)
    ]


def leaf_keys(number: int, page: bytes, fixed_bytes: int | None) -> list[bytes]:
    """The keys of a leaf; fixed_bytes: it holds values of that size, and nothing else."""
    if fixed_bytes is not None:
        if page[: PAGE.size - 4] != PAGE.pack(number, fixed_bytes, LEAF | LEAF2, 0, 0)[:-4]:
            raise PagesDamaged(f"page {number} is not where it belongs")
        return fixed_values(number, page, fixed_bytes)
    offsets = _offsets(number, page, LEAF)
    if not offsets:
        raise PagesDamaged(f"page {number} is empty")
    nodes = ((at + _NODE.size, _NODE.unpack_from(page, at)[3]) for at in offsets)
    return [page[at : at + key_bytes] for at, key_bytes in nodes]


def leaf_nodes(number: int, page: bytes) -> Iterator[tuple[bytes, int, int, int]]:
    """(key, where the data begins, its bytes, flags) of a leaf's nodes, none outside of it; that
    they leave no gap is known behind the last one."""
    offsets = _offsets(number, page, LEAF)
    ends = []
    for at in offsets:
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        size = low | high << 16
        data = at + _NODE.size + key_bytes
        inside = 8 if flags & BIG else size
        if not 0 < key_bytes <= _MAX_KEY_BYTES or data + inside > len(page) or flags > 7:
            raise PagesDamaged(f"page {number} has a node that leaves it")
        yield page[at + _NODE.size : data], data, size, flags
        ends.append(data + inside)
    _check_no_gaps(number, page, offsets, ends)


def _offsets(number: int, page: bytes, kind: int) -> tuple[int, ...]:
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


def fixed_values(number: int, page: bytes, size: int) -> list[bytes]:
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


def sortable(key: bytes, is_integer: bool) -> bytes:
    """LMDB compares keys as bytes, or as integers, which are little-endian."""
    return key[::-1] if is_integer else key


def record_at(page: bytes, at: int) -> Record:
    pad, flags, depth, _, _, _, _, root = DATABASE.unpack_from(page, at)
    return Record(pad, flags, depth, root)
