"""The block store against a plain dict, through random lives: saves, forks, removals, reopenings.

The dict knows which KV the first save of each block brought. Whatever the store returns must be
that, to the bit; and it must find at least every block whose chain is whole.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chatkv_store import BlockStore, KVLayout, block_key
from kv_samples import SPACE, chain, kv_of, restore

LAYOUT = KVLayout(2, 1, 4, "bfloat16", block_tokens=4)
B = LAYOUT.block_tokens
# Few different tokens, so that histories share prefixes of every length.
IDS = st.lists(st.integers(1, 2), min_size=1, max_size=14)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.opened()
        self.blocks: dict[bytes, tuple[int, ...]] = {}  # key -> all ids up to the block's end

    def opened(self) -> BlockStore:
        return BlockStore(self.folder / "kv", start_map_bytes=1 << 16)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @rule(ids=IDS, codec=st.sampled_from(["raw", "lossless"]))
    def save(self, ids: list[int], codec: str) -> None:
        self.store.put(SPACE, LAYOUT, chain(LAYOUT, ids, kv_of(LAYOUT, ids)), codec)
        for start in range(0, len(ids), B):
            end = min(start + B, len(ids))
            if any(self.goes_on(stored, ids[:end]) for stored in self.blocks.values()):
                continue  # contained in what is stored
            self.blocks[self.key(ids[:end])] = tuple(ids[:end])
            for shorter in range(start + 1, end):  # superseded
                self.blocks.pop(self.key(ids[:shorter]), None)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.blocks:
            key = data.draw(st.sampled_from(sorted(self.blocks)))
            assert self.store.remove([key]) > 0
            del self.blocks[key]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()

    @rule(ids=IDS)
    def look_up(self, ids: list[int]) -> None:
        match = self.store.match(SPACE, ids, LAYOUT)
        assert match.num_tokens == self.longest(tuple(ids))
        assert (match.miss is None) == (match.num_tokens == len(ids))
        np.testing.assert_array_equal(
            restore(self.store, LAYOUT, ids), kv_of(LAYOUT, ids[: match.num_tokens])
        )

    @invariant()
    def sound(self) -> None:
        assert {header.key for header in self.store.headers()} == set(self.blocks)
        assert self.store.verify() == []

    def goes_on(self, stored: tuple[int, ...], ids: list[int]) -> bool:
        """Whether the block that ends `stored` starts where the one of `ids` does and holds it."""
        same_start = (len(stored) - 1) // B == (len(ids) - 1) // B
        return same_start and stored[: len(ids)] == tuple(ids)

    def key(self, ids: list[int] | tuple[int, ...]) -> bytes:
        parent = SPACE
        for start in range(0, len(ids), B):
            parent = block_key(parent, ids[start : start + B])
        return parent

    def longest(self, ids: tuple[int, ...]) -> int:
        """The longest prefix that whole blocks and the front of one more block make up."""
        end = 0
        while end + B <= len(ids) and self.key(ids[: end + B]) in self.blocks:
            end += B
        best = end
        for stored in self.blocks.values():
            if end <= len(stored) - 1 < end + B and stored[:end] == ids[:end]:
                same = end
                while same < min(len(stored), len(ids)) and stored[same] == ids[same]:
                    same += 1
                best = max(best, same)
        return best


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=40,
    derandomize=True,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
