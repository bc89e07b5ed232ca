"""Handing the KV that a turn computed to the disk tier, block by block, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from chatkv.engine.pool import BLOCK_TOKENS, Pool
from chatkv.engine.sequence import TokenSequence
from chatkv.restore.staging import reach
from chatkv_store import codec as codecs
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import NewBlock, StoredBlock
from chatkv_store.keys import block_key
from chatkv_store.layout import KVLayout
from chatkv_store.writer import BlockWriter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class DiskTier:
    """One model's KV on disk: its store, the writer behind it, and what the KV is called."""

    store: BlockStore
    writer: BlockWriter
    namespace: bytes
    codec: str = "lossless"

    @property
    def is_lossy(self) -> bool:
        return codecs.is_lossy(codecs.by_name(self.codec))


@dataclass
class _Chain:
    """Keys of a sequence's full blocks from the first on, and how many of these are dealt with.

    No token at or behind `quantised_end` has KV that came from a lossy block. A new block that
    begins before it (the front of a lossy block, where a session forks) is stored as it is: KV is
    quantised once, from its original, and never again.
    """

    keys: list[bytes] = field(default_factory=list)
    num_saved: int = 0
    quantised_end: int = 0
    on_disk: set[bytes] = field(default_factory=set)

    def cut(self, num_tokens: int) -> None:
        """Forget everything behind the first num_tokens tokens."""
        full = num_tokens // BLOCK_TOKENS
        del self.keys[full:]
        self.num_saved = min(self.num_saved, full)
        self.quantised_end = min(self.quantised_end, num_tokens)


class Saver:
    """Saves the sequences of one pool."""

    def __init__(
        self,
        pool: Pool,
        layout: KVLayout,
        disk: DiskTier,
        inverse_frequencies: npt.NDArray[np.float32],
    ) -> None:
        self.layout, self.disk = layout, disk
        self._reach = reach(pool, layout)
        self._inverse_frequencies = inverse_frequencies
        self._chains: WeakKeyDictionary[TokenSequence, _Chain] = WeakKeyDictionary()

    def begin(self, sequence: TokenSequence, stored: Iterable[StoredBlock]) -> None:
        """A turn begins: `sequence` keeps its first num_cached tokens, `stored` is on disk."""
        chain = self._chains.setdefault(sequence, _Chain())
        chain.cut(sequence.num_cached)
        chain.on_disk.update(
            block.key for block in stored if block.num_tokens == block.header.num_tokens
        )

    def loaded(self, sequence: TokenSequence, blocks: Iterable[StoredBlock]) -> None:
        """The KV of these blocks has come into the pool."""
        chain = self._chains.setdefault(sequence, _Chain())
        for block in blocks:
            if codecs.is_quantised(block.header.codec):
                end = block.start + block.num_tokens
                chain.quantised_end = max(chain.quantised_end, end)

    def stored(self, sequence: TokenSequence, keys: Iterable[bytes]) -> None:
        """Somebody else has put the blocks of these keys into the store."""
        self._chains.setdefault(sequence, _Chain()).on_disk.update(keys)

    def save(self, sequence: TokenSequence, tail: bool = False) -> None:
        """Queue blocks that were completed since the last call; with `tail`, the tokens of the
        unfinished last block too. Copies the KV, never waits for the disk. KV that is not exact
        is not saved."""
        if sequence.exact_until is not None:
            return
        chain = self._chains.setdefault(sequence, _Chain())
        full = sequence.num_cached // BLOCK_TOKENS
        chain.cut(sequence.num_cached)
        while len(chain.keys) < full:
            start = len(chain.keys) * BLOCK_TOKENS
            parent = chain.keys[-1] if chain.keys else self.disk.namespace
            chain.keys.append(block_key(parent, sequence.ids[start : start + BLOCK_TOKENS]))
        while chain.num_saved < full:
            start = chain.num_saved * BLOCK_TOKENS
            is_stored = chain.keys[chain.num_saved] in chain.on_disk
            if not is_stored and not self._put(sequence, chain, start, start + BLOCK_TOKENS):
                return  # the queue is full: tried again with the next block, or recomputed one day
            chain.num_saved += 1
        if tail and sequence.num_cached % BLOCK_TOKENS:
            self._put(sequence, chain, full * BLOCK_TOKENS, sequence.num_cached)

    def replace(self, sequence: TokenSequence, block: StoredBlock) -> None:
        """A stored block has turned out to be damaged: drop it, so that it is written anew."""
        self._chains.setdefault(sequence, _Chain()).on_disk.discard(block.key)
        self.disk.store.remove([block.key])

    def _put(self, sequence: TokenSequence, chain: _Chain, start: int, stop: int) -> bool:
        """Queue tokens [start, stop) of one block; False where the queue has no room."""
        index = start // BLOCK_TOKENS
        parent = chain.keys[index - 1] if index else self.disk.namespace
        codec = codecs.KEPT if start < chain.quantised_end else self.disk.codec
        # A copy, since the pool's memory may be given to somebody else before it is written.
        kv = self._reach.take(sequence.run, start, stop, codec)
        ids, frequencies = sequence.ids[start:stop], self._inverse_frequencies
        block = NewBlock(parent, ids, kv.value, start, frequencies, kv.encoded)
        return self.disk.writer.submit(self.disk.namespace, self.layout, [block], codec)
