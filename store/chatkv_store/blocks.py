"""The block store: KV found by the tokens that made it.

Five sub-databases of one LMDB environment:

    meta         "format" -> version of the whole store
    namespaces   namespace -> JSON for people: model name, layout, ...
    blocks       block key -> header (header.py)
    values       block key + value number -> payload (codec.py)
    children     parent's key -> first token id + block key, one entry per child

`children` lets the last, partly matching block be found: KV of a token depends on the tokens up to
it only, so the front of any block is good for as many tokens as agree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatkv_store import header as headers
from chatkv_store.environment import START_MAP_BYTES, Environment, remove_files
from chatkv_store.errors import BlockMiss, StoreDamaged, StoreError, StoreVersionError
from chatkv_store.header import BlockHeader, HeaderDamaged, ValueEntry
from chatkv_store.keys import ID_BYTES, KEY_BYTES, block_key, pack_ids
from chatkv_store.layout import KVLayout

if TYPE_CHECKING:
    from chatkv_store.codec import Bits, Payloads
    from chatkv_store.integrity import Finding

STORE_FORMAT = 1
COMMIT_BYTES = 32 << 20  # payload per write transaction: bounds its memory and its time

_DATABASES: dict[str, dict[str, bool]] = {
    "meta": {},
    "namespaces": {},
    "blocks": {},
    "values": {},
    "children": {"dupsort": True, "dupfixed": True},
}


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored block of which the first `num_tokens` tokens are wanted, at position `start`."""

    key: bytes
    start: int
    num_tokens: int
    header: BlockHeader


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some token ids."""

    blocks: list[StoredBlock]
    num_tokens: int
    miss: str | None  # why it ends before the last token; None where it does not


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be stored.

    `parent` is the key of the block before it, or the namespace. `values` holds one array of
    `KVLayout.value_shape(group, len(token_ids))` per value, or makes it when asked.
    """

    parent: bytes
    token_ids: Sequence[int]
    values: Sequence[Bits] | Callable[[int], Bits]


@dataclass(frozen=True, slots=True)
class RunResult:
    num_blocks: int  # decoded
    num_bytes: int  # payload bytes read
    miss: str | None  # why the block after them could not be used


@dataclass(frozen=True, slots=True)
class PutResult:
    written: int  # blocks
    skipped: int  # blocks that were stored already
    num_bytes: int  # payload bytes written


