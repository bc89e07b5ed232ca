"""The block pool as a state machine against plain lists: runs never overlap, KV is never lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Run
from chatkv.errors import ContextFull
from chatkv.model.config import ModelConfig

CONFIG = ModelConfig("llama", 8, 4, 4, 1, 1, 1, 2, 1e-5, 1e4, 64)

STEPS = st.lists(
    st.tuples(st.sampled_from(["grow", "release"]), st.integers(0, 3), st.integers(1, 6)),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_runs_keep_their_kv_and_never_overlap(steps: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(CONFIG, 12, torch.float32, torch.device("cpu"))
    runs = [Run() for _ in range(4)]
    contents: list[list[float]] = [[] for _ in runs]
    stamp = 0.0
    for action, which, blocks in steps:
        run, content = runs[which], contents[which]
        if action == "release":
            pool.release(run)
            content.clear()
            continue
        wanted = run.num_blocks + blocks
        before = (run.first_block, run.num_blocks)
        try:
            pool.reserve(run, wanted * BLOCK_TOKENS)
        except ContextFull:
            assert (run.first_block, run.num_blocks) == before
            continue
        for block in range(len(content), wanted):
            stamp += 1
            start = block * BLOCK_TOKENS
            pool.slots(run, start, start + BLOCK_TOKENS).fill_(stamp)
            content.append(stamp)
        taken = [set(range(r.first_block, r.end)) for r in runs]
        assert sum(map(len, taken)) == len(set().union(*taken)) == 12 - pool.free_blocks
        for other, stamps in zip(runs, contents, strict=True):
            for block, value in enumerate(stamps):
                start = block * BLOCK_TOKENS
                assert (pool.slots(other, start, start + BLOCK_TOKENS) == value).all()


def test_a_run_that_cannot_grow_where_it_is_moves_with_its_kv() -> None:
    """Spelled out, since few of the random steps above lead to a move."""
    pool = BlockPool(CONFIG, 12, torch.float32, torch.device("cpu"))
    runs = [Run() for _ in range(3)]
    for stamp, run in enumerate(runs):
        pool.reserve(run, BLOCK_TOKENS)
        pool.slots(run, 0, BLOCK_TOKENS).fill_(stamp + 1)
    before = runs[0].first_block
    pool.reserve(runs[0], 4 * BLOCK_TOKENS)
    assert runs[0].first_block != before
    for stamp, run in enumerate(runs):
        assert (pool.slots(run, 0, BLOCK_TOKENS) == stamp + 1).all()


def test_a_full_pool_says_what_is_free() -> None:
    pool = BlockPool(CONFIG, 2, torch.float32, torch.device("cpu"))
    pool.reserve(Run(), BLOCK_TOKENS)
    with pytest.raises(ContextFull, match="64 tokens of KV are free"):
        pool.reserve(Run(), 2 * BLOCK_TOKENS)
