"""Checking a whole block store, and dropping what is wrong with it.

A finding never means a wrong answer: every read checks the same things and treats what fails as a
miss. `verify` finds it before it costs a recomputation, and gives its bytes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from chatkv_store import header as headers
from chatkv_store.blocks import AT_ONCE
from chatkv_store.header import BlockHeader, HeaderDamaged
from chatkv_store.keys import ID_BYTES, KEY_BYTES
from chatkv_store.tables import child_entry, value_key

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore

Kind = Literal[
    "header",  # a header that cannot be read, or stands under another's key
    "value",  # a value that is missing or not as its header says
    "orphan",  # a value without a block
    "link",  # a parent's entry for a child that is not there, or a block without its entry
    "content",  # KV that is not its tokens', which only computing it again can find
]


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    key: str  # of the block, in hex
    detail: str
    num_bytes: int = 0  # payload bytes that a repair gives back


def verify(
    store: BlockStore,
    repair: bool,
    keys: Collection[bytes] | None = None,
    reads_values: bool = True,
) -> list[Finding]:
    """Every finding of `store`; with `repair`, each is gone afterwards.

    With `keys`, only what is stored under these is looked at; a key without a block is none.
    Without `reads_values`, values are looked at for being there and as long as they should be:
    that takes a hundredth of the time, and finds no flipped bit.

    Works in short transactions while others write. A block that is stored in the very moment of
    its repair may be dropped with the damage, which costs time only.
    """
    findings: list[Finding] = []
    bad: list[bytes] = []
    unlinked: list[BlockHeader] = []
    for key, packed in store.scan("blocks") if keys is None else stored(store, keys):
        try:
            header = headers.unpack(packed)
            if header.key != key:
                raise HeaderDamaged("it belongs to another key")
        except HeaderDamaged as error:
            findings.append(Finding("header", key.hex(), str(error), _payload_bytes(store, key)))
            bad.append(key)
            continue
        wrong, has_link = _looked_at(store, key, header, reads_values)
        if wrong is not None:
            findings.append(Finding("value", key.hex(), wrong, _payload_bytes(store, key)))
            bad.append(key)
        elif not has_link:
            findings.append(Finding("link", key.hex(), "its parent does not know it"))
            unlinked.append(header)
    orphans = _orphans(store) if keys is None else []
    findings += [
        Finding("orphan", key.hex(), "values without a block", _payload_bytes(store, key))
        for key in orphans
    ]
    findings += [
        Finding("link", _child(entry).hex(), "a child that is not there")
        for entry in (_dangling(store) if keys is None else [])
    ]
    if repair and findings:
        store.remove([*bad, *(key for key in orphans if not _is_block(store, key))])
        dangling = _dangling(store)  # now also of the blocks just removed
        store.env.write(lambda txn: _mend_links(store, txn, unlinked, dangling))
    return findings


def stored(store: BlockStore, keys: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Key and packed header, sound or not, of the blocks among `keys`."""
    for key in keys:
        with store.env.read() as txn:
            packed = txn.get(key, db=store.db["blocks"])
            found = None if packed is None else bytes(packed)
        if found is not None:
            yield key, found


def _looked_at(
    store: BlockStore, key: bytes, header: BlockHeader, reads_values: bool
) -> tuple[str | None, bool]:
    """What is wrong with the first bad value of a block, and whether its parent knows it."""
    with store.env.read() as txn:
        with txn.cursor(store.db["children"]) as cursor:
            has_link = bool(cursor.set_key_dup(header.parent, child_entry(header)))
        return _wrong_value(store, txn, key, header, reads_values), has_link


def _wrong_value(
    store: BlockStore, txn: Any, key: bytes, header: BlockHeader, reads_values: bool
) -> str | None:
    if len(header.values) != header.layout.num_values:
        return f"{len(header.values)} values, not {header.layout.num_values}"
    for group, entry in enumerate(header.values):
        payload = txn.get(value_key(key, group), db=store.db["values"])
        if payload is None:
            return f"value {group} is missing"
        if len(payload) != entry.num_bytes:
            return f"value {group} has {len(payload)} bytes, not {entry.num_bytes}"
        if reads_values and headers.digest(payload) != entry.digest:
            return f"value {group} is damaged: its digest differs"
    return None


def _payload_bytes(store: BlockStore, key: bytes) -> int:
    with store.env.read() as txn, txn.cursor(store.db["values"]) as cursor:
        total, found = 0, cursor.set_range(key)
        while found and bytes(cursor.key()[:KEY_BYTES]) == key:
            total += len(cursor.value())
            found = cursor.next()
        return total


def _orphans(store: BlockStore) -> list[bytes]:
    """Keys that have values but no block."""
    orphans: list[bytes] = []
    at: bytes | None = b"\0" * KEY_BYTES
    while at is not None:
        with store.env.read() as txn, txn.cursor(store.db["values"]) as cursor:
            for _ in range(AT_ONCE):
                if not cursor.set_range(at):
                    at = None
                    break
                key = bytes(cursor.key()[:KEY_BYTES])
                if txn.get(key, db=store.db["blocks"]) is None:
                    orphans.append(key)
                at = key + b"\xff\xff\xff"  # after the last value number
    return orphans


def _is_block(store: BlockStore, key: bytes) -> bool:
    with store.env.read() as txn:
        return txn.get(key, db=store.db["blocks"]) is not None


def _dangling(store: BlockStore) -> list[tuple[bytes, bytes]]:
    """Entries of `children` whose block is not there, or has another parent."""
    dangling: list[tuple[bytes, bytes]] = []
    entries = store.scan("children")
    while some := list(islice(entries, AT_ONCE)):
        with store.env.read() as txn:
            dangling += [
                entry
                for entry in some
                if not _is_entry_of(txn.get(_child(entry), db=store.db["blocks"]), entry)
            ]
    return dangling


def _is_entry_of(packed: memoryview | None, entry: tuple[bytes, bytes]) -> bool:
    """Whether `entry` is what the block of this header has with its parent."""
    if packed is None:
        return False
    parent, child = entry
    if headers.stands_under(packed, parent, child[:ID_BYTES]):
        return True
    try:
        header = headers.unpack(bytes(packed))
    except HeaderDamaged:
        return True  # a finding of its own
    return (header.parent, child_entry(header)) == entry


def _child(entry: tuple[bytes, bytes]) -> bytes:
    return entry[1][ID_BYTES:]


def _mend_links(
    store: BlockStore,
    txn: Any,
    unlinked: list[BlockHeader],
    dangling: list[tuple[bytes, bytes]],
) -> None:
    for header in unlinked:
        if txn.get(header.key, db=store.db["blocks"]) is not None:
            txn.put(header.parent, child_entry(header), db=store.db["children"])
    for parent, child in dangling:
        packed = txn.get(child[ID_BYTES:], db=store.db["blocks"])
        if not _is_entry_of(packed, (parent, child)):
            txn.delete(parent, child, db=store.db["children"])