class BlockStore:
    """KV blocks in `path`. Safe to use from many threads and, on one machine, many processes.

    `max_bytes` caps the data file. `replace_damaged` starts an empty store where the file is
    broken beyond opening, and keeps the reason in `replaced`: KV is a cache.

    Raises StoreBusy, StoreDamaged, StoreReadOnly, StoreVersionError, StoreFull or StoreError.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        read_only: bool = False,
        max_bytes: int | None = None,
        replace_damaged: bool = False,
        start_map_bytes: int = START_MAP_BYTES,
    ) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.replaced: str | None = None

        def opened() -> Environment:
            env = Environment(
                self.path,
                _DATABASES,
                read_only=read_only,
                max_bytes=max_bytes,
                start_map_bytes=start_map_bytes,
            )
            try:
                _check_format(env)
            except BaseException:
                env.close()
                raise
            return env

        try:
            self.env = opened()
        except StoreDamaged as error:
            if read_only or not replace_damaged:
                raise
            remove_files(self.path)
            self.env = opened()
            self.replaced = str(error)
        self.db = self.env.databases
        self._bad: set[bytes] = set()  # keys of blocks that a read found damaged; put replaces them

    def register(self, namespace: bytes, info: dict[str, Any]) -> None:
        """Remember what `namespace` stands for, for listings; the last call wins."""
        text = json.dumps(info, sort_keys=True, ensure_ascii=False).encode()
        with self.env.read() as txn:
            known = txn.get(namespace, db=self.db["namespaces"])
            if known is not None and bytes(known) == text:
                return
        self.env.write(lambda txn: txn.put(namespace, text, db=self.db["namespaces"]))

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """Every registered namespace and its info."""
        with self.env.read() as txn, txn.cursor(self.db["namespaces"]) as cursor:
            return {bytes(key): json.loads(bytes(info)) for key, info in cursor}

    def match(self, namespace: bytes, token_ids: Sequence[int], layout: KVLayout) -> Match:
        """The longest stored prefix of `token_ids`, exact to the token. Reads headers only."""
        ids = pack_ids(token_ids)
        block_bytes = layout.block_tokens * ID_BYTES
        blocks: list[StoredBlock] = []
        parent, at, miss = namespace, 0, None
        with self.env.read() as txn:
            while at + block_bytes <= len(ids):
                wanted = ids[at : at + block_bytes]
                key = block_key(parent, wanted)
                try:
                    header = self._header(txn, key)
                    _check_hit(header, namespace, parent, layout)
                except BlockMiss as error:
                    miss = error.reason
                    break
                if header.ids != wanted:
                    miss = "its key belongs to other tokens"
                    break
                blocks.append(StoredBlock(key, at // ID_BYTES, layout.block_tokens, header))
                parent, at = key, at + block_bytes
            if at < len(ids):
                tail = self._longest_child(txn, namespace, parent, ids[at:], layout)
                if tail is not None:
                    key, num_tokens, header = tail
                    blocks.append(StoredBlock(key, at // ID_BYTES, num_tokens, header))
                    at += num_tokens * ID_BYTES
        if at == len(ids):
            miss = None
        else:
            miss = f"from token {at // ID_BYTES} of {len(ids) // ID_BYTES}: {miss or 'not stored'}"
        return Match(blocks, at // ID_BYTES, miss)

    def read(self, block: StoredBlock, group: int, out: Bits) -> int:
        """Decode value `group` of `block` into `out`; returns the payload bytes read.

        `out` is [layers, 2, heads, >= block.num_tokens, head_dim] of the layout's bits, any
        strides; its first `block.num_tokens` tokens are written. Raises BlockMiss on anything
        wrong, before the first byte of `out` changes.
        """
        target = out[:, :, :, : block.num_tokens]
        if block.num_tokens == block.header.num_tokens:
            done = self.read_run([block], group, target)
        else:
            whole = _empty_value(block.header, group)
            done = self.read_run([block], group, whole)
            if done.miss is None:
                target[...] = whole[:, :, :, : block.num_tokens]
        if done.miss is not None:
            raise BlockMiss(done.miss)
        return done.num_bytes

    def read_run(self, blocks: Sequence[StoredBlock], group: int, out: Bits) -> RunResult:
        """Decode value `group` of equally long blocks side by side, up to the first bad one.

        `out` is [layers, 2, heads, len(blocks) * tokens, head_dim], any strides. The blocks are
        read whole, whatever their `num_tokens`.

        A run exists for speed. Each call that releases the interpreter lock must get it back, and
        with two threads that took half of the time; a run makes fewer calls for the same bytes.
        """
        from chatkv_store import codec

        first = blocks[0].header
        tokens = first.num_tokens
        if out.shape != first.layout.value_shape(group, len(blocks) * tokens):
            raise ValueError(f"cannot read value {group} of {len(blocks)} blocks into {out.shape}")
        assert all((b.header.num_tokens, b.header.codec) == (tokens, first.codec) for b in blocks)
        decoder = codec.by_id(first.codec)
        if decoder is None:
            return RunResult(0, 0, f"codec {first.codec} is unknown to this version")
        payloads, miss = self._payloads(blocks, group)
        while len(payloads):
            try:
                decoder.decode(payloads, out[:, :, :, : len(payloads) * tokens])
                break
            except codec.PayloadDamaged as error:
                miss = f"value {group} is damaged: {error}"
                payloads = payloads.first(error.index)
        if miss is not None:
            self._bad.add(blocks[len(payloads)].key)
        return RunResult(len(payloads), sum(payloads.sizes), miss)

    def put(
        self,
        namespace: bytes,
        layout: KVLayout,
        blocks: Sequence[NewBlock],
        codec: str = "lossless",
    ) -> PutResult:
        """Store `blocks`, in commits of about COMMIT_BYTES.

        A sound stored block is never overwritten, one that was found damaged is replaced. A
        partial block that a stored one contains is skipped, and one that a new block extends is
        removed in the same commit. Raises StoreFull or StoreReadOnly; earlier commits of the call
        then stay.
        """
        written = num_bytes = 0
        batch: list[_Encoded] = []
        for block in self._without_stored(blocks):
            batch.append(_encode(namespace, layout, block, codec))
            if sum(encoded.header.num_payload_bytes for encoded in batch) >= COMMIT_BYTES:
                done = self._commit(batch)
                written, num_bytes = written + done[0], num_bytes + done[1]
                batch = []
        if batch:
            done = self._commit(batch)
            written, num_bytes = written + done[0], num_bytes + done[1]
        return PutResult(written, len(blocks) - written, num_bytes)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Delete blocks in commits of a few; unknown keys are ignored. Returns payload bytes."""
        freed = 0
        for first in range(0, len(keys), 256):
            some = keys[first : first + 256]

            def work(txn: Any, some: Sequence[bytes] = some) -> int:
                return sum(self._delete(txn, key) for key in some)

            freed += self.env.write(work)
        return freed

    def headers(self, namespace: bytes | None = None) -> Iterator[BlockHeader]:
        """Every sound header, read in short transactions; damaged ones are left to `verify`."""
        for _, packed in self.scan("blocks"):
            try:
                header = headers.unpack(packed)
            except HeaderDamaged:
                continue
            if namespace is None or header.namespace == namespace:
                yield header

    def usage(self) -> dict[bytes, dict[str, int]]:
        """Per namespace: blocks, tokens, payload bytes and the raw bytes they stand for."""
        totals: dict[bytes, dict[str, int]] = {}
        for header in self.headers():
            total = totals.setdefault(
                header.namespace, {"blocks": 0, "tokens": 0, "bytes": 0, "raw_bytes": 0}
            )
            total["blocks"] += 1
            total["tokens"] += header.num_tokens
            total["bytes"] += header.num_payload_bytes
            total["raw_bytes"] += header.num_raw_bytes
        return totals

    def stats(self) -> dict[str, int]:
        """Bytes of the file, its map, and its used and reusable pages; entries per database."""
        with self.env.read() as txn:
            entries = {name: txn.stat(db)["entries"] for name, db in self.db.items()}
        return {**self.env.info(), **entries}

    def verify(self, repair: bool = False) -> list[Finding]:
        """Check every block, value and link (integrity.py); with `repair`, drop what is wrong."""
        from chatkv_store.integrity import verify

        return verify(self, repair)

    def close(self) -> None:
        self.env.close()

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scan(self, database: str) -> Iterator[tuple[bytes, bytes]]:
        """All entries of a small-valued database; no transaction is open while one is used."""
        last: bytes | None = None
        while True:
            with self.env.read() as txn, txn.cursor(self.db[database]) as cursor:
                entries = _next_entries(cursor, last, 256)
            if not entries:
                return
            yield from entries
            last = entries[-1][0]

    def _payloads(self, blocks: Sequence[StoredBlock], group: int) -> tuple[Payloads, str | None]:
        """Verified private copies of value `group` of the blocks before the first bad one.

        The copies let the transaction end at once, and what is digested is what is decoded. numpy
        copies without the interpreter lock, also while a copy waits for the disk.
        """
        import numpy as np

        from chatkv_store.codec import scratch_rows

        entries = [block.header.values[group] for block in blocks]
        payloads = scratch_rows([entry.num_bytes for entry in entries])
        copied, miss = 0, None
        try:
            with self.env.read() as txn:
                for block, entry in zip(blocks, entries, strict=True):
                    stored = txn.get(value_key(block.key, group), db=self.db["values"])
                    miss = _wrong_length(stored, entry)
                    if miss is not None:
                        break
                    np.copyto(payloads[copied], np.frombuffer(stored, np.uint8))
                    copied += 1
        except StoreError as error:
            copied, miss = 0, str(error)
        for index in range(copied):
            if headers.digest(payloads[index].data) != entries[index].digest:
                return payloads.first(index), f"value {group} is damaged: its digest differs"
        return payloads.first(copied), miss and f"value {group} is {miss}"

    def _header(self, txn: Any, key: bytes) -> BlockHeader:
        packed = txn.get(key, db=self.db["blocks"])
        if packed is None:
            raise BlockMiss("not stored")
        try:
            return headers.unpack(bytes(packed))
        except HeaderDamaged as error:
            raise BlockMiss(f"damaged: {error}") from None

    def _longest_child(
        self, txn: Any, namespace: bytes, parent: bytes, ids: bytes, layout: KVLayout
    ) -> tuple[bytes, int, BlockHeader] | None:
        """The child of `parent` that shares most tokens with `ids`: key, tokens shared, header."""
        best: tuple[bytes, int, BlockHeader] | None = None
        for key in self._children(txn, parent, ids[:ID_BYTES]):
            try:
                header = self._header(txn, key)
                _check_hit(header, namespace, parent, layout)
            except BlockMiss:
                continue
            shared = _common_tokens(header.ids, ids)
            # Of two equally good ones, the smaller is less to read.
            if best is None or (shared, -header.num_tokens) > (best[1], -best[2].num_tokens):
                best = key, shared, header
        return best if best is not None and best[1] > 0 else None

    def _children(self, txn: Any, parent: bytes, first_id: bytes) -> list[bytes]:
        """Keys of the children of `parent` whose first token is `first_id` (packed)."""
        keys = []
        with txn.cursor(self.db["children"]) as cursor:
            found = cursor.set_range_dup(parent, first_id)
            while found and bytes(cursor.value()[:ID_BYTES]) == first_id:
                keys.append(bytes(cursor.value()[ID_BYTES:]))
                found = cursor.next_dup()
        return keys

    def _without_stored(self, blocks: Sequence[NewBlock]) -> list[NewBlock]:
        with self.env.read() as txn:
            return [
                block
                for block in blocks
                if not self._is_stored(txn, block.parent, pack_ids(block.token_ids))
            ]

    def _is_stored(self, txn: Any, parent: bytes, ids: bytes) -> bool:
        """Whether a sound block of these ids, or one that goes on after them, is there."""
        key = block_key(parent, ids)
        if txn.get(key, db=self.db["blocks"]) is not None:
            return self._is_sound(txn, key)
        for longer in self._children(txn, parent, ids[:ID_BYTES]):
            try:
                starts = self._header(txn, longer).ids.startswith(ids)
            except BlockMiss:
                continue
            if starts and self._is_sound(txn, longer):
                return True
        return False

    def _is_sound(self, txn: Any, key: bytes) -> bool:
        """Whether nothing is known to be wrong with a block; digests are left to who reads it."""
        try:
            header = self._header(txn, key)
        except BlockMiss:
            return False
        return key not in self._bad and all(
            _wrong_length(txn.get(value_key(key, group), db=self.db["values"]), entry) is None
            for group, entry in enumerate(header.values)
        )

    def _commit(self, batch: list[_Encoded]) -> tuple[int, int]:
        """Write `batch` in one transaction; returns the blocks and payload bytes written."""

        def work(txn: Any) -> tuple[int, int]:
            # Another process may have stored some of them meanwhile.
            fresh = [e for e in batch if not self._is_stored(txn, e.header.parent, e.header.ids)]
            for e in fresh:
                self._delete(txn, e.key)  # what is left of a damaged one
            # Values in the order in which a restore reads them: the first layers of all blocks
            # lie together on the disk.
            for group in range(max((len(e.payloads) for e in fresh), default=0)):
                for e in fresh:
                    txn.put(value_key(e.key, group), e.payloads[group], db=self.db["values"])
            for e in fresh:
                self._drop_extended(txn, e.header)
                txn.put(e.key, e.header.pack(), db=self.db["blocks"])
                txn.put(e.header.parent, child_entry(e.header), db=self.db["children"])
            return len(fresh), sum(e.header.num_payload_bytes for e in fresh)

        result = self.env.write(work)
        self._bad.difference_update(e.key for e in batch)
        return result

    def _drop_extended(self, txn: Any, new: BlockHeader) -> None:
        """Delete the partial blocks that are a strict beginning of `new`."""
        for key in self._children(txn, new.parent, new.ids[:ID_BYTES]):
            try:
                old = self._header(txn, key)
            except BlockMiss:
                continue
            if old.num_tokens < new.num_tokens and new.ids.startswith(old.ids):
                self._delete(txn, key)

    def _delete(self, txn: Any, key: bytes) -> int:
        """Delete a block, its values and its entry with the parent; returns payload bytes."""
        try:
            header = self._header(txn, key)
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


