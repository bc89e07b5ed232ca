"""The six sub-databases, and what one transaction does with them.

    meta         "format" -> version of the whole store; "counters" -> JSON, see `COUNTER_NAMES`;
                 "counted since" -> epoch seconds, as text
    namespaces   namespace -> JSON for people: model name, layout, ...
    blocks       block key -> header (header.py)
    values       block key + value number -> payload (codec.py)
    children     parent's key -> first token id + block key, one entry per child
    uses         who uses blocks beside conversations (uses.py)

`children` lets the last, partly matching block be found: KV of a token depends on the tokens up to
it only, so the front of any block is good for as many tokens as agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any

from chatkv_store import header as headers
from chatkv_store.environment import Environment
from chatkv_store.errors import BlockMiss, StoreDamaged, StoreVersionError
from chatkv_store.header import BlockHeader, HeaderDamaged, ValueEntry
from chatkv_store.keys import ID_BYTES, KEY_BYTES, block_key
from chatkv_store.layout import KVLayout

STORE_FORMAT = 1

COUNTERS, COUNTED_SINCE = b"counters", b"counted since"
COUNTER_NAMES = (
    "written_blocks",
    "written_bytes",
    "evicted_blocks",  # to make room for others
    "evicted_bytes",
    "refused_blocks",  # for want of room, to be computed again one day
    "dropped_blocks",  # ... because the disk could not follow, or failed
)

DATABASES: dict[str, dict[str, bool]] = {
    "meta": {},
    "namespaces": {},
    "blocks": {},
    "values": {},
    "children": {"dupsort": True, "dupfixed": True},
    "uses": {},
}


class Tables:
    """Reads and changes of the sub-databases `db`, each inside the transaction it is given."""

    def __init__(self, db: dict[str, Any]) -> None:
        self.db = db

    def header(self, txn: Any, key: bytes) -> BlockHeader:
        """The header of `key`; raises BlockMiss where there is none that is sound."""
        packed = txn.get(key, db=self.db["blocks"])
        if packed is None:
            raise BlockMiss("not stored")
        try:
            return headers.unpack(bytes(packed))
        except HeaderDamaged as error:
            raise BlockMiss(f"damaged: {error}") from None

    def longest_child(
        self, txn: Any, namespace: bytes, parent: bytes, ids: bytes, layout: KVLayout
    ) -> tuple[bytes, int, BlockHeader] | None:
        """The child of `parent` that shares most tokens with `ids`: key, tokens shared, header."""
        with suppress(BlockMiss):  # none shares more than the block of exactly these ids
            header = self.header(txn, exact := block_key(parent, ids))
            check_hit(header, namespace, parent, layout)
            if header.ids == ids:
                return exact, header.num_tokens, header
        best: tuple[bytes, int, BlockHeader] | None = None
        for key in self.children(txn, parent, ids[:ID_BYTES]):
            try:
                header = self.header(txn, key)
                check_hit(header, namespace, parent, layout)
            except BlockMiss:
                continue
            shared = common_tokens(header.ids, ids)
            # Of two equally good ones, the smaller is less to read.
            if best is None or (shared, -header.num_tokens) > (best[1], -best[2].num_tokens):
                best = key, shared, header
        return best if best is not None and best[1] > 0 else None

    def children(self, txn: Any, parent: bytes, first_id: bytes) -> list[bytes]:
        """Keys of the children of `parent` whose first token is `first_id` (packed)."""
        keys = []
        with txn.cursor(self.db["children"]) as cursor:
            found = cursor.set_range_dup(parent, first_id)
            while found and bytes(cursor.value()[:ID_BYTES]) == first_id:
                keys.append(bytes(cursor.value()[ID_BYTES:]))
                found = cursor.next_dup()
        return keys

    def is_stored(self, txn: Any, parent: bytes, ids: bytes, bad: Set[bytes]) -> bool:
        """Whether a sound block of these ids, or one that goes on after them, is there.

        `bad` holds the keys of blocks that a read found damaged.
        """
        key = block_key(parent, ids)
        if txn.get(key, db=self.db["blocks"]) is not None:
            return self.is_sound(txn, key, bad)
        for longer in self.children(txn, parent, ids[:ID_BYTES]):
            try:
                starts = self.header(txn, longer).ids.startswith(ids)
            except BlockMiss:
                continue
            if starts and self.is_sound(txn, longer, bad):
                return True
        return False

    def is_sound(self, txn: Any, key: bytes, bad: Set[bytes]) -> bool:
        """Whether nothing is known to be wrong with a block; digests are left to who reads it."""
        try:
            header = self.header(txn, key)
        except BlockMiss:
            return False
        return (
            header.key == key
            and key not in bad
            and all(
                wrong_length(txn.get(value_key(key, group), db=self.db["values"]), entry) is None
                for group, entry in enumerate(header.values)
            )
        )

    def drop_extended(self, txn: Any, new: BlockHeader) -> None:
        """Delete the partial blocks that are a strict beginning of `new`."""
        for key in self.children(txn, new.parent, new.ids[:ID_BYTES]):
            try:
                old = self.header(txn, key)
            except BlockMiss:
                continue
            if old.num_tokens < new.num_tokens and new.ids.startswith(old.ids):
                self.delete(txn, key)

    def delete(self, txn: Any, key: bytes) -> int:
        """Delete a block, its values and its entry with the parent; returns payload bytes."""
        try:
            header = self.header(txn, key)
        except BlockMiss:
            header = None
        if header is not None and header.key == key:  # a damaged one may name another's entry
            txn.delete(header.parent, child_entry(header), db=self.db["children"])
        txn.delete(key, db=self.db["blocks"])
        freed = 0
        with txn.cursor(self.db["values"]) as cursor:
            found = cursor.set_range(key)
            while found and bytes(cursor.key()[:KEY_BYTES]) == key:
                freed += len(cursor.value())
                cursor.delete()  # moves to the next entry
                found = bool(cursor.key())
        return freed


def value_key(key: bytes, group: int) -> bytes:
    return key + group.to_bytes(2, "big")


def child_entry(header: BlockHeader) -> bytes:
    """What stands under the parent in `children`."""
    return header.ids[:ID_BYTES] + header.key


def check_hit(header: BlockHeader, namespace: bytes, parent: bytes, layout: KVLayout) -> None:
    """The key says all this already; the header must agree before its KV is believed."""
    if header.namespace != namespace or header.parent != parent:
        raise BlockMiss("damaged: it belongs to another chain")
    if header.layout != layout or len(header.values) != layout.num_values:
        raise BlockMiss("damaged: its layout differs")


def common_tokens(one: bytes, other: bytes) -> int:
    """How many leading token ids are equal; both packed."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length // ID_BYTES
    return next(i for i in range(length) if one[i] != other[i]) // ID_BYTES


