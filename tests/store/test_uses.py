"""Uses: who needs KV without a conversation, as eviction, listings and deletion see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from chatkv_store import BlockStore, uses
from chatkv_store.blocks import START_MAP_BYTES
from chatkv_store.budget import Budget
from chatkv_store.conversations import Conversations
from chatkv_store.errors import SessionAmbiguous, SessionNotFound
from chatkv_store.eviction import rank
from chatkv_store.keys import chain_keys
from chatkv_store.logs import Logs
from chatkv_store.pruning import Wanted, choose
from chatkv_store.sharing import usage
from chatkv_store.uses import Uses
from kv_samples import SMALL, SPACE, chain, kv_of, save

HOUR = 3600.0
ABOUT = {"model": "tiny (vLLM)", "layout": SMALL.to_json(), "codec": "lossless"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockStore]:
    with BlockStore(tmp_path / "kv", start_map_bytes=1 << 24) as store:
        store.register(SPACE, ABOUT)
        yield store


@pytest.fixture
def conversations(tmp_path: Path) -> Iterator[Conversations]:
    with Conversations(tmp_path / "c.sqlite3", clock=lambda: 10 * HOUR) as found:
        yield found


def note(store: BlockStore, ids: list[int], *, at: float = 0.0, is_new: bool = True) -> uses.Use:
    found = Uses(store, clock=lambda: at)
    return found.note(SPACE, ids, SMALL, title=f"r{ids[0]}", model="tiny (vLLM)", is_new=is_new)


def ids_of(seed: int, blocks: int) -> list[int]:
    return [seed * 1000 + index for index in range(blocks * SMALL.block_tokens)]


def test_a_use_survives_the_process_and_knows_its_tokens(tmp_path: Path) -> None:
    with BlockStore(tmp_path / "kv") as store:
        key = note(store, ids_of(1, 3), at=5.0).key
    with BlockStore(tmp_path / "kv", read_only=True) as store:
        (found,) = Uses(store).every()
        assert (found.key, found.num_tokens, found.used_at) == (key, 48, 5.0)
        assert list(Uses(store).token_log(key)) == ids_of(1, 3)
        assert list(Uses(store).token_log(bytes(32))) == []


def test_a_log_that_goes_on_takes_the_place_of_its_beginning(store: BlockStore) -> None:
    note(store, ids_of(1, 2), at=1.0)
    Uses(store).pin(Uses(store).every()[0].key, True)
    note(store, ids_of(1, 3), at=2.0, is_new=False)
    longer = note(store, ids_of(1, 5), at=3.0)
    other = note(store, ids_of(2, 1), at=4.0)
    found = {use.key: use for use in Uses(store).every()}
    assert set(found) == {longer.key, other.key}
    assert (found[longer.key].created_at, found[longer.key].used_at) == (1.0, 3.0)
    assert (found[longer.key].num_requests, found[longer.key].pinned) == (2, True)


def test_only_so_many_are_kept_and_pinned_ones_longest(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses, "MAX_USES", 3)
    oldest = note(store, ids_of(1, 1), at=1.0)
    Uses(store).pin(oldest.key, True)
    for seed in range(2, 7):
        note(store, ids_of(seed, 1), at=float(seed))
    assert sorted(use.used_at for use in Uses(store).every()) == [1.0, 5.0, 6.0]


def test_blocks_of_a_use_count_as_used(store: BlockStore, conversations: Conversations) -> None:
    for seed in (1, 2):
        save(store, SMALL, ids_of(seed, 2), kv_of(SMALL, ids_of(seed, 2)))
    use = note(store, ids_of(1, 2), at=9 * HOUR)
    found = usage(store, conversations)
    assert found.used_keys == set(chain_keys(SPACE, ids_of(1, 2), SMALL.block_tokens))
    (share,) = found.sessions
    assert (share.session.id, share.num_stored_tokens, share.miss) == (use.id, 32, None)
    unused = [one.key for one in rank(store, conversations).candidates()][:2]
    assert set(unused) == set(chain_keys(SPACE, ids_of(2, 2), SMALL.block_tokens))
    gone = choose(store, conversations, Wanted(orphans=True), 10 * HOUR)
    assert {one.key for one in gone} == set(unused)
    old = choose(store, conversations, Wanted(older_than_s=HOUR / 2), 10 * HOUR)
    assert {one.key for one in old} == found.used_keys


def test_what_is_used_now_pushes_out_what_was_used_long_ago(
    tmp_path: Path, conversations: Conversations
) -> None:
    budget = Budget(max_bytes=1 << 20)
    with BlockStore(tmp_path / "small", budget=budget, conversations=conversations) as store:
        store.register(SPACE, ABOUT)
        old, new = ids_of(1, 120), ids_of(2, 120)
        for ids, used_at in ((old, 0.0), (new, 10 * HOUR)):
            note(store, ids, at=used_at)
            bits = kv_of(SMALL, ids)
            for block in chain(SMALL, ids, bits):
                store.put(SPACE, SMALL, [block])
        assert store.counters()["evicted_blocks"] > 0
        stored = {header.key for header in store.headers()}
        assert stored >= set(chain_keys(SPACE, new, SMALL.block_tokens))
        assert not stored >= set(chain_keys(SPACE, old, SMALL.block_tokens))


def test_a_use_is_named_as_a_conversation_is(
    store: BlockStore, conversations: Conversations
) -> None:
    use = note(store, ids_of(1, 2))
    session = conversations.create_session(title="mine")
    logs = Logs(store, conversations)
    assert logs.get_session(use.id[:6]).id == logs.get_session("r1000").id == use.id
    assert logs.get_session("mine").id == session.id
    assert set(logs.short_ids()) == {use.id, session.id}
    assert use.id.startswith(logs.short_ids()[use.id])
    with pytest.raises(SessionNotFound):
        logs.get_session("ffff")
    Uses(store).note(SPACE, ids_of(3, 1), SMALL, title="r1000", model="")
    with pytest.raises(SessionAmbiguous, match="names 2 requests"):
        logs.get_session("r1000")


def test_a_store_from_before_uses_can_be_read(tmp_path: Path, conversations: Conversations) -> None:
    with BlockStore(tmp_path / "kv") as store:
        save(store, SMALL, ids_of(1, 1), kv_of(SMALL, ids_of(1, 1)))
    with (
        lmdb.open(str(tmp_path / "kv"), max_dbs=8, map_size=START_MAP_BYTES) as env,
        env.begin(write=True) as txn,
    ):
        txn.drop(env.open_db(b"uses", txn=txn))
    with BlockStore(tmp_path / "kv", read_only=True) as store:
        assert Uses(store).every() == []
        assert Logs(store, conversations).list_sessions() == []
        assert store.match(SPACE, ids_of(1, 1), SMALL).num_tokens == 16
    with BlockStore(tmp_path / "kv") as store:
        note(store, ids_of(1, 1))
        assert len(Uses(store).every()) == 1
