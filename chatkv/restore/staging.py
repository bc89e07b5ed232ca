"""How the disk tier gets at the KV of a pool: in place, or through a ring of slabs.

Host memory is read and written where it is (`InPlace`). To a device, values are decoded into slabs
of pinned memory, each sent with one large copy and scattered to its blocks there (`Staged`): a
device copies small pieces at a fraction of its rate. Values of the codec `packed` are sent as they
are stored, and decoded there. A thread that has filled a slab waits until it
is in the pool, while the others fill theirs; so what is reported as loaded is there, an end of the
load leaves nothing on its way, and no history takes more memory than the ring.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool, Run
from chatkv_kernels.blocks import scatter_blocks
from chatkv_kernels.packed import CODEC_ID as PACKED
from chatkv_kernels.packed import unpack_packed
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import RunResult, StoredBlock
from chatkv_store.errors import BlockMiss
from chatkv_store.layout import KVLayout
from chatkv_store.loader import Destination, default_threads

# All slabs together, and one of them: larger copies are hardly faster.
RING_BYTES = 256 << 20
SLAB_BYTES = 16 << 20

Bits = npt.NDArray[np.unsignedinteger[Any]]


class Reach(Protocol):
    """Reads and writes the KV of a pool's runs."""

    def destination(self, run: Run) -> Bits | Destination:
        """Where `load_blocks` puts the run's KV, positions being those of its tokens."""

    def copy(self, run: Run, start: int, stop: int) -> Bits:
        """The KV of the run's tokens [start, stop), all in one block, which nobody writes
        meanwhile: [num_layers, 2, num_kv_heads, stop - start, head_dim]."""


