"""New blocks on their way to the disk: encoded first, then committed together."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from chatkv_store import header as headers
from chatkv_store.chain import NewBlock
from chatkv_store.failpoints import failpoint
from chatkv_store.header import BlockHeader, ValueEntry
from chatkv_store.keys import ID_BYTES, pack_ids
from chatkv_store.layout import KVLayout
from chatkv_store.tables import Tables, child_entry, value_key


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block as it will stand on the disk."""

    key: bytes
    header: BlockHeader
    payloads: list[bytes]


def encode(namespace: bytes, layout: KVLayout, block: NewBlock, codec: str) -> Encoded:
    """Encode `block`; raises ValueError where its arrays are not those of `layout`."""
    from chatkv_store.codec import Context, for_block

    ids = pack_ids(block.token_ids)
    num_tokens = len(ids) // ID_BYTES
    if not 1 <= num_tokens <= layout.block_tokens:
        raise ValueError(f"a block holds 1..{layout.block_tokens} tokens, not {num_tokens}")
    encoder = for_block(codec, num_tokens == layout.block_tokens)
    context = Context(layout.dtype, block.start, block.inverse_frequencies)
    payloads = []
    for group in range(layout.num_values):
        if block.encoded is not None:
            payloads.append(block.encoded(group))
            continue
        bits = block.values(group) if callable(block.values) else block.values[group]
        if bits.shape != layout.value_shape(group, num_tokens) or bits.dtype != layout.bits_dtype:
            raise ValueError(f"value {group} is {bits.dtype} {bits.shape}, not as in {layout}")
        payloads.append(encoder.encode(bits, context))
    header = BlockHeader(
        encoder.id,
        layout,
        time.time(),
        namespace,
        block.parent,
        ids,
        tuple(ValueEntry(len(payload), headers.digest(payload)) for payload in payloads),
    )
    return Encoded(header.key, header, payloads)


def write(txn: Any, tables: Tables, batch: Sequence[Encoded], bad: Set[bytes]) -> tuple[int, int]:
    """Put `batch` into the tables; returns the blocks and payload bytes written.

    Blocks that are stored already are left out: another process may have been faster. `bad` holds
    the keys of damaged ones, which are replaced.
    """
    fresh = [e for e in batch if not tables.is_stored(txn, e.header.parent, e.header.ids, bad)]
    for e in fresh:
        tables.delete(txn, e.key)  # what is left of a damaged one
    # Values in the order in which a restore reads them: the first layers of all blocks lie
    # together on the disk.
    for group in range(max((len(e.payloads) for e in fresh), default=0)):
        for e in fresh:
            txn.put(value_key(e.key, group), e.payloads[group], db=tables.db["values"])
    failpoint("blocks.values")
    for e in fresh:
        tables.drop_extended(txn, e.header)
        txn.put(e.key, e.header.pack(), db=tables.db["blocks"])
        failpoint("blocks.headers")
        txn.put(e.header.parent, child_entry(e.header), db=tables.db["children"])
    return len(fresh), sum(e.header.num_payload_bytes for e in fresh)
