"""What is stored behind a gap is found, and counted as its session's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chatkv_store import BlockStore, Conversations
from chatkv_store.sharing import usage
from kv_samples import SMALL, SPACE, kv_bits, kv_of, save
from sessions import talk

B = SMALL.block_tokens


def test_every_block_is_found_whatever_is_missing(tmp_path: Path) -> None:
    ids = list(range(5 * B + 3))
    bits = kv_of(SMALL, ids)
    with BlockStore(tmp_path / "kv") as store:
        save(store, SMALL, ids, bits)
        keys = [block.key for block in store.match(SPACE, ids, SMALL).blocks]
        for missing in ([], [0], [0, 1, 2], [2], [5], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]):
            store.remove([keys[index] for index in missing])
            located = store.locate(SPACE, ids, SMALL)
            assert [block is None for block in located] == [i in missing for i in range(6)]
            for index, block in enumerate(located):
                if block is None:
                    continue
                assert (block.key, block.start) == (keys[index], index * B)
                out = np.zeros_like(kv_bits(SMALL, block.num_tokens))
                store.read(block, 0, out)
                place = slice(block.start, block.start + block.num_tokens)
                np.testing.assert_array_equal(out, bits[:, :, :, place])
            save(store, SMALL, ids, bits)


def test_what_match_finds_is_what_locate_begins_with(tmp_path: Path) -> None:
    ids = list(range(4 * B))
    with BlockStore(tmp_path / "kv") as store:
        save(store, SMALL, ids, kv_of(SMALL, ids))
        for length in (0, 1, B - 1, B, B + 1, 3 * B + 5):
            match = store.match(SPACE, ids[:length], SMALL)
            assert store.locate(SPACE, ids[:length], SMALL) == match.blocks
        other = [*ids[: 2 * B + 3], *range(900, 900 + 2 * B)]
        located = store.locate(SPACE, other, SMALL)
        assert [block and block.num_tokens for block in located] == [B, B, 3, None, None]


def test_blocks_behind_a_gap_are_their_sessions_and_no_orphans(tmp_path: Path) -> None:
    with (
        Conversations(tmp_path / "c.sqlite3") as conversations,
        BlockStore(tmp_path / "kv") as store,
    ):
        session = talk(conversations, store, range(5 * B))
        keys = [block.key for block in store.match(SPACE, range(5 * B), SMALL).blocks]
        store.remove(keys[:2])
        found = usage(store, conversations)
        assert found.used_keys == set(keys[2:])
        (share,) = found.sessions
        assert (share.num_stored_tokens, share.num_blocks) == (3 * B, 3)
        assert share.miss == f"from token 0 of {5 * B}: not stored until {2 * B}"
        assert share.session.id == session.id


def test_a_fork_costs_no_bytes_and_counts_are_right_without_a_write(tmp_path: Path) -> None:
    data = tmp_path / "kv" / "data.mdb"
    with (
        Conversations(tmp_path / "c.sqlite3") as conversations,
        BlockStore(tmp_path / "kv") as store,
    ):
        main = talk(conversations, store, range(5 * B))
        before = data.read_bytes()
        fork = conversations.fork(main.id)
        found = usage(store, conversations)
        assert data.read_bytes() == before
        total = sum(header.num_payload_bytes for header in store.headers())
        for share in found.sessions:
            assert (share.unique_bytes, share.shared_bytes) == (0, total)
        conversations.delete_session(main.id)
        (share,) = usage(store, conversations).sessions
        assert (share.session.id, share.unique_bytes, share.shared_bytes) == (fork.id, total, 0)
        assert data.read_bytes() == before
