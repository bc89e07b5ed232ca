"""KV that goes to a pool through a ring of slabs, and comes back: to the bit what goes in place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatkv.engine.engine import Engine
from chatkv.engine.paged import PagedPool
from chatkv.engine.sequence import TokenSequence
from chatkv.restore import staging
from chatkv.restore.cost import CostFile
from chatkv.restore.layers import LayerLoad
from chatkv.restore.restorer import Restorer
from chatkv.restore.ring import Ring, Way
from chatkv.restore.saver import DiskTier
from chatkv.restore.staging import Staged, reach
from chatkv_store import BlockStore, KVLayout, StoreError, load_blocks
from chatkv_store.tables import value_key
from chatkv_store.writer import BlockWriter
from small_engine import CONFIG, answer, make_engine, some_ids

NAMESPACE = b"staging".ljust(32, b"\0")
LAYOUT = KVLayout(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, "float32")
IDS = some_ids(300, 1)


class Side:
    """An engine with its own way to one store."""

    def __init__(self, engine: Engine, disk: DiskTier, costs: Path) -> None:
        self.engine, self.disk = engine, disk
        self.restorer = Restorer(engine, LAYOUT, disk, CostFile(costs), "test")

    def compute(self, ids: list[int]) -> TokenSequence:
        sequence = TokenSequence(list(ids))
        self.engine.prefill(sequence)
        return sequence

    def restored(self, ids: list[int]) -> tuple[TokenSequence, Any]:
        sequence = TokenSequence()
        planned = self.restorer.plan(sequence, ids, len(ids) - 1, "reload")
        return sequence, self.restorer.restore(sequence, planned)

    def kv(self, sequence: TokenSequence, stop: int) -> Any:
        pool = self.engine.pool
        slots, blocks = pool.slot_index(sequence.run, 0, stop), pool.blocks
        return blocks[slots // blocks.shape[4], :, :, :, slots % blocks.shape[4]].numpy()


@pytest.fixture
def sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    """One over consecutive blocks in place; one over blocks anywhere, through two slabs of a block
    each, so that a history takes many turns of the ring. Each layer is a value of its own."""
    monkeypatch.setattr("chatkv_store.layout.MIN_VALUE_BYTES", 1)
    assert LAYOUT.num_values == CONFIG.num_layers == 2
    plain = make_engine()
    decoder = plain.decoder
    pool = PagedPool(CONFIG, 40, decoder.dtype, decoder.device)
    pool.kv.fill_(float("nan"))
    other = Engine(decoder, pool)
    staging._ways[pool] = Way(Ring(2, LAYOUT.bytes_per_token * LAYOUT.block_tokens, False), pool)
    with BlockStore(tmp_path / "kv") as store, BlockWriter(store) as writer:
        disk = DiskTier(store, writer, NAMESPACE)
        yield tuple(Side(engine, disk, tmp_path / "costs") for engine in (plain, other))  # type: ignore[misc]
    plain.close()
    other.close()


def spoil(store: BlockStore, block: bytes) -> None:
    """Change a bit of a block's first value."""
    key = value_key(block, 0)

    def work(txn: Any) -> None:
        value = bytearray(txn.get(key, db=store.db["values"]))
        value[len(value) // 2] ^= 16
        txn.put(key, bytes(value), db=store.db["values"])

    store.env.write(work)


@pytest.mark.parametrize("saves_in_place", [True, False])
def test_what_is_saved_one_way_is_restored_both_ways(
    saves_in_place: bool, sides: tuple[Side, Side]
) -> None:
    source = sides[0 if saves_in_place else 1]
    computed = source.compute(IDS)
    source.restorer.save(computed, tail=True)
    source.disk.writer.flush(60)
    expected = source.kv(computed, 299)
    for side in sides:
        sequence, restored = side.restored(IDS)
        assert restored.num_loaded == sequence.num_cached == 299
        assert np.array_equal(side.kv(sequence, 299), expected)


def test_an_answer_on_restored_kv(sides: tuple[Side, Side]) -> None:
    plain, other = sides
    plain.restorer.save(plain.compute(IDS), tail=True)
    plain.disk.writer.flush(60)
    sequence = other.engine.memory.sequence("session")
    with other.engine.memory.use(sequence):
        planned = other.restorer.plan(sequence, IDS, 299, "reload")
        assert other.restorer.restore(sequence, planned).num_loaded == 299
        made = answer(other.engine, IDS, 10, name="session")
    assert made == answer(plain.engine, IDS, 10)


@pytest.mark.parametrize("block", [0, 2, 4])
def test_damage_is_a_miss_and_what_is_in_front_of_it_stays(
    block: int, sides: tuple[Side, Side]
) -> None:
    plain, other = sides
    computed = plain.compute(IDS)
    plain.restorer.save(computed, tail=True)
    store = plain.disk.store
    plain.disk.writer.flush(60)
    spoil(store, store.match(NAMESPACE, IDS, LAYOUT).blocks[block].key)
    sequence, restored = other.restored(IDS)
    assert sequence.num_cached == restored.num_loaded == 64 * block
    assert any("unusable" in notice for notice in restored.all_notices)
    assert np.array_equal(other.kv(sequence, 64 * block), plain.kv(computed, 64 * block))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_prefill_of_what_follows_waits_for_each_layer(
    is_damaged: bool, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what it is when all layers have come before; where one never does, it is computed
    again from where the sound part ends."""
    plain, other = sides
    plain.restorer.save(plain.compute(IDS), tail=True)
    plain.disk.writer.flush(60)
    store = plain.disk.store
    if is_damaged:
        spoil(store, store.match(NAMESPACE, IDS, LAYOUT).blocks[3].key)
    ids = [*IDS, *some_ids(20, 2)]
    logits = []
    for overlaps in (True, False):
        monkeypatch.setattr(Restorer, "_may_overlap", lambda *_, o=overlaps: o)
        sequence = TokenSequence()
        planned = other.restorer.plan(sequence, ids, 300, "reload")
        with other.engine.memory.use(sequence):
            restored = other.restorer.restore(sequence, planned)
            assert isinstance(restored.arriving, LayerLoad) == overlaps
            logits.append(other.engine.prefill(sequence, arriving=restored.arriving))
            assert restored.num_loaded == (192 if is_damaged else 300)
            if is_damaged and overlaps:  # afterwards the store has dropped it
                assert any("unusable" in notice for notice in restored.all_notices)
    assert torch.equal(*logits)


def test_both_ends(sides: tuple[Side, Side]) -> None:
    plain, _ = sides
    plain.restorer.save(plain.compute(IDS), tail=True)
    plain.disk.writer.flush(60)
    logits = []
    for side in sides:
        sequence = TokenSequence()
        planned = side.restorer.plan(sequence, IDS, 299, "both")
        restored = side.restorer.restore(sequence, planned)
        assert restored.arriving is not None
        logits.append(side.engine.prefill(sequence, arriving=restored.arriving))
        restored.arriving.close()
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_an_end_leaves_nothing_behind(sides: tuple[Side, Side]) -> None:
    """Cancelled or failed: no thread is left, and all slabs are back in the ring."""
    plain, other = sides
    plain.restorer.save(plain.compute(IDS), tail=True)
    plain.disk.writer.flush(60)
    blocks = plain.disk.store.match(NAMESPACE, IDS, LAYOUT).blocks
    sequence = TokenSequence(IDS)
    other.engine.reserve(sequence)
    kv = reach(other.engine.pool, LAYOUT)
    assert isinstance(kv, Staged)
    into = kv.destination(sequence.run)
    calls: list[int] = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) > 2

    assert load_blocks(plain.disk.store, blocks, LAYOUT, into, 2, stop=stop).stopped

    def gone(*_: Any) -> int:
        raise StoreError("the disk is gone")

    plain.disk.store.read, read = gone, plain.disk.store.read  # type: ignore[method-assign]
    with suppress(StoreError):
        load_blocks(plain.disk.store, blocks, LAYOUT, into, 2)
    plain.disk.store.read = read  # type: ignore[method-assign]
    assert not any(thread.name.startswith("kv-read") for thread in threading.enumerate())
    assert kv.way.ring._free.qsize() == kv.way.ring.num_slabs
    assert load_blocks(plain.disk.store, blocks, LAYOUT, into, 2).num_tokens_ok == 300


def test_a_ring_is_allocated_once_and_as_far_as_memory_is_granted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty, granted = torch.empty, 3

    def scarce(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        nonlocal granted
        if pin_memory:
            granted -= 1
            if granted < 0:
                raise RuntimeError("CUDA error: out of memory")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    ring = Ring(8, 4096, is_pinned=True)
    for _ in range(10):
        with ring.slab() as slab:
            assert slab.numel() == 4096
    assert ring._free.qsize() == 3
    granted = 0
    none = Ring(8, 4096, is_pinned=True)
    with none.slab() as slab:
        assert slab.numel() == 4096 and none._free.qsize() == 0


@pytest.mark.parametrize("is_in_place", [True, False])
def test_values_of_another_pool_are_put_in_their_place(
    is_in_place: bool, sides: tuple[Side, Side]
) -> None:
    """As a prefill worker's KV comes: value by value, the first block from its second half on."""
    source, target = sides if is_in_place else reversed(sides)
    computed = source.compute(IDS)
    expected = source.kv(computed, 299)
    sequence = target.compute(IDS[:32])
    mine = target.kv(sequence, 32)
    sequence.become(IDS, 32)
    target.engine.reserve(sequence)
    for start in range(0, 299, 64):
        stop, first = min(start + 64, 299), max(start, 32)
        taken = source.restorer.reach.look(computed.run, start, stop)
        for group in range(LAYOUT.num_values):
            bits = taken.value(group)[:, :, :, first - start :]
            target.restorer.reach.put(sequence.run, group, first, bits)
    assert np.array_equal(target.kv(sequence, 299)[32:], expected[32:])
    assert np.array_equal(target.kv(sequence, 32), mine)