def wrong_length(stored: memoryview | None, entry: ValueEntry) -> str | None:
    if stored is None:
        return "missing"
    if len(stored) != entry.num_bytes:
        return f"damaged: {len(stored)} bytes, not {entry.num_bytes}"
    return None


def next_entries(cursor: Any, after: bytes | None, count: int) -> list[tuple[bytes, bytes]]:
    """Copies of `count` entries or a few more, all of each key, from the keys after `after`."""
    if after is None:
        found = cursor.first()
    else:
        found = cursor.set_range(after)
        if found and bytes(cursor.key()) == after:
            found = cursor.next_nodup()
    entries: list[tuple[bytes, bytes]] = []
    while found and len(entries) < count:
        key = bytes(cursor.key())
        while found and bytes(cursor.key()) == key:
            entries.append((key, bytes(cursor.value())))
            found = cursor.next()
    return entries


def read_counts(txn: Any, meta: Any) -> dict[str, int]:
    """Every counter; those that cannot be read begin again."""
    stored = txn.get(COUNTERS, db=meta)
    try:
        counts = json.loads(bytes(stored)) if stored is not None else {}
        return {name: int(counts.get(name, 0)) for name in COUNTER_NAMES}
    except (ValueError, TypeError, AttributeError):
        return dict.fromkeys(COUNTER_NAMES, 0)


def add_counts(txn: Any, meta: Any, amounts: Mapping[str, int]) -> None:
    """Add `amounts` to the counters."""
    counts = read_counts(txn, meta)
    for name, amount in amounts.items():
        counts[name] += amount
    txn.put(COUNTERS, json.dumps(counts).encode(), db=meta)


def reset_counts(txn: Any, meta: Any, now_s: float) -> None:
    """Let the counters begin anew at `now_s`."""
    add_counts(txn, meta, {name: -number for name, number in read_counts(txn, meta).items()})
    txn.put(COUNTED_SINCE, b"%r" % now_s, db=meta)


def read_since(txn: Any, meta: Any) -> float | None:
    """When the counters began anew; None where they never did, or that cannot be read."""
    stored = txn.get(COUNTED_SINCE, db=meta)
    with suppress(ValueError):
        return None if stored is None else float(bytes(stored))
    return None


def check_format(env: Environment) -> None:
    """Write the store's format into a new one; raises StoreVersionError on a newer one."""
    meta = env.databases["meta"]
    with env.read() as txn:
        found = txn.get(b"format", db=meta)
        version = None if found is None else bytes(found)
    if version is None:
        if env.read_only:
            raise StoreDamaged(f"{env.path} holds no finished KV cache")
        env.write(lambda txn: txn.put(b"format", b"%d" % STORE_FORMAT, overwrite=False, db=meta))
    elif not version.isdigit():
        raise StoreDamaged(f"{env.path}: the format of this KV cache is unreadable")
    elif int(version) > STORE_FORMAT:
        raise StoreVersionError(
            f"the KV cache in {env.path} has format {int(version)}, this program knows "
            f"{STORE_FORMAT}; update chatkv, or delete the folder (it is only a cache)"
        )
