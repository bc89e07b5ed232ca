"""How the disk tier gets at the KV of a pool: in place, or through a ring of slabs.

Host memory is read and written where it is (`InPlace`). To a device, values are decoded into slabs
of pinned memory, each sent with one large copy and scattered to its blocks there (`Staged`): a
device copies small pieces at a fraction of its rate. Values of the codecs that the device knows are
sent as they are stored, and decoded there. A thread that has filled a slab waits until it is in the
pool, while the others fill theirs; so what is reported as loaded is there, an end of the load
leaves nothing on its way, and no history takes more memory than the ring.

On the way out a block is copied within the device, in the order of the steps that write it, and
that is all that its turn waits for. Whoever writes it to the disk has it encoded there, where the
device knows the codec, and fetched, beside the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool, Run
from chatkv.restore.ring import RING_BYTES, SLAB_BYTES, Ring, Way, wait
from chatkv.restore.taking import Bits, Copy, Taken, as_bits, of_group
from chatkv_kernels.blocks import scatter_blocks
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import RunResult, StoredBlock
from chatkv_store.errors import BlockMiss
from chatkv_store.layout import KVLayout
from chatkv_store.loader import Destination, default_threads
from chatkv_store.writer import MAX_QUEUED_BYTES

# What a device holds of KV on its way: slabs that have come, and blocks that the writer has not
# come to yet.
DEVICE_BYTES = RING_BYTES + MAX_QUEUED_BYTES


class Reach(Protocol):
    """Reads and writes the KV of a pool's runs."""

    def destination(self, run: Run) -> Bits | Destination:
        """Where `load_blocks` puts the run's KV, positions being those of its tokens."""

    def take(self, run: Run, start: int, stop: int, codec: str) -> Taken:
        """The KV of the run's tokens [start, stop), all in one block, which nobody writes
        meanwhile, to be stored with this codec. Waits for no device."""

    def look(self, run: Run, start: int, stop: int) -> Taken:
        """The same, to be sent somewhere at once: where it lies, if that can be read."""

    def put(self, run: Run, group: int, start: int, bits: Bits) -> None:
        """Write bits [layers, 2, heads, tokens, head_dim] of the layers of value `group` to the
        tokens from `start` on, all in one block; they are there when this returns."""


