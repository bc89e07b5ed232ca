"""The block store: KV found by the tokens that made it, verified whenever it is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatkv_store import header as headers
from chatkv_store.budget import Budget
from chatkv_store.chain import Match as Match
from chatkv_store.chain import NewBlock as NewBlock
from chatkv_store.chain import PutResult as PutResult
from chatkv_store.chain import RunResult as RunResult
from chatkv_store.chain import StoredBlock as StoredBlock
from chatkv_store.encryption import sealer_of
from chatkv_store.environment import (
    START_MAP_BYTES,
    Environment,
    NoRoom,
    held_open,
    remove_damaged,
)
from chatkv_store.errors import BlockMiss, StoreBusy, StoreDamaged, StoreError, StoreFull
from chatkv_store.header import BlockHeader, HeaderDamaged
from chatkv_store.keys import ID_BYTES, block_key, pack_ids
from chatkv_store.layout import KVLayout
from chatkv_store.reading import StoredValues
from chatkv_store.room import LOCK_BYTES, Room
from chatkv_store.saving import Encoded, encode, write
from chatkv_store.tables import (
    DATABASES,
    Tables,
    add_counts,
    check_format,
    check_hit,
    next_entries,
    read_counts,
    read_since,
    reset_counts,
)

if TYPE_CHECKING:
    from chatkv_store.conversations import Conversations
    from chatkv_store.eviction import PrefillRates
    from chatkv_store.integrity import Finding

AT_ONCE = 256  # headers that one transaction reads
COMMIT_BYTES = 32 << 20  # payload per write transaction: bounds its memory and its time


class BlockStore(StoredValues):
    """KV blocks in `path`. Safe to use from many threads and, on one machine, many processes.

    `budget` bounds what it takes of the disk; `conversations` say what may be evicted for it, and
    without them nothing is. `prefill_rates` tell what blocks are worth (eviction.py). `max_bytes`
    alone caps the data file. `replace_damaged` starts an empty store where the file is broken
    beyond opening, and keeps the reason in `replaced`: KV is a cache. `clock` gives seconds, by
    which a search for room that took long is not soon repeated (room.py). `thorough` looks for
    damage too that costs a read for every value (pages.py).

    Raises StoreBusy, StoreDamaged, StoreReadOnly, StoreVersionError, StoreFull or StoreError.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        read_only: bool = False,
        max_bytes: int | None = None,
        budget: Budget | None = None,
        conversations: Conversations | None = None,
        replace_damaged: bool = False,
        start_map_bytes: int = START_MAP_BYTES,
        prefill_rates: PrefillRates | None = None,
        clock: Callable[[], float] = time.monotonic,
        thorough: bool = False,
    ) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.replaced: str | None = None
        if budget is not None and budget.max_bytes is not None:
            max_bytes = max(0, budget.max_bytes - LOCK_BYTES)

        def opened() -> Environment:
            env = Environment(
                self.path,
                DATABASES,
                read_only=read_only,
                max_bytes=max_bytes,
                start_map_bytes=start_map_bytes,
                thorough=thorough,
            )
            try:
                check_format(env)
                env.seal(sealer_of(env))
            except BaseException:
                env.close()
                raise
            return env

        with held_open(self.path) as found:
            try:
                self.env = opened()
            except StoreDamaged as error:
                if read_only or not replace_damaged:
                    raise
                with suppress(StoreBusy):  # whoever has it open may just have replaced it
                    remove_damaged(self.path, found)
                    self.replaced = str(error)
                self.env = opened()
        self.db = self.env.databases
        self._tables = Tables(self.db)
        self.prefill_rates = prefill_rates
        self._room = None if budget is None else Room(self, budget, conversations, clock)
        self._bad = set()  # put replaces them

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
                    header = self._tables.header(txn, key)
                    check_hit(header, namespace, parent, layout)
                except BlockMiss as error:
                    miss = error.reason
                    break
                if header.ids != wanted:
                    miss = "its key belongs to other tokens"
                    break
                blocks.append(StoredBlock(key, at // ID_BYTES, layout.block_tokens, header))
                parent, at = key, at + block_bytes
            if at < len(ids):
                tail = self._tables.longest_child(txn, namespace, parent, ids[at:], layout)
                if tail is not None:
                    key, num_tokens, header = tail
                    blocks.append(StoredBlock(key, at // ID_BYTES, num_tokens, header))
                    at += num_tokens * ID_BYTES
        if at == len(ids):
            miss = None
        else:
            miss = f"from token {at // ID_BYTES} of {len(ids) // ID_BYTES}: {miss or 'not stored'}"
        return Match(blocks, at // ID_BYTES, miss)

    def locate(
        self, namespace: bytes, token_ids: Sequence[int], layout: KVLayout
    ) -> list[StoredBlock | None]:
        """What is stored of `token_ids`, block by block, also behind gaps. Reads headers only.

        Entry i is about the tokens from i * block_tokens on: a stored block, `num_tokens` of which
        are good (fewer than the block's place holds where only a part of it is stored), or None.
        Keys follow from the ids alone, so that a missing block hides none of those behind it.
        """
        ids = pack_ids(token_ids)
        block_bytes = layout.block_tokens * ID_BYTES
        found: list[StoredBlock | None] = []
        parent = namespace
        for first in range(0, len(ids), AT_ONCE * block_bytes):
            with self.env.read() as txn:
                for at in range(first, min(first + AT_ONCE * block_bytes, len(ids)), block_bytes):
                    wanted = ids[at : at + block_bytes]
                    stored = self._tables.longest_child(txn, namespace, parent, wanted, layout)
                    if stored is None:
                        found.append(None)
                    else:
                        key, num_tokens, header = stored
                        found.append(StoredBlock(key, at // ID_BYTES, num_tokens, header))
                    parent = block_key(parent, wanted)
        return found

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
        batch: list[Encoded] = []
        missing = self._without_stored(blocks)
        for index, block in enumerate(missing, 1):
            batch.append(encode(namespace, layout, block, codec))
            num_queued = sum(encoded.header.num_payload_bytes for encoded in batch)
            is_full = num_queued >= COMMIT_BYTES or (self._room and self._room.is_a_commit(batch))
            if is_full or index == len(missing):
                done = self._commit(batch, len(missing) - index)
                written, num_bytes = written + done[0], num_bytes + done[1]
                batch = []
        return PutResult(written, len(blocks) - written, num_bytes)

    def put_encoded(self, batch: Sequence[Encoded]) -> PutResult:
        """Store blocks that are encoded already, in one commit; as `put` does otherwise."""
        written, num_bytes = self._commit(list(batch))
        return PutResult(written, len(batch) - written, num_bytes)

    def remove(self, keys: Sequence[bytes], limit_bytes: int | None = None) -> int:
        """Delete blocks in commits of a few; unknown keys are ignored. Returns payload bytes.

        `limit_bytes` is how far the file may grow for it: what a commit changes is written anew
        before the old pages are free. A store without room for many is emptied one by one.
        """
        freed, first, at_once = 0, 0, 256
        while first < len(keys):
            some = keys[first : first + at_once]

            def work(txn: Any, some: Sequence[bytes] = some) -> int:
                return sum(self._tables.delete(txn, key) for key in some)

            try:
                freed += self.env.write(work, limit_bytes)
            except NoRoom:
                if at_once == 1:
                    raise
                at_once = max(1, at_once // 8)
            else:
                first += len(some)
        return freed

    def counters(self) -> dict[str, int]:
        """What was written, evicted, refused and dropped here: blocks and payload bytes."""
        with self.env.read() as txn:
            return read_counts(txn, self.db["meta"])

    def counted_since(self) -> float | None:
        """When counting began anew, in epoch seconds; None where it never did."""
        with self.env.read() as txn:
            return read_since(txn, self.db["meta"])

    def count(self, limit_bytes: int | None = None, **amounts: int) -> None:
        """Add to the counters, in a commit of its own that keeps to the budget."""
        if limit_bytes is None:
            limit_bytes = self.limit_bytes()
        self.env.write(lambda txn: add_counts(txn, self.db["meta"], amounts), limit_bytes)

    def reset_counters(self, now_s: float) -> None:
        """Count from nothing again, since `now_s` (epoch seconds)."""
        self.env.write(lambda txn: reset_counts(txn, self.db["meta"], now_s), self.limit_bytes())

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
                entries = next_entries(cursor, last, AT_ONCE)
            if not entries:
                return
            yield from entries
            last = entries[-1][0]

    def limit_bytes(self) -> int | None:
        """How far the file may grow now; None: as far as the disk goes."""
        return None if self._room is None else self._room.limit()

    def _without_stored(self, blocks: Sequence[NewBlock]) -> list[NewBlock]:
        with self.env.read() as txn:
            return [
                block
                for block in blocks
                if not self._tables.is_stored(
                    txn, block.parent, pack_ids(block.token_ids), self._bad
                )
            ]

    def _commit(self, batch: list[Encoded], num_behind: int = 0) -> tuple[int, int]:
        """Write a batch; where there is no room for it, none of those behind it is tried."""

        def work(txn: Any) -> tuple[int, int]:
            num_blocks, num_bytes = write(txn, self._tables, batch, self._bad)
            amounts = {"written_blocks": num_blocks, "written_bytes": num_bytes}
            add_counts(txn, self.db["meta"], amounts)
            return num_blocks, num_bytes

        try:
            written = self.env.write(work) if self._room is None else self._room.write(batch, work)
        except StoreFull:
            with suppress(StoreError):  # a number for `cache stats`, no more
                self.count(refused_blocks=len(batch) + num_behind)
            raise
        self._bad.difference_update(encoded.key for encoded in batch)
        return written
