"""Why KV is not there: what is counted as missing, and where words part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.sequence import TokenSequence
from chatkv.restore.misses import cause, departure_in_memory, departure_on_disk, num_missing
from chatkv_store.blocks import BlockStore, NewBlock, StoredBlock
from chatkv_store.keys import block_key, namespace
from chatkv_store.layout import BLOCK_TOKENS, KVLayout

LAYOUT = KVLayout(1, 1, 8, "float32")


@given(
    st.lists(st.sampled_from([None, 3, BLOCK_TOKENS]), max_size=6),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_every_missing_token_is_counted_once(
    lengths: list[int | None], in_pool: int, history: int
) -> None:
    header: Any = None
    stored = [
        None if length is None else StoredBlock(b"", BLOCK_TOKENS * index, length, header)
        for index, length in enumerate(lengths)
    ]
    there = set(range(in_pool))
    for block in stored:
        if block is not None:
            there |= set(range(block.start, block.start + block.num_tokens))
    assert num_missing(stored, in_pool, history) == len(set(range(history)) - there)


def test_words_part_in_memory_where_they_first_differ() -> None:
    sequence = TokenSequence(ids=[1, 2, 3, 4], num_cached=3)
    departure = departure_in_memory(sequence, [1, 2, 9, 4])
    assert departure is not None
    assert (departure.position, departure.token, departure.other) == (2, 9, 3)
    assert departure_in_memory(sequence, [1, 2, 3, 9]) is None  # that one never had any KV
    assert departure_in_memory(sequence, [1, 2]) is None


def test_words_part_on_disk_inside_of_a_block(tmp_path: Path) -> None:
    space = namespace(b"weights", b"config", LAYOUT, "lossless")
    ids = list(range(100))
    zeros = np.zeros(LAYOUT.value_shape(0, BLOCK_TOKENS), LAYOUT.bits_dtype)
    with BlockStore(tmp_path) as store:
        assert cause(store, space, ids, 0) == "the KV cache is empty"
        store.register(space, {"layout": LAYOUT.to_json(), "model": "m", "codec": "lossless"})
        parent = space
        for start in (0, BLOCK_TOKENS):
            block = ids[start : start + BLOCK_TOKENS]
            store.put(space, LAYOUT, [NewBlock(parent, block, [zeros[:, :, :, : len(block)]])])
            parent = block_key(parent, block)
        asked = [*ids[:70], 1000, 1001]
        departure = departure_on_disk(store.match(space, asked, LAYOUT), asked)
        assert departure is not None
        assert (departure.position, departure.token, departure.other) == (70, 1000, 70)
        assert departure_on_disk(store.match(space, ids, LAYOUT), ids) is None
        # The last token is not asked for, since its logits are wanted: that is no departure.
        same = ids[:70]
        assert departure_on_disk(store.match(space, same[:-1], LAYOUT), same) is None
        assert cause(store, space, asked, 70) == "it was deleted"
        other = namespace(b"other weights", b"config", LAYOUT, "lossless")
        store.register(other, {"layout": LAYOUT.to_json(), "model": "m", "codec": "lossless"})
        assert "other weights" in cause(store, other, ids, 0)