@dataclass(frozen=True, slots=True)
class _Encoded:
    key: bytes
    header: BlockHeader
    payloads: list[bytes]


def value_key(key: bytes, group: int) -> bytes:
    return key + group.to_bytes(2, "big")


def child_entry(header: BlockHeader) -> bytes:
    """What stands under the parent in `children`."""
    return header.ids[:ID_BYTES] + header.key


def _encode(namespace: bytes, layout: KVLayout, block: NewBlock, codec: str) -> _Encoded:
    from chatkv_store.codec import by_name

    ids = pack_ids(block.token_ids)
    num_tokens = len(ids) // ID_BYTES
    if not 1 <= num_tokens <= layout.block_tokens:
        raise ValueError(f"a block holds 1..{layout.block_tokens} tokens, not {num_tokens}")
    encoder = by_name(codec)
    payloads = []
    for group in range(layout.num_values):
        bits = block.values(group) if callable(block.values) else block.values[group]
        if bits.shape != layout.value_shape(group, num_tokens) or bits.dtype != layout.bits_dtype:
            raise ValueError(f"value {group} is {bits.dtype} {bits.shape}, not as in {layout}")
        payloads.append(encoder.encode(bits))
    header = BlockHeader(
        encoder.id,
        layout,
        time.time(),
        namespace,
        block.parent,
        ids,
        tuple(ValueEntry(len(payload), headers.digest(payload)) for payload in payloads),
    )
    return _Encoded(header.key, header, payloads)


def _check_hit(header: BlockHeader, namespace: bytes, parent: bytes, layout: KVLayout) -> None:
    """The key says all this already; the header must agree before its KV is believed."""
    if header.namespace != namespace or header.parent != parent:
        raise BlockMiss("damaged: it belongs to another chain")
    if header.layout != layout or len(header.values) != layout.num_values:
        raise BlockMiss("damaged: its layout differs")


def _common_tokens(one: bytes, other: bytes) -> int:
    """How many leading token ids are equal; both packed."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length // ID_BYTES
    return next(i for i in range(length) if one[i] != other[i]) // ID_BYTES


def _wrong_length(stored: memoryview | None, entry: ValueEntry) -> str | None:
    if stored is None:
        return "missing"
    if len(stored) != entry.num_bytes:
        return f"damaged: {len(stored)} bytes, not {entry.num_bytes}"
    return None


def _empty_value(header: BlockHeader, group: int) -> Bits:
    import numpy as np

    layout = header.layout
    return np.empty(layout.value_shape(group, header.num_tokens), layout.bits_dtype)


def _next_entries(cursor: Any, after: bytes | None, count: int) -> list[tuple[bytes, bytes]]:
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


def _check_format(env: Environment) -> None:
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
