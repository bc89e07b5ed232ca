"""What the loader of a restore from both ends calls: layers of stored blocks into a pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from chatkv.restore.end_loader import OnLayers
from chatkv.restore.last_step import Layers
from chatkv.restore.taking import Bits
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import StoredBlock
from chatkv_store.layout import KVLayout
from chatkv_store.loader import Destination, LoadResult, default_threads, load_blocks


@dataclass(frozen=True)
class PoolLoads:
    """A `Load`. loaded(blocks) hears which blocks have come, drop(block) which one is damaged."""

    store: BlockStore
    layout: KVLayout
    into: Bits | Destination
    loaded: Callable[[Sequence[StoredBlock]], None]
    drop: Callable[[StoredBlock], None]
    cancelled: Callable[[], bool] | None = None

    def __call__(
        self,
        blocks: Sequence[StoredBlock],
        layers: Layers,
        on_layers: OnLayers,
        stop: Callable[[], bool],
    ) -> tuple[int, int, str | None]:
        ends = list(accumulate(block.num_tokens for block in blocks))

        def on_group(group: int, num_ok: int) -> None:
            if num_ok == ends[-1]:
                on_layers(self.layout.value_layers(group).stop)

        def is_over() -> bool:
            return stop() or (self.cancelled is not None and self.cancelled())

        done = self._read(blocks, layers, on_group, is_over)
        sound = bisect_right(ends, done.num_tokens_ok)
        self.loaded(blocks[:sound])
        damage = next(iter(done.misses), None)
        if damage is not None:
            self.drop(blocks[sound])
        return sound, done.bytes_read, damage

    def _read(
        self,
        blocks: Sequence[StoredBlock],
        layers: Layers,
        on_group: Callable[[int, int], None],
        stop: Callable[[], bool],
    ) -> LoadResult:
        """Where the first layers of the first group are prefill's, which may just be writing them,
        nothing is put there: what is read comes aside first."""
        begins_inside = layers.first > self.layout.value_layers(layers.groups.start).start
        if not begins_inside:
            where = self.store, blocks, self.layout, self.into, default_threads()
            return load_blocks(*where, on_group, stop, groups=layers.groups)
        assert isinstance(self.into, np.ndarray)
        ends = list(accumulate(block.num_tokens for block in blocks))
        aside = np.empty((*self.into.shape[:3], ends[-1], self.into.shape[4]), self.into.dtype)
        there = self.store, blocks, self.layout, aside, default_threads()
        positions = [0, *ends[:-1]]
        done = load_blocks(*there, stop=stop, positions=positions, groups=layers.groups)
        kept = slice(layers.first, self.layout.value_layers(layers.groups[-1]).stop)
        start, count = blocks[0].start, done.num_tokens_ok
        self.into[kept, :, :, start : start + count] = aside[kept, :, :, :count]
        on_group(layers.groups[-1], count)
        return done