def reach(pool: Pool, layout: KVLayout) -> Reach:
    """How KV of this layout gets into a pool. A pool has one ring, whoever asks."""
    if isinstance(pool, BlockPool):
        return InPlace(pool)
    assert isinstance(pool, PagedPool)
    with pool.lock:
        if pool not in _rings:
            slab_bytes = max(SLAB_BYTES, layout.bytes_per_token * layout.block_tokens)
            num_slabs = min(default_threads(), max(1, RING_BYTES // slab_bytes))
            _rings[pool] = Ring(num_slabs, slab_bytes, pool.device.type == "cuda")
        return Staged(pool, layout, _rings[pool])


@dataclass(frozen=True)
class InPlace:
    """Of a pool in this process' memory whose runs are consecutive."""

    pool: BlockPool

    def destination(self, run: Run) -> Bits:
        return _bits(self.pool.slots(run, 0, run.capacity))

    def copy(self, run: Run, start: int, stop: int) -> Bits:
        return _bits(self.pool.slots(run, start, stop)).copy()


class Ring:
    """Slabs of host memory, allocated when the first one is needed and from then on kept; pinned
    where they are for a GPU, as many as the system grants: containers may grant little."""

    def __init__(self, num_slabs: int, slab_bytes: int, is_pinned: bool) -> None:
        self.num_slabs, self.slab_bytes, self._is_pinned = num_slabs, slab_bytes, is_pinned
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._is_allocated = False
        self._lock = threading.Lock()

    @contextmanager
    def slab(self) -> Iterator[Tensor]:
        """Bytes for one thread; waits until some are free."""
        with self._lock:
            if not self._is_allocated:
                self._allocate()
                self._is_allocated = True
        slab = self._free.get()
        try:
            yield slab
        finally:
            self._free.put(slab)

    def _allocate(self) -> None:
        for index in range(self.num_slabs):
            try:
                slab = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
            except RuntimeError:
                if index:
                    return
                slab = torch.empty(self.slab_bytes, dtype=torch.uint8)
            self._free.put(slab)


# One ring for each pool, whoever moves its KV.
_rings: WeakKeyDictionary[PagedPool, Ring] = WeakKeyDictionary()


class Staged:
    """Of a pool of blocks, on a device or not."""

    def __init__(self, pool: PagedPool, layout: KVLayout, ring: Ring) -> None:
        self.pool, self.layout, self.ring = pool, layout, ring
        is_gpu = pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if is_gpu else None  # type: ignore[no-untyped-call]

    def destination(self, run: Run) -> Destination:
        if self._stream is not None:  # copies of shared blocks may still be on their way
            self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        return _StagedRun(self, run)

    def copy(self, run: Run, start: int, stop: int) -> Bits:
        """A step has left the device before its turn goes on, so what its tokens are is there."""
        block, first = run.blocks[start // BLOCK_TOKENS], start // BLOCK_TOKENS * BLOCK_TOKENS
        source = self.pool.kv[block]
        with self.ring.slab() as slab, torch.cuda.stream(self._stream):
            staged = slab[: source.nbytes].view(source.dtype).view(source.shape)
            staged.copy_(source, non_blocking=True)
            self._wait()
            return _bits(staged[..., start - first : stop - first, :]).copy()

    def send_packed(
        self, payloads: Tensor, starts: Sequence[int], layers: range, table: Sequence[int]
    ) -> None:
        """As `send`, for payloads of the codec `packed`, bytes in a slab that begin at `starts`."""
        device = self.pool.device
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor(table, dtype=torch.int32).to(device)
            offsets = torch.tensor(starts, dtype=torch.int64).to(device)
            staged = payloads.to(device, non_blocking=True)
            into = self.pool.kv[:, layers.start : layers.stop]
            unpack_packed(staged, offsets, into, blocks)
            self._wait()

    def send(self, kv: Tensor, layers: range, table: Sequence[int]) -> None:
        """Put kv [blocks, layers, 2, num_kv_heads, tokens, head_dim], in a slab, into the pool's
        blocks of that table; it is there when this returns."""
        device = self.pool.device
        with torch.cuda.stream(self._stream):
            blocks = torch.tensor(table, dtype=torch.int32).to(device)
            staged = kv.to(device, non_blocking=True)
            scatter_blocks(self.pool.kv[:, layers.start : layers.stop], blocks, staged)
            self._wait()

    def _wait(self) -> None:
        """Until what this thread has put on the stream is done."""
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()


@dataclass(frozen=True)
class _StagedRun:
    """One run as a destination of `load_blocks`."""

    staged: Staged
    run: Run

    @property
    def run_blocks(self) -> int:
        layout = self.staged.layout
        value_bytes = layout.bytes_per_layer_block * layout.layers_per_value
        return self.staged.ring.slab_bytes // value_bytes

    def read(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult:
        if self._is_packed(blocks, group):
            return self._read_packed(store, blocks, group, start)
        layout, pool = self.staged.layout, self.staged.pool
        layers = layout.value_layers(group)
        shape = (len(blocks), len(layers), *pool.kv.shape[2:])
        first = start // BLOCK_TOKENS
        num_bytes, miss = 0, None
        with self.staged.ring.slab() as slab:
            kv = slab.view(pool.dtype)[: prod(shape)].view(shape)
            sound = 0
            try:
                for block, out in zip(blocks, _bits(kv), strict=True):
                    num_bytes += store.read(block, group, out)
                    sound += 1
            except BlockMiss as error:
                miss = error.reason
            if sound:
                self.staged.send(kv[:sound], layers, self.run.blocks[first : first + sound])
        return RunResult(sound, num_bytes, miss)

    def _is_packed(self, blocks: Sequence[StoredBlock], group: int) -> bool:
        """Whether the device decodes these: whole blocks that were packed, and fit into a slab."""
        num_bytes = sum(-(-block.header.values[group].num_bytes // 8) * 8 for block in blocks)
        return num_bytes <= self.staged.ring.slab_bytes and all(
            block.header.codec == PACKED
            and block.num_tokens == block.header.num_tokens == BLOCK_TOKENS
            for block in blocks
        )

    def _read_packed(
        self, store: BlockStore, blocks: Sequence[StoredBlock], group: int, start: int
    ) -> RunResult:
        first = start // BLOCK_TOKENS
        with self.staged.ring.slab() as slab:
            done, starts = store.fetch(blocks, group, slab.numpy())
            if starts:
                end = starts[-1] + blocks[len(starts) - 1].header.values[group].num_bytes
                table = self.run.blocks[first : first + len(starts)]
                layers = self.staged.layout.value_layers(group)
                self.staged.send_packed(slab[:end], starts, layers, table)
        return done


def _bits(kv: Tensor) -> Bits:
    """View of KV in this process' memory as bits."""
    kind = torch.uint32 if kv.dtype == torch.float32 else torch.uint16
    return kv.view(kind).numpy()
