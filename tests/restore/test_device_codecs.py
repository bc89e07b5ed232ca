"""KV that a device encodes and decodes itself: the bytes and the bits of the CPU's codecs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Pool
from chatkv.engine.sequence import TokenSequence
from chatkv.model.rope import inverse_frequencies
from chatkv.restore.device_codecs import DeviceCodecs
from chatkv.restore.ring import Ring, Way
from chatkv.restore.saver import DiskTier, Saver
from chatkv.restore.staging import InPlace, Staged
from chatkv_kernels.dispatch import has_kernel
from chatkv_store import BlockStore, KVLayout, load_blocks
from chatkv_store.tables import value_key
from chatkv_store.writer import BlockWriter
from small_engine import CONFIG as SMALL
from small_engine import some_ids

CONFIG = replace(SMALL, num_layers=3)
CPU = torch.device("cpu")
CODECS = ["packed", "int8", "fp8", "int4"]
NAMESPACES = (b"device".ljust(32, b"\0"), b"host".ljust(32, b"\0"))
IDS = some_ids(200, 1)
FREQUENCIES = inverse_frequencies(CONFIG)[0].numpy()


@pytest.fixture(autouse=True)
def _two_layers_to_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one in the last."""
    monkeypatch.setattr("chatkv_store.layout.MIN_VALUE_BYTES", 2 * 2 * 2 * 8 * 2 * BLOCK_TOKENS)
    layout = layout_of(torch.bfloat16)
    assert (layout.layers_per_value, layout.num_values) == (2, 2)


def layout_of(dtype: torch.dtype) -> KVLayout:
    name: Any = str(dtype).removeprefix("torch.")
    return KVLayout(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, name)