def reach(pool: Pool, layout: KVLayout) -> Reach:
    """How KV of this layout gets into a pool and out of it."""
    if isinstance(pool, BlockPool):
        return InPlace(pool, layout)
    assert isinstance(pool, PagedPool)
    with pool.lock:
        if pool not in _ways:
            slab_bytes = max(SLAB_BYTES, layout.bytes_per_token * layout.block_tokens)
            num_slabs = min(default_threads(), max(1, RING_BYTES // slab_bytes))
            _ways[pool] = Way(Ring(num_slabs, slab_bytes, pool.device.type == "cuda"), pool)
        return Staged(pool, layout, _ways[pool])


@dataclass(frozen=True)
class InPlace:
    """Of a pool in this process' memory whose runs are consecutive."""

    pool: BlockPool
    layout: KVLayout

    def destination(self, run: Run) -> Bits:
        return as_bits(self.pool.slots(run, 0, run.capacity))

    def take(self, run: Run, start: int, stop: int, codec: str) -> Taken:
        bits = as_bits(self.pool.slots(run, start, stop)).copy()
        return Taken(lambda group: of_group(bits, self.layout, group))

    def look(self, run: Run, start: int, stop: int) -> Taken:
        bits = as_bits(self.pool.slots(run, start, stop))
        return Taken(lambda group: of_group(bits, self.layout, group))

    def put(self, run: Run, group: int, start: int, bits: Bits) -> None:
        layers, stop = self.layout.value_layers(group), start + bits.shape[3]
        there = as_bits(self.pool.slots(run, start, stop))
        there[layers.start : layers.stop] = bits


_ways: WeakKeyDictionary[PagedPool, Way] = WeakKeyDictionary()


class Staged:
    """Of a pool of blocks, on a device or not."""

    def __init__(self, pool: PagedPool, layout: KVLayout, way: Way) -> None:
        self.pool, self.layout, self.way = pool, layout, way

    def destination(self, run: Run) -> Destination:
        if self.way.into is not None:  # copies of shared blocks may still be on their way
            self.way.into.wait_stream(torch.cuda.current_stream(self.pool.device))
        return _StagedRun(self, run)

    def take(self, run: Run, start: int, stop: int, codec: str) -> Taken:
        """In the order of steps: behind the one that computed it, in front of any that is to write
        into the block when it has become somebody else's."""
        block, first = run.blocks[start // BLOCK_TOKENS], start // BLOCK_TOKENS * BLOCK_TOKENS
        tokens = slice(start - first, stop - first)
        kv = self.pool.kv[block].clone()
        copy = Copy(kv, tokens, start, codec, self.layout, self.way)
        is_coded_there = stop - start == BLOCK_TOKENS and self.way.codecs.knows(codec)
        return Taken(copy.value, copy.encoded if is_coded_there else None)

    def look(self, run: Run, start: int, stop: int) -> Taken:
        return self.take(run, start, stop, "raw")

    def put(self, run: Run, group: int, start: int, bits: Bits) -> None:
        layers, pool = self.layout.value_layers(group), self.pool
        block, first = run.blocks[start // BLOCK_TOKENS], start % BLOCK_TOKENS
        tokens = slice(first, first + bits.shape[3])
        with self.way.ring.slab() as slab, torch.cuda.stream(self.way.into):
            host = slab.view(pool.dtype)[: bits.size].view(bits.shape)
            as_bits(host)[...] = bits
            there = pool.kv[block, layers.start : layers.stop, :, :, tokens]
            there.copy_(host, non_blocking=True)
            wait(self.way.into)

    def send_encoded(
        self,
        codec: int,
        payloads: Tensor,
        starts: Sequence[int],
        layers: range,
        table: Sequence[int],
        stop: int,
    ) -> None:
        """As `send`, for payloads of a codec that the device knows, bytes in a slab that begin at
        `starts`; stop: behind the position of the last token."""
        device = self.pool.device
        with torch.cuda.stream(self.way.into):
            blocks = torch.tensor(table, dtype=torch.int32).to(device)
            offsets = torch.tensor(starts, dtype=torch.int64).to(device)
            staged = payloads.to(device, non_blocking=True)
            into = self.pool.kv[:, layers.start : layers.stop]
            self.way.codecs.unpack(codec, staged, offsets, into, blocks, stop)
            wait(self.way.into)

    def send(self, kv: Tensor, layers: range, table: Sequence[int]) -> None:
        """Put kv [blocks, layers, 2, num_kv_heads, tokens, head_dim], in a slab, into the pool's
        blocks of that table; it is there when this returns."""
        device = self.pool.device
        with torch.cuda.stream(self.way.into):
            blocks = torch.tensor(table, dtype=torch.int32).to(device)
            staged = kv.to(device, non_blocking=True)
            scatter_blocks(self.pool.kv[:, layers.start : layers.stop], blocks, staged)
            wait(self.way.into)


@dataclass(frozen=True)
class _StagedRun:
    """One run as a destination of `load_blocks`."""

    staged: Staged
    run: Run

    @property
    def run_blocks(self) -> int:
        layout = self.staged.layout
        value_bytes = layout.bytes_per_layer_block * layout.layers_per_value
        return self.staged.way.ring.slab_bytes // value_bytes

    def read(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult:
        if self._is_coded_there(blocks, group):
            done = self._read_encoded(store, blocks, group, start)
            if done is not None:
                return done
        layout, pool = self.staged.layout, self.staged.pool
        layers = layout.value_layers(group)
        shape = (len(blocks), len(layers), *pool.kv.shape[2:])
        first = start // BLOCK_TOKENS
        num_bytes, miss = 0, None
        with self.staged.way.ring.slab() as slab:
            kv = slab.view(pool.dtype)[: prod(shape)].view(shape)
            sound = 0
            try:
                for block, out in zip(blocks, as_bits(kv), strict=True):
                    num_bytes += store.read(block, group, out)
                    sound += 1
            except BlockMiss as error:
                miss = error.reason
            if sound:
                self.staged.send(kv[:sound], layers, self.run.blocks[first : first + sound])
        return RunResult(sound, num_bytes, miss)

    def _is_coded_there(self, blocks: Sequence[StoredBlock], group: int) -> bool:
        """Whether the device decodes these: whole blocks of a codec that it knows, of one codec,
        that fit into a slab."""
        codec = blocks[0].header.codec
        num_bytes = sum(-(-block.header.values[group].num_bytes // 8) * 8 for block in blocks)
        return (
            self.staged.way.codecs.knows(codec)
            and num_bytes <= self.staged.way.ring.slab_bytes
            and all(
                block.header.codec == codec
                and block.num_tokens == block.header.num_tokens == BLOCK_TOKENS
                for block in blocks
            )
        )

    def _read_encoded(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult | None:
        """None where something is wrong that the store's own decoder will name."""
        codecs, codec = self.staged.way.codecs, blocks[0].header.codec
        layers = self.staged.layout.value_layers(group)
        first = start // BLOCK_TOKENS
        with self.staged.way.ring.slab() as slab:
            done, starts = store.fetch(blocks, group, slab.numpy())
            found = blocks[: len(starts)]
            if not found:
                return done
            ends = [
                at + block.header.values[group].num_bytes
                for at, block in zip(starts, found, strict=True)
            ]
            payloads = [slab.numpy()[at:end] for at, end in zip(starts, ends, strict=True)]
            positions = [block.start for block in found]
            if not codecs.are_sound(codec, payloads, len(layers), positions):
                return None
            table = self.run.blocks[first : first + len(found)]
            stop = max(positions) + BLOCK_TOKENS
            self.staged.send_encoded(codec, slab[: ends[-1]], starts, layers, table, stop)
        return done
