"""The cap and the floor, and what goes first when there is no room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from chatkv_store import BlockStore, BlockWriter, Conversations, StoreError, StoreFull, header, room
from chatkv_store.budget import Budget, default_budget, parse_size
from chatkv_store.eviction import Ranker, Ranking, odds, prefill_s, rank
from chatkv_store.room import LOCK_BYTES
from chatkv_store.sharing import stored_blocks
from kv_samples import SMALL, SPACE, chain, kv_bits
from program import environment
from sessions import talk

B = SMALL.block_tokens
CAP = LOCK_BYTES + (1 << 20)
HOUR_S = 3600.0


class Clock:
    now_s = 1.7e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is to be had: every commit waits for the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def conversations(tmp_path: Path, clock: Clock) -> Iterator[Conversations]:
    with Conversations(tmp_path / "c.sqlite3", clock=clock) as store:
        yield store


@pytest.fixture
def store(tmp_path: Path, conversations: Conversations) -> Iterator[BlockStore]:
    with BlockStore(
        tmp_path / "kv",
        budget=Budget(CAP),
        conversations=conversations,
        start_map_bytes=1 << 16,
        clock=lambda: 0.0,  # no search for room takes long: how busy the machine is decides nothing
    ) as store:
        yield store


def taken(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "kv").iterdir())


def starts(store: BlockStore, conversations: Conversations, session_id: str) -> list[int]:
    session = conversations.get_session(session_id)
    return [block.start // B for block in stored_blocks(store, conversations, session)]


def test_sizes_are_read_as_they_are_written() -> None:
    assert [parse_size(text) for text in ("0", "4096", "20GiB", "1.5 kB", "2m", "3TB")] == [
        *(0, 4096, 20 << 30, 1500, 2_000_000, 3 * 10**12)
    ]
    for text in ("", "lots", "-1", "5 QiB", "1e9"):
        with pytest.raises(ValueError, match="is no size"):
            parse_size(text)


def test_the_default_budget_is_a_share_of_the_disk_unless_it_is_said(tmp_path: Path) -> None:
    budget = default_budget(tmp_path / "not" / "there", {})
    assert budget.max_bytes is not None and 0 < budget.max_bytes <= 20 << 30
    assert 0 < budget.min_free_bytes <= 1 << 30
    said = {"CHATKV_KV_MAX_BYTES": "3GiB", "CHATKV_KV_MIN_FREE_BYTES": "7"}
    assert default_budget(tmp_path, said) == Budget(3 << 30, 7)
    with pytest.raises(StoreError, match="CHATKV_KV_MAX_BYTES"):
        default_budget(tmp_path, {"CHATKV_KV_MAX_BYTES": "much"})


def test_worth_grows_with_the_position_and_falls_with_age() -> None:
    assert prefill_s(0, 64) < prefill_s(64, 64) < prefill_s(8000, 64)
    assert prefill_s(0, 64) + prefill_s(64, 64) == pytest.approx(prefill_s(0, 128))
    assert 1 == odds(-5) == odds(0) > odds(HOUR_S) > odds(30 * 24 * HOUR_S) > 0


def test_the_front_of_a_session_goes_before_its_end_and_the_old_before_the_new(
    store: BlockStore, conversations: Conversations, clock: Clock
) -> None:
    old = talk(conversations, store, range(6 * B))
    clock.now_s += 20 * HOUR_S
    new = talk(conversations, store, range(1000, 1000 + 6 * B))
    candidates = [one.key for one in rank(store, conversations, clock.now_s).candidates()]
    by_session = [
        [block.key for block in stored_blocks(store, conversations, session)]
        for session in (old, new)
    ]
    assert candidates == by_session[0] + by_session[1]


def test_what_nobody_finds_goes_first(
    store: BlockStore, conversations: Conversations, clock: Clock
) -> None:
    gone = talk(conversations, store, range(3 * B))
    talk(conversations, store, range(1000, 1000 + 3 * B))
    orphans = {block.key for block in stored_blocks(store, conversations, gone)}
    conversations.delete_session(gone.id)
    first = list(rank(store, conversations, clock.now_s).candidates())[:3]
    assert {one.key for one in first} == orphans


def test_what_several_sessions_share_is_worth_more(
    store: BlockStore, conversations: Conversations, clock: Clock
) -> None:
    """The system prompt that everybody has outlives the front that only one has."""
    common = list(range(2 * B))
    for number in range(3):
        talk(conversations, store, [*common, *[1000 + number] * 2 * B])
    talk(conversations, store, [5] * 4 * B)
    candidates = [one.key for one in rank(store, conversations, clock.now_s).candidates()]
    shared = {block.key for block in store.match(SPACE, common, SMALL).blocks}
    assert len(shared) == 2 and set(candidates[-2:]) == shared


def order(ranking: Ranking) -> list[tuple[bytes, float, float | None]]:
    return [(one.key, one.worth, one.last_use) for one in ranking.candidates()]


def test_the_models_own_rates_decide_between_an_old_end_and_a_new_front(
    tmp_path: Path, conversations: Conversations, clock: Clock
) -> None:
    """Where attention costs next to nothing, all blocks save the same and the old ones go. Where it
    is all that costs, the end of a long session is worth more than the front of a newer one."""
    old = talk(conversations, None, [1] * 20 * B)
    clock.now_s += HOUR_S
    new = talk(conversations, None, [2] * 20 * B)
    went = {}
    for name, rates in {"linear": (1e-3, 0.0), "pairs": (0.0, 1e-3), "unknown": None}.items():
        with BlockStore(
            tmp_path / name,
            budget=Budget(LOCK_BYTES + (300 << 10)),
            conversations=conversations,
            prefill_rates=lambda space, rates=rates: rates if space == SPACE else None,
            clock=lambda: 0.0,
        ) as store:
            talk(conversations, store, [], session=old)
            clock.now_s += HOUR_S
            talk(conversations, store, [], session=new)
            went[name] = [len(starts(store, conversations, one.id)) for one in (old, new)]
            assert store.counters()["evicted_blocks"] > 0
        clock.now_s -= HOUR_S
    assert went["linear"][1] == 20 > went["linear"][0]
    assert went["pairs"][0] > went["linear"][0] and went["pairs"][1] < 20
    assert went["unknown"] == went["linear"]


def test_kv_of_a_model_that_computes_slowly_is_worth_more(
    tmp_path: Path, conversations: Conversations
) -> None:
    fast, slow = SPACE, bytes(reversed(SPACE))
    rates = {fast: (1e-4, 0.0), slow: (1e-2, 0.0)}
    with BlockStore(tmp_path / "kv", prefill_rates=rates.get) as store:
        for space in (slow, fast):
            talk(conversations, store, [3] * 4 * B, space=space)
        first = [one.namespace for one in rank(store, conversations).candidates()]
    assert first == [fast] * 4 + [slow] * 4


def test_a_ranking_that_remembers_is_the_one_that_reads_everything(
    store: BlockStore, conversations: Conversations, clock: Clock
) -> None:
    """Turns, forks in the middle of a block, pins, deletions, and blocks that come and go."""
    random = Random(5)
    ranker = Ranker(store, conversations)
    for step in range(60):
        clock.now_s += random.random() * HOUR_S
        sessions = conversations.list_sessions()
        one = random.choice(sessions) if sessions else None
        ids = [random.randrange(3) for _ in range(random.randrange(3 * B))]
        action = random.randrange(7)
        if one is None or action == 0:
            talk(conversations, store, [7] * (B // 2) + ids)
        elif action <= 2:
            talk(conversations, store if random.random() < 0.8 else None, ids, session=one)
        elif action == 3:
            talk(conversations, store, ids, session=conversations.fork(one.id))
        elif action == 4:
            conversations.update_session(one.id, pinned=not one.pinned)
        elif action == 5 and len(sessions) > 3:
            conversations.delete_session(one.id)
        else:
            keys = [header.key for header in store.headers()]
            store.remove(random.sample(keys, min(3, len(keys))))
        found = order(ranker.rank())
        assert found == order(rank(store, conversations)), f"step {step}"
        last_use = {key: used for key, _, used in found}
        for session in conversations.list_sessions():
            for block in stored_blocks(store, conversations, session):
                assert session.pinned or block.key not in last_use or last_use[block.key]
                assert not session.pinned or block.key not in last_use


def test_a_ranking_looks_only_at_logs_and_headers_that_are_new(
    store: BlockStore, conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        last = talk(conversations, store, [number] * 5 * B)
    ranker = Ranker(store, conversations)
    ranker.rank()
    read: list[str] = []
    token_log, unpack = conversations.token_log, header.unpack
    monkeypatch.setattr(
        conversations, "token_log", lambda id: (read.append("log"), token_log(id))[1]
    )
    monkeypatch.setattr(header, "unpack", lambda packed: (read.append("header"), unpack(packed))[1])
    ranker.rank()
    assert read == []
    talk(conversations, store, [9] * 2 * B, session=last)
    read.clear()
    ranker.rank()
    assert sorted(read) == ["header", "header", "log"]


def test_a_slow_search_in_vain_is_not_soon_repeated(
    tmp_path: Path, conversations: Conversations, clock: Clock
) -> None:
    now_s = 0.0

    def slow() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    with BlockStore(
        tmp_path / "kv", budget=Budget(CAP), conversations=conversations, clock=slow
    ) as store:
        pinned = talk(conversations, store, [1] * 200 * B)
        conversations.update_session(pinned.id, pinned=True)
        clock.now_s += 20 * HOUR_S
        refused = talk(conversations, store, [2] * 60 * B)
        assert starts(store, conversations, refused.id) == []
        conversations.update_session(pinned.id, pinned=False)
        talk(conversations, store, [], session=refused)
        assert starts(store, conversations, refused.id) == [], "it has just been looked for in vain"
        now_s += 1000.0
        talk(conversations, store, [], session=refused)
        assert starts(store, conversations, refused.id) == list(range(60))


def test_a_full_store_makes_room_and_stays_within_its_cap(
    store: BlockStore, conversations: Conversations, clock: Clock, tmp_path: Path
) -> None:
    sessions = []
    for number in range(12):
        clock.now_s += HOUR_S
        sessions.append(talk(conversations, store, [number + 1] * 30 * B).id)
        assert taken(tmp_path) <= CAP
        assert store.verify() == []
    assert starts(store, conversations, sessions[-1]) == list(range(30)), "the newest is whole"
    assert starts(store, conversations, sessions[0]) == [], "the oldest is gone"
    kept = [starts(store, conversations, session) for session in sessions]
    for places in kept:  # whatever is left of a session is its end
        assert places == list(range(30))[30 - len(places) :]
    assert [len(places) for places in kept] == sorted(len(places) for places in kept)
    counters = store.counters()
    assert counters["evicted_blocks"] == counters["written_blocks"] - store.stats()["blocks"]
    assert counters["refused_blocks"] == 0


def test_large_values_and_scattered_free_pages(
    conversations: Conversations, clock: Clock, tmp_path: Path
) -> None:
    """Values need neighbouring pages, which sizes that differ leave ever fewer of."""
    budget = Budget(LOCK_BYTES + (6 << 20))
    big = type(SMALL)(8, 4, 64, "bfloat16", block_tokens=16)
    with BlockStore(
        tmp_path / "kv", budget=budget, conversations=conversations, start_map_bytes=1 << 16
    ) as store:
        store.register(SPACE, {"model": "Tiny", "layout": big.to_json()})
        for number in range(40):
            clock.now_s += HOUR_S
            ids = [number + 1] * (16 * (1 + number % 5) + number % 15 + 1)
            session = conversations.create_session(namespace=SPACE.hex())
            with conversations.lease(session.id):
                turn = conversations.begin_turn(session.id, user_text="u", prompt_ids=ids)
                conversations.finish_turn(turn.id, reply_text="r", reply_ids=[], rng_draws_after=0)
            store.put(SPACE, big, chain(big, ids, kv_bits(big, len(ids), number)), "raw")
            assert store.match(SPACE, ids, big).num_tokens == len(ids)
            assert taken(tmp_path) <= budget.max_bytes
        assert store.verify() == [] and store.counters()["evicted_blocks"] > 20


def test_pinned_sessions_stay_even_where_nothing_new_can_be_kept(
    store: BlockStore, conversations: Conversations, clock: Clock, tmp_path: Path
) -> None:
    pinned = talk(conversations, store, [1] * 60 * B)
    conversations.update_session(pinned.id, pinned=True)
    clock.now_s += 10_000 * HOUR_S
    for number in range(6):
        clock.now_s += HOUR_S
        talk(conversations, store, [2 + number] * 30 * B)
    assert starts(store, conversations, pinned.id) == list(range(60))
    for session in conversations.list_sessions():
        conversations.update_session(session.id, pinned=True)
    before = {header.key for header in store.headers()}
    ids = [99] * 200 * B
    with pytest.raises(StoreFull, match="nothing in it is worth less"):
        store.put(SPACE, SMALL, chain(SMALL, ids, kv_bits(SMALL, len(ids))), "raw")
    assert before <= {header.key for header in store.headers()}
    assert store.counters()["refused_blocks"] > 0
    assert taken(tmp_path) <= CAP and store.verify() == []


def test_a_block_without_room_is_dropped_and_counted_by_the_writer(
    store: BlockStore, conversations: Conversations
) -> None:
    session = talk(conversations, store, [1] * 200 * B)
    conversations.update_session(session.id, pinned=True)
    ids = [2] * 60 * B
    with BlockWriter(store) as writer:
        assert writer.submit(SPACE, SMALL, chain(SMALL, ids, kv_bits(SMALL, len(ids))), "raw")
        assert writer.flush(30)
        stats = writer.stats()
    assert stats.dropped == 60 and stats.error is None, "a full budget is nothing to complain of"
    assert store.counters()["refused_blocks"] >= 60


def test_a_session_longer_than_the_cap_keeps_later_blocks_and_does_not_thrash(
    conversations: Conversations, tmp_path: Path
) -> None:
    """Its front, computed again each time, must not push out what is worth more."""
    session = talk(conversations, None, [1] * 300 * B)
    blocks = chain(SMALL, [1] * 300 * B, kv_bits(SMALL, 300 * B))
    evicted = []
    budget = Budget(LOCK_BYTES + (1 << 19))
    # By a clock that stands still no ranking is slow, and none is left out to rest.
    with BlockStore(
        tmp_path / "kv", budget=budget, conversations=conversations, clock=lambda: 0.0
    ) as store:
        store.register(SPACE, {"model": "Tiny", "layout": SMALL.to_json()})
        for _ in range(2):
            for block in blocks:
                with suppress(StoreFull):
                    store.put(SPACE, SMALL, [block], "raw")
            evicted.append(store.counters()["evicted_blocks"])
        assert max(starts(store, conversations, session.id)) > 200
    assert 0 < evicted[0] <= evicted[1] < 1.5 * evicted[0]
    assert taken(tmp_path) <= budget.max_bytes


def test_without_conversations_nothing_is_evicted(tmp_path: Path) -> None:
    with BlockStore(tmp_path / "kv", budget=Budget(CAP)) as store:
        ids = [1] * 400 * B
        with pytest.raises(StoreFull):
            store.put(SPACE, SMALL, chain(SMALL, ids, kv_bits(SMALL, len(ids))), "raw")
        assert store.counters()["evicted_blocks"] == 0 and store.stats()["blocks"] > 50


def test_the_floor_of_free_space_is_kept(
    conversations: Conversations, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk with one MiB to spare above the floor, the file stops growing, and eviction
    makes the room from then on."""
    floor, disk = 10 << 20, 11 << 20
    data = tmp_path / "kv" / "data.mdb"
    monkeypatch.setattr(room, "disk_free_bytes", lambda path: disk - data.stat().st_size)
    with BlockStore(
        tmp_path / "kv",
        budget=Budget(1 << 40, floor),
        conversations=conversations,
        start_map_bytes=1 << 30,
    ) as store:
        for number in range(12):
            clock.now_s += HOUR_S
            last = talk(conversations, store, [number + 1] * 30 * B)
            assert disk - data.stat().st_size >= floor
        assert starts(store, conversations, last.id) == list(range(30))
        assert store.counters()["evicted_blocks"] > 0
        # Others fill the disk: nothing grows any more, nothing raises but StoreFull.
        disk = floor - 1
        before = data.stat().st_size
        clock.now_s += HOUR_S
        talk(conversations, store, [77] * 30 * B)
        assert data.stat().st_size == before and store.verify() == []


