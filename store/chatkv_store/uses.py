"""Who uses KV without a conversation here: requests that another engine keeps its KV for.

    uses    key of the log's last block -> length of a line of JSON (u32), the line, the ids, packed

A conversation is kept elsewhere and never deleted by us; a use is part of the cache: it says that a
log was asked for, and when, so that eviction knows what its blocks are worth and `cache` can list
them. It goes when its log goes on (the longer one takes its place), when there are too many, or
with the cache. To whoever asks it looks like a session without turns (logs.py).
"""

from __future__ import annotations

import json
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from chatkv_store.keys import chain_keys, pack_ids, unpack_ids
from chatkv_store.records import Session
from chatkv_store.tables import next_entries

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore
    from chatkv_store.layout import KVLayout

MAX_USES = 2000  # the oldest that are not pinned go; their blocks then count as unused
ID_CHARS = 26  # of a use's id, as many as a session's has: the beginning of its key in hex
T = TypeVar("T")
_LENGTH = struct.Struct("<I")
_TABLE = "uses"


@dataclass(frozen=True)
class Use:
    """One log; times are epoch seconds."""

    key: bytes  # of its last block
    title: str
    model: str
    namespace: bytes
    num_tokens: int
    created_at: float
    used_at: float
    num_requests: int
    pinned: bool = False

    @property
    def id(self) -> str:
        return self.key.hex()[:ID_CHARS]

    def as_session(self) -> Session:
        return Session(
            id=self.id,
            title=self.title,
            created_at=self.created_at,
            updated_at=self.used_at,
            head=self.key.hex(),
            model=self.model,
            namespace=self.namespace.hex(),
            settings={},
            pinned=self.pinned,
            num_turns=self.num_requests,
            num_tokens=self.num_tokens,
        )


class Uses:
    """The uses of one store. Safe for many threads and processes, as the store is."""

    def __init__(self, store: BlockStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    def note(
        self,
        namespace: bytes,
        token_ids: Sequence[int],
        layout: KVLayout,
        *,
        title: str,
        model: str,
        is_new: bool = True,
    ) -> Use:
        """Say that this log, whole blocks of `layout`, is used now; `is_new`: by another request.

        One commit. Uses whose logs it goes on from are replaced, and keep being pinned.
        """
        keys = chain_keys(namespace, token_ids, layout.block_tokens)
        now_s = self._clock()
        use = Use(keys[-1], title, model, namespace, len(token_ids), now_s, now_s, 0)

        def work(txn: Any) -> Use:
            result = use
            for key in keys:
                known = _read(key, txn.get(key, db=self._table))
                if known is not None:
                    result = replace(
                        result,
                        title=known.title,
                        created_at=min(result.created_at, known.created_at),
                        num_requests=max(result.num_requests, known.num_requests),
                        pinned=result.pinned or known.pinned,
                    )
                    txn.delete(key, db=self._table)
            result = replace(result, num_requests=result.num_requests + int(is_new))
            txn.put(result.key, _pack(result, pack_ids(token_ids)), db=self._table)
            self._drop_oldest(txn)
            return result

        return self._write(work)

    def every(self) -> list[Use]:
        """Every use, in no order; those that cannot be read are left out."""
        if self._table is None:
            return []
        found = (_read(key, value) for key, value in self._store.scan(_TABLE))
        return [use for use in found if use is not None]

    def token_log(self, key: bytes) -> array[int]:
        """The ids (u32) of the use under `key`; none where it is gone."""
        if self._table is None:
            return array("I")
        with self._store.env.read() as txn:
            stored = txn.get(key, db=self._table)
            return array("I") if stored is None else unpack_ids(_split(bytes(stored))[1])

    def pin(self, key: bytes, pinned: bool) -> None:
        """Keep its blocks, or let them be evicted again; nothing where it is gone."""

        def work(txn: Any) -> None:
            stored = txn.get(key, db=self._table)
            use = _read(key, stored)
            if use is not None:
                ids = _split(bytes(stored))[1]
                txn.put(key, _pack(replace(use, pinned=pinned), ids), db=self._table)

        self._write(work)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget these uses, in one commit; their blocks stay."""
        gone = list(keys)
        if gone:
            self._write(lambda txn: [txn.delete(key, db=self._table) for key in gone])

    def _write(self, work: Callable[[Any], T]) -> T:
        """In one commit, which keeps to the store's budget."""
        return self._store.env.write(work, self._store.limit_bytes())

    @property
    def _table(self) -> Any:
        """None in a store that was written before there were uses, open for reading only."""
        return self._store.db.get(_TABLE)

    def _drop_oldest(self, txn: Any) -> None:
        if txn.stat(self._table)["entries"] <= MAX_USES:
            return
        with txn.cursor(self._table) as cursor:
            found = [_read(key, value) for key, value in next_entries(cursor, None, 2 * MAX_USES)]
        free = sorted((use for use in found if use and not use.pinned), key=lambda use: use.used_at)
        for use in free[: max(0, len(found) - MAX_USES)]:
            txn.delete(use.key, db=self._table)


def _pack(use: Use, packed_ids: bytes) -> bytes:
    fields = {
        "title": use.title,
        "model": use.model,
        "namespace": use.namespace.hex(),
        "created_at": use.created_at,
        "used_at": use.used_at,
        "requests": use.num_requests,
        "pinned": use.pinned,
    }
    line = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    return _LENGTH.pack(len(line)) + line + packed_ids


def _split(stored: bytes) -> tuple[bytes, bytes]:
    (length,) = _LENGTH.unpack_from(stored)
    return stored[_LENGTH.size : _LENGTH.size + length], stored[_LENGTH.size + length :]


def _read(key: bytes, stored: bytes | memoryview | None) -> Use | None:
    """None where there is none, or its bytes make no sense: a use is only a hint."""
    if stored is None:
        return None
    try:
        line, packed_ids = _split(bytes(stored))
        fields = json.loads(line)
        return Use(
            key,
            str(fields["title"]),
            str(fields["model"]),
            bytes.fromhex(fields["namespace"]),
            len(packed_ids) // 4,
            float(fields["created_at"]),
            float(fields["used_at"]),
            int(fields["requests"]),
            bool(fields["pinned"]),
        )
    except (ValueError, KeyError, TypeError, struct.error):
        return None
