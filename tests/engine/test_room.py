"""Who gives way where memory is short: background, the newest, and whose reader stalls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from chatkv.engine.memory import Memory
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.engine.room import STALLED_S
from chatkv.engine.sequence import TokenSequence
from small_engine import CONFIG, Turn, answer, make_engine, some_ids


@pytest.fixture
def memory() -> Memory:
    pool = BlockPool(CONFIG, 12, torch.float32, torch.device("cpu"))
    return Memory(pool, 6 * BLOCK_TOKENS)


@pytest.fixture
def turns() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def holding(memory: Memory, turns: ExitStack, num_blocks: int, is_background: bool = False):  # type: ignore[no-untyped-def]
    """A turn that begins now, and its blocks."""
    sequence = TokenSequence()
    turns.enter_context(memory.use(sequence, is_background))
    grow(sequence, num_blocks)
    assert memory.make_room(sequence)
    sequence.num_cached = len(sequence.ids)
    return sequence


def grow(sequence: TokenSequence, num_blocks: int) -> None:
    sequence.ids = [0] * (num_blocks * BLOCK_TOKENS)


def test_background_gives_way_first_and_then_who_began_last(
    memory: Memory, turns: ExitStack
) -> None:
    first, second = holding(memory, turns, 3), holding(memory, turns, 3)
    background = holding(memory, turns, 3, is_background=True)
    last = holding(memory, turns, 3)
    everybody = (first, second, background, last)

    def who_gives_way() -> list[TokenSequence]:
        return [one for one in everybody if memory.room.must_give_way(one)]

    assert who_gives_way() == []
    grow(second, 9)
    with memory.room.waiting(second):
        for next_one in (background, last):
            assert not memory.make_room(second)
            assert who_gives_way() == [next_one]
            memory.drop(next_one)
            assert who_gives_way() == [], "first it looks whether that is enough"
        assert memory.make_room(second)
    assert first.num_cached and second.num_cached


def test_nobody_gives_way_for_one_that_comes_behind(memory: Memory, turns: ExitStack) -> None:
    first, background = holding(memory, turns, 8), TokenSequence()
    newest = holding(memory, turns, 2)
    turns.enter_context(memory.use(background, is_background=True))
    for behind in (newest, background):
        grow(behind, 8)
        with memory.room.waiting(behind):
            assert not memory.make_room(behind)
            assert not memory.room.must_give_way(first)
    with memory.room.waiting(background), memory.room.waiting(newest):
        assert memory.room.is_next(newest), "background waits behind it"
        assert not memory.room.is_next(background)


def test_who_is_with_its_reader_gives_way_at_once(memory: Memory, turns: ExitStack) -> None:
    first, second = holding(memory, turns, 4), holding(memory, turns, 6)
    seen: list[int] = []
    grow(first, 9)
    with memory.room.away(second, lambda: seen.append(second.num_cached)):
        assert memory.make_room(first)
    assert seen == [6 * BLOCK_TOKENS], "it could still be saved then"
    assert second.num_cached == 0 and len(second.ids) == 6 * BLOCK_TOKENS


def test_a_reader_that_stalls_comes_last(memory: Memory, turns: ExitStack) -> None:
    now = [0.0]
    memory.room.clock = lambda: now[0]
    first, second = holding(memory, turns, 6), holding(memory, turns, 4)
    grow(second, 9)
    with memory.room.away(first, lambda: None):
        assert not memory.make_room(second), "a moment's reading costs nobody anything"
        now[0] = STALLED_S + 0.1
        assert memory.make_room(second)
    assert first.num_cached == 0


def test_background_work_evicts_no_conversation_while_it_can_wait(
    memory: Memory, turns: ExitStack
) -> None:
    live = memory.sequence("live")
    with memory.use(live):
        grow(live, 5)
        assert memory.make_room(live)
        live.num_cached = len(live.ids)
    answering = ExitStack()
    holding(memory, answering, 5)
    title = TokenSequence()
    turns.enter_context(memory.use(title, is_background=True))
    grow(title, 4)
    assert not memory.make_room(title) and live.num_cached
    answering.close()
    assert memory.make_room(title) and live.num_cached
    grow(title, 9)
    assert memory.make_room(title), "nobody else could give any"
    assert not live.num_cached


def test_an_answer_whose_reader_never_comes_back_is_in_nobodys_way() -> None:
    engine = make_engine(num_blocks=6)
    room, slow = engine.memory.room, engine.memory.sequence("slow")
    is_reading, goes_on = threading.Event(), threading.Event()

    def read(token: int) -> None:
        with room.away(slow, lambda: None):
            is_reading.set()
            assert goes_on.wait(60)

    engine.memory._named["slow"] = slow
    turn = Turn(lambda: answer(engine, some_ids(300, 1), 4, name="slow", on_token=read))
    assert is_reading.wait(60)
    clock = room.clock
    room.clock = lambda: clock() + 2 * STALLED_S
    others = answer(engine, some_ids(310, 2), 4)
    assert not goes_on.is_set()
    goes_on.set()
    alone = make_engine()
    assert others == answer(alone, some_ids(310, 2), 4)
    assert turn.result() == answer(alone, some_ids(300, 1), 4)
    engine.close()
    alone.close()
