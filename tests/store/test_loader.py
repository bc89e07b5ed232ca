"""Parallel loading: everything arrives in order, and a miss ends the usable prefix."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chatkv_store import BlockStore, load_blocks
from chatkv_store.tables import value_key
from kv_samples import GROUPED, SMALL, SPACE, Bits, chain, kv_bits, kv_of, save

TOKENS = 5 * 64 + 10
B = SMALL.block_tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(tmp_path / "kv") as opened:
        save(opened, GROUPED, range(TOKENS), grouped())
        yield opened


def grouped() -> Bits:
    return kv_bits(GROUPED, TOKENS, seed=3)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_tokens_arrive_in_a_wider_pool(store: BlockStore, threads: int) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
    pool = np.zeros((4, 2, 8, TOKENS + 100, 64), "<u2")
    result = load_blocks(store, blocks, GROUPED, pool, threads)
    assert (result.num_tokens_ok, result.misses, result.stopped) == (TOKENS, [], False)
    assert result.bytes_read == sum(block.header.num_payload_bytes for block in blocks)
    np.testing.assert_array_equal(pool[:, :, :, :TOKENS], grouped())
    assert not pool[:, :, :, TOKENS:].any()


def test_blocks_may_go_anywhere(store: BlockStore) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
    positions = [640, 0, 64, 128, 320, 512]  # some neighbours, some not, one out of order
    pool = np.zeros((4, 2, 8, 1000, 64), "<u2")
    assert load_blocks(store, blocks, GROUPED, pool, 2, positions=positions).num_tokens_ok == TOKENS
    for block, at in zip(blocks, positions, strict=True):
        np.testing.assert_array_equal(
            pool[:, :, :, at : at + block.num_tokens],
            grouped()[:, :, :, block.start : block.start + block.num_tokens],
        )


def test_some_layers_alone(store: BlockStore) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
    pool, reports = np.zeros_like(grouped()), list[int]()
    result = load_blocks(
        store, blocks, GROUPED, pool, 2, lambda group, _: reports.append(group), groups=range(1, 2)
    )
    assert (result.num_tokens_ok, result.misses, reports) == (TOKENS, [], [1])
    assert not pool[:2].any()
    np.testing.assert_array_equal(pool[2:], grouped()[2:])


def test_part_of_the_last_block(store: BlockStore) -> None:
    blocks = store.match(SPACE, range(100), GROUPED).blocks
    assert [block.num_tokens for block in blocks] == [64, 36]
    pool = np.zeros((4, 2, 8, 200, 64), "<u2")
    assert load_blocks(store, blocks, GROUPED, pool, 2).num_tokens_ok == 100
    np.testing.assert_array_equal(pool[:, :, :, :100], grouped()[:, :, :, :100])
    assert not pool[:, :, :, 100:].any()


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_a_bad_value_ends_the_prefix(store: BlockStore, group: int, bad: int) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
    key = value_key(blocks[bad].key, group)
    store.env.write(lambda txn: txn.delete(key, db=store.db["values"]))
    reports: list[tuple[int, int]] = []
    pool = np.zeros_like(grouped())
    result = load_blocks(
        store, blocks, GROUPED, pool, 3, on_group_done=lambda *report: reports.append(report)
    )
    assert result.num_tokens_ok == bad * 64
    assert result.misses == [f"block {bad} (token {bad * 64}): value {group} is missing"]
    np.testing.assert_array_equal(pool[:, :, :, : bad * 64], grouped()[:, :, :, : bad * 64])
    assert [at for at, _ in reports] == [0, 1]
    assert reports[1][1] == bad * 64


def test_groups_are_reported_in_order_when_they_are_complete(store: BlockStore) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
    pool = np.zeros_like(grouped())
    reports = []

    def report(group: int, num_tokens_ok: int) -> None:
        layers = GROUPED.value_layers(group)
        np.testing.assert_array_equal(
            pool[layers.start : layers.stop], grouped()[layers.start : layers.stop]
        )
        reports.append((group, num_tokens_ok))

    load_blocks(store, blocks, GROUPED, pool, 4, on_group_done=report)
    assert reports == [(0, TOKENS), (1, TOKENS)]


def test_stopping(store: BlockStore) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
    pool = np.zeros_like(grouped())
    result = load_blocks(store, blocks, GROUPED, pool, 2, stop=lambda: True)
    assert (result.num_tokens_ok, result.bytes_read, result.stopped) == (0, 0, True)

    halfway = threading.Event()
    result = load_blocks(
        store,
        blocks,
        GROUPED,
        pool,
        1,
        on_group_done=lambda *_: halfway.set(),
        stop=halfway.is_set,
    )
    assert result.stopped
    assert result.num_tokens_ok == 0, "without its last layers no block is usable"
    assert result.bytes_read == sum(block.header.values[0].num_bytes for block in blocks)


def test_an_error_of_the_caller_comes_back(store: BlockStore) -> None:
    blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks

    before = threading.active_count()

    def report(group: int, num_tokens_ok: int) -> None:
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        load_blocks(store, blocks, GROUPED, np.zeros_like(grouped()), 2, on_group_done=report)
    with pytest.raises(ValueError, match="cannot read"):
        load_blocks(store, blocks, GROUPED, grouped()[:, :, :, :100].copy(), 2)
    assert threading.active_count() == before, "no reader outlives its load"


def test_nothing_to_load(store: BlockStore) -> None:
    result = load_blocks(store, [], GROUPED, np.zeros_like(grouped()), 2)
    assert (result.num_tokens_ok, result.misses) == (0, [])


def test_runs_of_different_codecs(tmp_path: Path) -> None:
    ids = list(range(6 * B))
    with BlockStore(tmp_path / "mixed") as store:
        blocks = chain(SMALL, ids, kv_of(SMALL, ids))
        store.put(SPACE, SMALL, blocks[:3], "raw")
        store.put(SPACE, SMALL, blocks[3:], "lossless")
        out = np.zeros_like(kv_of(SMALL, ids))
        match = store.match(SPACE, ids, SMALL)
        assert load_blocks(store, match.blocks, SMALL, out, 1).num_tokens_ok == len(ids)
        np.testing.assert_array_equal(out, kv_of(SMALL, ids))
