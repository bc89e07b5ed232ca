"""Saving in the background: nothing waits, nothing is lost unnoticed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatkv_store import BlockStore, BlockWriter, NewBlock
from kv_samples import SMALL, SPACE, chain, kv_bits, kv_of, restore, values_of

B = SMALL.block_tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(tmp_path / "kv") as opened:
        yield opened


class Gate:
    """Values whose making waits: the disk that cannot follow."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def block(self, ids: list[int]) -> NewBlock:
        def value(group: int) -> Any:
            self.entered.set()
            assert self.open.wait(30)
            return values_of(SMALL, kv_of(SMALL, ids))[group]

        return NewBlock(SPACE, ids, value)


def test_what_is_submitted_is_found_after_a_flush(store: BlockStore) -> None:
    ids = list(range(3 * B + 5))
    with BlockWriter(store) as writer:
        assert writer.submit(SPACE, SMALL, chain(SMALL, ids, kv_of(SMALL, ids)))
        assert writer.submit(SPACE, SMALL, chain(SMALL, ids, kv_of(SMALL, ids)))
        assert writer.flush(30)
        np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
        stats = writer.stats()
        assert (stats.queued, stats.written, stats.skipped, stats.dropped) == (0, 4, 4, 0)
        assert stats.num_bytes == sum(header.num_payload_bytes for header in store.headers())


def test_a_full_queue_drops_and_counts(store: BlockStore) -> None:
    gate = Gate()
    room = 2 * B * SMALL.bytes_per_token
    with BlockWriter(store, max_queued_bytes=room) as writer:
        assert writer.submit(SPACE, SMALL, [gate.block(list(range(B)))])
        assert gate.entered.wait(30)
        assert writer.submit(SPACE, SMALL, [gate.block(list(range(100, 100 + B)))])
        assert not writer.submit(SPACE, SMALL, [gate.block([5])]), "the queue is full"
        assert not writer.flush(0.01)
        assert writer.stats().queued == 2
        gate.open.set()
        assert writer.flush(30)
        assert writer.submit(SPACE, SMALL, [gate.block([5])]), "there is room again"
    assert (writer.stats().written, writer.stats().dropped) == (3, 1)
    assert store.counters()["dropped_blocks"] == 0, "it was written after all"


def test_what_was_never_written_is_in_the_counters_once(tmp_path: Path) -> None:
    def broken(group: int) -> Any:
        raise OSError("no such thing")

    gate = Gate()
    with BlockStore(tmp_path / "kv") as store:
        with BlockWriter(store, max_queued_bytes=B * SMALL.bytes_per_token) as writer:
            writer.submit(SPACE, SMALL, [gate.block(list(range(B)))])
            assert gate.entered.wait(30)
            for _ in range(3):  # as a saver does that tries again
                assert not writer.submit(SPACE, SMALL, chain(SMALL, [5], kv_bits(SMALL, 1)))
            assert store.counters()["dropped_blocks"] == 0, "nothing is written beside the queue"
            gate.open.set()
            assert writer.flush(30)
            writer.submit(SPACE, SMALL, [NewBlock(SPACE, [1, 2], broken)])
        assert writer.stats().dropped == 4
        assert store.counters()["dropped_blocks"] == 2
    with BlockStore(tmp_path / "kv") as store:
        assert store.counters()["dropped_blocks"] == 2
        store.reset_counters(1234.5)
        assert set(store.counters().values()) == {0} and store.counted_since() == 1234.5
        store.count(written_blocks=3)
        assert store.counters()["written_blocks"] == 3 and store.counted_since() == 1234.5


def test_a_failing_block_is_counted_and_the_next_is_written(store: BlockStore) -> None:
    def broken(group: int) -> Any:
        raise OSError("no such thing")

    with BlockWriter(store) as writer:
        writer.submit(SPACE, SMALL, [NewBlock(SPACE, [1, 2], broken)])
        writer.submit(SPACE, SMALL, chain(SMALL, [3], kv_bits(SMALL, 1)))
        assert writer.flush(30)
        stats = writer.stats()
    assert (stats.written, stats.dropped) == (1, 1)
    assert stats.error is not None and "no such thing" in stats.error
    assert store.match(SPACE, [3], SMALL).num_tokens == 1


def test_a_store_without_room_is_reported(tmp_path: Path) -> None:
    with (
        BlockStore(tmp_path / "kv", max_bytes=1 << 18, start_map_bytes=1 << 18) as store,
        BlockWriter(store) as writer,
    ):
        ids = list(range(100 * B))
        writer.submit(SPACE, SMALL, chain(SMALL, ids, kv_bits(SMALL, len(ids))), "raw")
        assert writer.flush(30)
        stats = writer.stats()
    assert stats.dropped == 100
    assert stats.error is not None and "cap" in stats.error
    with BlockStore(tmp_path / "kv", max_bytes=1 << 20) as store:
        assert store.counters()["dropped_blocks"] == 0, "these are counted as refused"


def test_closing_in_a_hurry_drops_what_waits(store: BlockStore) -> None:
    gate = Gate()
    writer = BlockWriter(store)
    writer.submit(SPACE, SMALL, [gate.block([1])])
    writer.submit(SPACE, SMALL, [gate.block([2])])
    assert gate.entered.wait(30)
    assert not writer.close(timeout=0.01)
    gate.open.set()
    assert writer.close(timeout=30)
    assert not writer.submit(SPACE, SMALL, chain(SMALL, [3], kv_bits(SMALL, 1)))
    assert (writer.stats().written, writer.stats().dropped) == (1, 2)
