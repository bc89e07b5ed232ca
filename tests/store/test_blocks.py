"""The block store: what is stored is found by its tokens, exact to the token and to the bit."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chatkv_store import (
    BlockMiss,
    BlockStore,
    NewBlock,
    StoreBusy,
    StoreError,
    StoreReadOnly,
    blocks,
    codec,
)
from kv_samples import (
    GROUPED,
    SMALL,
    SPACE,
    Bits,
    chain,
    data_file,
    kv_bits,
    kv_of,
    restore,
    save,
    values_of,
)

B = SMALL.block_tokens


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(tmp_path / "kv") as opened:
        yield opened


@pytest.mark.parametrize("num_tokens", [1, B - 1, B, B + 1, 2 * B, 3 * B - 1])
def test_what_is_stored_comes_back(store: BlockStore, num_tokens: int) -> None:
    ids = list(range(num_tokens))
    bits = kv_of(SMALL, ids)
    save(store, SMALL, ids, bits)
    match = store.match(SPACE, ids, SMALL)
    assert (match.num_tokens, match.miss) == (num_tokens, None)
    assert [b.start for b in match.blocks] == list(range(0, num_tokens, B))
    np.testing.assert_array_equal(restore(store, SMALL, ids), bits)


def test_where_a_writer_may_use_its_pages_a_value_is_copied_before_it_is_verified(
    store: BlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock file nobody knows of our readers: between the digest and the decoding, their
    pages may come to hold something else."""
    bits = kv_bits(GROUPED, 64)
    save(store, GROUPED, list(range(64)), bits)
    (block,) = store.match(SPACE, range(64), GROUPED).blocks
    assert store.env.snapshots_hold, "there is a lock file here"
    store.env.snapshots_hold = False
    coder = codec.by_id(block.header.codec)
    decode = type(coder).decode

    def overwritten_first(self: codec.Codec, payloads: codec.Payloads, out: Bits) -> None:
        with data_file(tmp_path / "kv").open("r+b") as file:
            pages = file.read()
            at = pages.index(payloads[0].tobytes())
            file.seek(at)
            file.write(bytes(payloads[0].size))
        decode(self, payloads, out)

    monkeypatch.setattr(type(coder), "decode", overwritten_first)
    out = np.zeros_like(bits[:2])
    store.read(block, 0, out)
    np.testing.assert_array_equal(out, bits[:2])