def filled(pool: Pool, kv: Tensor | None = None) -> TokenSequence:
    """A sequence in a pool that has this KV [layers, 2, heads, tokens, head_dim], or none."""
    sequence = TokenSequence(list(IDS), num_cached=len(IDS))
    pool.reserve(sequence.run, len(IDS))
    if kv is not None:
        slots, blocks = pool.slot_index(sequence.run, 0, len(IDS)), pool.blocks
        tokens = kv.permute(3, 0, 1, 2, 4)
        blocks[slots // blocks.shape[4], :, :, :, slots % blocks.shape[4]] = tokens
    return sequence


def bits_of(pool: Pool, sequence: TokenSequence, stop: int) -> Tensor:
    slots, blocks = pool.slot_index(sequence.run, 0, stop), pool.blocks
    return blocks[slots // blocks.shape[4], :, :, :, slots % blocks.shape[4]].view(torch.int16)


def random_kv(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    size = (CONFIG.num_layers, 2, CONFIG.num_kv_heads, len(IDS), CONFIG.head_dim)
    kv = torch.randn(size, generator=generator) * torch.rand(size[-1], generator=generator) * 8
    kv[1, :, :, 70, 3] = torch.inf  # one block that cannot be quantised
    return kv.to(dtype)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for name in ("pack", "unpack"):
            method = getattr(DeviceCodecs, name)

            def call(*given: Any, name: str = name, method: Any = method) -> Any:
                calls[name] += 1
                return method(*given)

            patch.setattr(DeviceCodecs, name, call)
        yield calls


def save(pool: Pool, sequence: TokenSequence, store: BlockStore, space: bytes, codec: str) -> None:
    with BlockWriter(store) as writer:
        disk = DiskTier(store, writer, space, codec)
        Saver(pool, layout_of(pool.dtype), disk, FREQUENCIES).save(sequence, tail=True)
        writer.flush(60)
        assert writer.stats().error is None


def staged(pool: PagedPool, num_blocks: int = 3) -> Staged:
    """Through a ring that holds as many blocks."""
    layout = layout_of(pool.dtype)
    slab_bytes = num_blocks * layout.bytes_per_token * BLOCK_TOKENS
    return Staged(pool, layout, Way(Ring(2, slab_bytes, False), pool))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS)
def test_it_is_what_the_cpu_writes_and_reads(
    codec: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three full blocks in two values each, and a tail, which is never the device's."""
    layout, kv = layout_of(dtype), random_kv(dtype)
    there, here = PagedPool(CONFIG, 9, dtype, CPU), BlockPool(CONFIG, 9, dtype, CPU)
    with BlockStore(tmp_path / "kv") as store:
        with counted(monkeypatch) as calls:
            save(there, filled(there, kv), store, NAMESPACES[0], codec)
        assert calls["pack"] == 3 * 2, "a block's values of two layers at once, then the last one"
        save(here, filled(here, kv), store, NAMESPACES[1], codec)
        stored = [store.match(space, IDS, layout) for space in NAMESPACES]
        assert [match.num_tokens for match in stored] == [200, 200]
        for ours, theirs in zip(stored[0].blocks, stored[1].blocks, strict=True):
            assert store.payloads(ours) == store.payloads(theirs)
        found = []
        for pool, reach in ((there, staged(there)), (here, InPlace(here, layout))):
            sequence = filled(pool)
            into = reach.destination(sequence.run)
            with counted(monkeypatch) as calls:
                done = load_blocks(store, stored[0].blocks, layout, into, 2)
            assert done.num_tokens_ok == 200
            assert bool(calls["unpack"]) == (pool is there)
            found.append(bits_of(pool, sequence, 200))
    assert torch.equal(*found)


@pytest.mark.slow
def test_by_the_kernels_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    dtype = torch.float16
    layout, kv = layout_of(dtype), random_kv(dtype)
    called: set[str] = set()

    def kernel(self: has_kernel[..., Any], *arguments: Any) -> Any:
        called.add(self.reference.__name__)
        return self.kernel(*arguments)

    for codec in ("packed", "int4"):
        pool, here = PagedPool(CONFIG, 9, dtype, CPU), BlockPool(CONFIG, 9, dtype, CPU)
        with BlockStore(tmp_path / codec) as store:
            save(here, filled(here, kv), store, NAMESPACES[1], codec)
            sequence = filled(pool)
            with monkeypatch.context() as patch:
                patch.setattr(has_kernel, "__call__", kernel)
                save(pool, filled(pool, kv), store, NAMESPACES[0], codec)
                blocks = store.match(NAMESPACES[0], IDS, layout).blocks
                into = staged(pool).destination(sequence.run)
                assert load_blocks(store, blocks, layout, into, 1).num_tokens_ok == 200
            theirs = store.match(NAMESPACES[1], IDS, layout).blocks
            for ours, other in zip(blocks, theirs, strict=True):
                assert store.payloads(ours) == store.payloads(other)
            twin = filled(here)
            load_blocks(store, theirs, layout, InPlace(here, layout).destination(twin.run), 1)
            assert torch.equal(bits_of(pool, sequence, 200), bits_of(here, twin, 200))
    assert called == {"pack_packed", "unpack_packed", "pack_int4", "unpack_int4", "scatter_blocks"}


@pytest.mark.parametrize("codec", ["packed", "int8"])
def test_damage_is_a_miss(codec: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    layout, pool = layout_of(dtype), PagedPool(CONFIG, 9, dtype, CPU)
    with BlockStore(tmp_path / "kv") as store:
        save(pool, filled(pool, random_kv(dtype)), store, NAMESPACES[0], codec)
        blocks = store.match(NAMESPACES[0], IDS, layout).blocks
        key = value_key(blocks[1].key, 1)

        def work(txn: Any) -> None:
            value = bytearray(txn.get(key, db=store.db["values"]))
            value[len(value) // 2] ^= 16
            txn.put(key, bytes(value), db=store.db["values"])

        store.env.write(work)
        sequence = filled(pool)
        into = staged(pool).destination(sequence.run)
        done = load_blocks(store, blocks, layout, into, 2)
        assert done.num_tokens_ok == BLOCK_TOKENS and "digest" in done.misses[0]


def test_what_no_kernel_should_see_is_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that keys of another rotation went into; and those that do not fit into a slab."""
    dtype = torch.bfloat16
    layout, pool = layout_of(dtype), PagedPool(CONFIG, 9, dtype, CPU)
    here = BlockPool(CONFIG, 9, dtype, CPU)
    source = filled(here, random_kv(dtype))
    with BlockStore(tmp_path / "kv") as store:
        with BlockWriter(store) as writer:
            disk = DiskTier(store, writer, NAMESPACES[0], "int8")
            Saver(here, layout, disk, 2 * FREQUENCIES).save(source, tail=True)
        blocks = store.match(NAMESPACES[0], IDS, layout).blocks
        sequences = [filled(pool), filled(here)]
        with counted(monkeypatch) as calls:
            into = staged(pool).destination(sequences[0].run)
            assert load_blocks(store, blocks, layout, into, 2).num_tokens_ok == 200
            assert not calls
        load_blocks(store, blocks, layout, InPlace(here, layout).destination(sequences[1].run), 2)
        assert torch.equal(bits_of(pool, sequences[0], 200), bits_of(here, sequences[1], 200))


def test_noise_is_written_although_it_is_larger_than_its_kv(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    pool = PagedPool(CONFIG, 9, dtype, CPU)
    words = np.random.default_rng(3).integers(0, 1 << 16, (3, 2, 2, len(IDS), 8)).astype(np.uint16)
    sequence = filled(pool, torch.from_numpy(words.view(np.int16)).view(dtype))
    kv = staged(pool, num_blocks=1)
    taken = kv.take(sequence.run, 0, BLOCK_TOKENS, "packed")
    assert taken.encoded is not None
    assert sum(len(taken.encoded(group)) for group in range(2)) > kv.way.ring.slab_bytes


def test_what_is_taken_stays_as_it_was() -> None:
    """Others may write into the block before it is fetched."""
    dtype = torch.bfloat16
    pool = PagedPool(CONFIG, 9, dtype, CPU)
    sequence = filled(pool, random_kv(dtype))
    before = bits_of(pool, sequence, BLOCK_TOKENS).clone()
    taken = staged(pool).take(sequence.run, 5, 50, "lossless")
    assert taken.encoded is None
    pool.kv.zero_()
    found = np.concatenate([taken.value(group) for group in range(2)])
    np.testing.assert_array_equal(found, before[5:50].permute(1, 2, 3, 0, 4).numpy().view("<u2"))


def test_kv_in_float32_is_the_cpus() -> None:
    codecs = DeviceCodecs(PagedPool(CONFIG, 1, torch.float32, CPU))
    assert not any(codecs.knows(codec) for codec in CODECS)