def test_a_lower_cap_is_filled_no_further_and_the_least_worthy_go(
    store: BlockStore, conversations: Conversations, clock: Clock, tmp_path: Path
) -> None:
    for number in range(4):
        talk(conversations, store, [number + 1] * 30 * B)
    store.close()
    size = (tmp_path / "kv" / "data.mdb").stat().st_size
    lower = Budget(LOCK_BYTES + size // 2)
    with BlockStore(tmp_path / "kv", budget=lower, conversations=conversations) as store:
        clock.now_s += HOUR_S
        talk(conversations, store, [50] * 10 * B)
        info = store.env.info()
        assert info["file_bytes"] == size, "it never shrinks by itself, and must not grow"
        assert info["used_bytes"] <= size // 2 and store.verify() == []


WRITER = f"""
import sys, itertools, time
began = time.time()
from chatkv_store import BlockStore, Conversations
from chatkv_store.budget import Budget
from sessions import talk
folder = sys.argv[1]
with Conversations(__import__("pathlib").Path(folder) / "c.sqlite3",
                   clock=lambda: began + 3600 * number) as conversations:
    number = int(sys.argv[2])
    with BlockStore(folder + "/kv", budget=Budget({CAP}), conversations=conversations) as store:
        for number in itertools.count(number):
            talk(conversations, store, [number] * {20 * B})
            print(store.counters()["evicted_blocks"], flush=True)
"""


def run_writer(tmp_path: Path, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(first)],
        env=environment(PYTHONPATH=":".join(sys.path)),
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_kill_9_while_evicting_leaves_a_sound_store_within_its_cap(
    tmp_path: Path, kills: int
) -> None:
    for attempt in range(kills):
        process = run_writer(tmp_path, 1 + 1000 * attempt)
        assert process.stdout is not None
        # Once full, every turn evicts: the next eviction is under way at the kill.
        for line in process.stdout:
            if int(line) > 0:
                break
        for _ in range(attempt % 3):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert taken(tmp_path) <= CAP
        with (
            Conversations(tmp_path / "c.sqlite3") as conversations,
            BlockStore(tmp_path / "kv", budget=Budget(CAP), conversations=conversations) as store,
        ):
            assert store.verify() == []
            talk(conversations, store, [7] * 5 * B)
            assert store.match(SPACE, [7] * 5 * B, SMALL).num_tokens == 5 * B


def test_two_processes_share_one_cap(tmp_path: Path) -> None:
    writers = [run_writer(tmp_path, first) for first in (1, 1000)]
    for writer in writers:
        assert writer.stdout is not None
        for _ in range(15):
            assert writer.stdout.readline()
            assert taken(tmp_path) <= CAP
    for writer in writers:
        writer.kill()
        writer.communicate()
    with BlockStore(tmp_path / "kv", budget=Budget(CAP)) as store:
        assert store.verify() == [] and store.counters()["evicted_blocks"] > 0