def test_a_key_that_other_tokens_have_too_is_a_miss(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such pair of token ids will be found; a wrong key may still come from a fault of ours."""
    mine, theirs = list(range(B)), list(range(500, 500 + B))
    save(store, SMALL, mine, kv_of(SMALL, mine))
    (stored,) = store.match(SPACE, mine, SMALL).blocks
    monkeypatch.setattr(blocks, "block_key", lambda parent, ids: stored.key)
    match = store.match(SPACE, theirs, SMALL)
    assert match.num_tokens == 0 and "other tokens" in str(match.miss)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_values_of_several_groups(store: BlockStore, codec: str) -> None:
    ids = list(range(100))
    bits = kv_bits(GROUPED, 100)
    result = store.put(SPACE, GROUPED, chain(GROUPED, ids, bits), codec)
    assert (GROUPED.num_values, result.written, result.skipped) == (2, 2, 0)
    assert result.num_bytes == sum(h.num_payload_bytes for h in store.headers())
    np.testing.assert_array_equal(restore(store, GROUPED, ids), bits)


@pytest.mark.parametrize("shared", [0, 1, B - 1, B, B + 1, B + 5, 2 * B, 2 * B + 3])
def test_a_fork_shares_the_exact_prefix(store: BlockStore, shared: int) -> None:
    first = list(range(2 * B + 4))
    second = [*first[:shared], *range(900, 900 + 2 * B)]
    save(store, SMALL, first, kv_of(SMALL, first))
    match = store.match(SPACE, second, SMALL)
    assert match.num_tokens == shared
    assert match.miss is not None and f"token {shared} of {len(second)}" in match.miss
    np.testing.assert_array_equal(restore(store, SMALL, second), kv_of(SMALL, second[:shared]))


def test_the_longest_of_many_children_is_used(store: BlockStore) -> None:
    trunk = list(range(B))
    for length, other in ((3, 50), (9, 60), (6, 70)):
        ids = [*trunk, *range(100, 100 + length), other]
        save(store, SMALL, ids, kv_of(SMALL, ids))
    save(store, SMALL, [*trunk, 7, 7, 7], kv_of(SMALL, [*trunk, 7, 7, 7]))
    wanted = [*trunk, *range(100, 108), 99]
    assert store.match(SPACE, wanted, SMALL).num_tokens == B + 8
    np.testing.assert_array_equal(restore(store, SMALL, wanted), kv_of(SMALL, wanted[: B + 8]))


def test_a_grown_tail_replaces_the_old_one(store: BlockStore) -> None:
    short, other, grown = [1, 2, 3], [1, 2, 9], [1, 2, 3, *range(10, 40)]
    for ids in (short, other, grown):
        save(store, SMALL, ids, kv_of(SMALL, ids))
    stored = sorted(h.num_tokens for h in store.headers())
    assert stored == sorted([len(other), B, B, len(grown) - 2 * B])
    np.testing.assert_array_equal(restore(store, SMALL, short), kv_of(SMALL, short))
    np.testing.assert_array_equal(restore(store, SMALL, other), kv_of(SMALL, other))
    assert store.verify() == []


def test_a_stored_block_is_never_overwritten(store: BlockStore) -> None:
    ids = list(range(B))
    original, recomputed = kv_bits(SMALL, B, 1), kv_bits(SMALL, B, 2)
    save(store, SMALL, ids, original)
    result = store.put(SPACE, SMALL, chain(SMALL, ids, recomputed))
    assert (result.written, result.skipped, result.num_bytes) == (0, 1, 0)
    np.testing.assert_array_equal(restore(store, SMALL, ids), original)


def test_values_may_be_made_on_demand(store: BlockStore) -> None:
    bits = kv_bits(SMALL, B)
    asked: list[int] = []

    def value(group: int) -> object:
        asked.append(group)
        return values_of(SMALL, bits)[group]

    block = NewBlock(SPACE, range(B), value)  # type: ignore[arg-type]
    store.put(SPACE, SMALL, [block])
    store.put(SPACE, SMALL, [block])
    assert asked == [0], "a stored block is not encoded again"
    np.testing.assert_array_equal(restore(store, SMALL, range(B)), bits)


def test_another_model_or_layout_finds_nothing(store: BlockStore) -> None:
    ids = list(range(B + 3))
    save(store, SMALL, ids, kv_of(SMALL, ids))
    assert store.match(b"other model".ljust(32), ids, SMALL).num_tokens == 0
    same_size = replace(SMALL, num_kv_heads=1, head_dim=16)
    match = store.match(SPACE, ids, same_size)
    assert match.num_tokens == 0
    assert match.miss is not None and "layout" in match.miss


def test_wrong_arrays_are_refused(store: BlockStore) -> None:
    bits = kv_bits(SMALL, B)
    with pytest.raises(ValueError, match="value 0"):
        store.put(SPACE, SMALL, [NewBlock(SPACE, range(B - 1), values_of(SMALL, bits))])
    with pytest.raises(ValueError, match="value 0"):
        store.put(SPACE, SMALL, [NewBlock(SPACE, range(B), [bits.astype("<u4")])])
    with pytest.raises(ValueError, match="tokens"):
        store.put(SPACE, SMALL, [NewBlock(SPACE, [], values_of(SMALL, bits[:, :, :, :0]))])
    save(store, SMALL, range(B), bits)
    (block,) = store.match(SPACE, range(B), SMALL).blocks
    with pytest.raises(ValueError, match="cannot read"):
        store.read(block, 0, np.zeros((3, 2, 2, B - 1, 8), "<u2"))
    assert store.verify() == []


def test_removed_blocks_leave_nothing(store: BlockStore) -> None:
    ids = list(range(3 * B + 2))
    save(store, SMALL, ids, kv_of(SMALL, ids))
    match = store.match(SPACE, ids, SMALL)
    middle = match.blocks[1]
    assert store.remove([middle.key, b"unknown".ljust(32)]) == middle.header.num_payload_bytes
    assert store.match(SPACE, ids, SMALL).num_tokens == B
    with pytest.raises(BlockMiss, match="missing"):
        store.read(middle, 0, np.zeros((3, 2, 2, B, 8), "<u2"))
    assert store.verify() == []
    save(store, SMALL, ids, kv_of(SMALL, ids))
    assert store.match(SPACE, ids, SMALL).num_tokens == len(ids), "the rest is found again"
    store.remove([header.key for header in store.headers()])
    stats = store.stats()
    assert (stats["blocks"], stats["values"], stats["children"]) == (0, 0, 0)


def test_a_closed_store_is_found_again(tmp_path: Path) -> None:
    ids = list(range(B + 5))
    with BlockStore(tmp_path / "kv") as store:
        store.register(SPACE, {"model": "SmølLM", "layout": SMALL.to_json()})
        save(store, SMALL, ids, kv_of(SMALL, ids))
        usage = store.usage()
    with BlockStore(tmp_path / "kv", read_only=True) as store:
        assert store.namespaces() == {SPACE: {"model": "SmølLM", "layout": SMALL.to_json()}}
        assert store.usage() == usage
        assert usage[SPACE]["tokens"] == len(ids)
        assert usage[SPACE]["raw_bytes"] == len(ids) * SMALL.bytes_per_token
        np.testing.assert_array_equal(restore(store, SMALL, ids), kv_of(SMALL, ids))
        with pytest.raises(StoreReadOnly, match="reading only"):
            store.register(SPACE, {"model": "other"})


def test_files_are_the_owners_alone(store: BlockStore, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat(tmp_path / "kv").st_mode) == 0o700
    for name in ("data.mdb", "lock.mdb"):
        assert stat.S_IMODE(os.stat(tmp_path / "kv" / name).st_mode) == 0o600


def test_one_store_per_process(store: BlockStore, tmp_path: Path) -> None:
    with pytest.raises(StoreBusy, match="already open"):
        BlockStore(tmp_path / "kv")
    with pytest.raises(StoreError, match="no KV cache"):
        BlockStore(tmp_path / "nowhere", read_only=True)


def test_space_of_removed_blocks_is_used_again(store: BlockStore, tmp_path: Path) -> None:
    """The file stops growing: no forgotten transaction pins the pages of removed blocks."""
    sizes = []
    for turn in range(12):
        ids = list(range(turn * 1000, turn * 1000 + 4 * B))
        save(store, SMALL, ids, kv_bits(SMALL, len(ids), turn))
        restore(store, SMALL, ids)
        store.remove([header.key for header in store.headers()])
        sizes.append(data_file(tmp_path / "kv").stat().st_size)
    assert sizes[-1] == sizes[4]
