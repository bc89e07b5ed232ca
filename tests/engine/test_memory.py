"""What stays in memory between turns: found again, given up in order, never taken from its user."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from chatkv.engine.memory import Memory
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ContextFull
from small_engine import CONFIG, Turn


def make_memory(num_blocks: int = 12, max_idle_blocks: int = 12) -> Memory:
    pool = BlockPool(CONFIG, num_blocks, torch.float32, torch.device("cpu"))
    return Memory(pool, max_idle_blocks * BLOCK_TOKENS)


def fill(memory: Memory, sequence: TokenSequence, ids: list[int], num_cached: int = 0) -> None:
    """KV of `ids` behind the first num_cached: each token's KV is its id."""
    sequence.become(ids, num_cached)
    memory.pool.reserve(sequence.run, len(ids))
    values = torch.tensor(ids[num_cached:], dtype=torch.float32)
    memory.pool.slots(sequence.run, num_cached, len(ids)).copy_(values[:, None])
    sequence.num_cached = len(ids)


def holds(memory: Memory, sequence: TokenSequence) -> bool:
    """Whether what it says is cached is there."""
    values = torch.tensor(sequence.ids[: sequence.num_cached], dtype=torch.float32)
    kv = memory.pool.slots(sequence.run, 0, sequence.num_cached)
    return bool((kv == values[:, None]).all())


def keep(memory: Memory, name: str, ids: list[int]) -> TokenSequence:
    """A turn of the session `name` that leaves KV of `ids`."""
    sequence = memory.sequence(name)
    with memory.use(sequence):
        fill(memory, sequence, ids)
    return sequence


def numbers(num_blocks: float, start: int = 0) -> list[int]:
    return list(range(start, start + int(num_blocks * BLOCK_TOKENS)))


def test_kv_is_found_under_its_name() -> None:
    memory = make_memory()
    first = keep(memory, "a", numbers(2))
    assert memory.sequence("a") is first
    assert first.num_cached == 2 * BLOCK_TOKENS and holds(memory, first)


def test_room_is_made_by_what_was_used_longest_ago() -> None:
    memory = make_memory()
    a, b, c = (keep(memory, name, numbers(2)) for name in "abc")
    d = keep(memory, "d", numbers(4))
    with memory.use(a):
        pass
    e = keep(memory, "e", numbers(2))
    assert [s.num_cached > 0 for s in (a, b, c, d, e)] == [True, False, True, True, True]
    assert memory.sequence("b") is not b, "nothing is left to be found"
    assert all(holds(memory, s) for s in (a, c, d, e))


def test_what_is_in_use_is_never_taken() -> None:
    memory = make_memory()
    a, b = keep(memory, "a", numbers(4)), keep(memory, "b", numbers(4))
    with memory.use(a), memory.use(b), pytest.raises(ContextFull):
        keep(memory, "c", numbers(5))
    assert holds(memory, a) and holds(memory, b) and a.num_cached and b.num_cached


def test_what_can_be_done_without_takes_nobody_elses_kv() -> None:
    memory = make_memory()
    idle, sequence = keep(memory, "idle", numbers(6)), TokenSequence()
    with memory.use(sequence):
        fill(memory, sequence, numbers(4))
        assert memory.take_free(sequence, 6 * BLOCK_TOKENS)
        assert memory.pool.is_reserved(sequence.run, 6 * BLOCK_TOKENS)
        assert not memory.take_free(sequence, 7 * BLOCK_TOKENS)
        assert idle.num_cached and holds(memory, idle) and holds(memory, sequence)
        sequence.ids += numbers(3)
        assert memory.make_room(sequence), "what has to be done may"
        assert not idle.num_cached


def test_idle_kv_keeps_to_its_share() -> None:
    memory = make_memory(max_idle_blocks=6)
    sequences = [keep(memory, name, numbers(2)) for name in "abcd"]
    assert memory.num_idle_tokens == 6 * BLOCK_TOKENS
    assert [s.num_cached > 0 for s in sequences] == [False, True, True, True]
    with memory.use(sequences[0]):
        fill(memory, sequences[0], numbers(8))
    assert memory.num_idle_tokens <= 6 * BLOCK_TOKENS


def test_what_has_no_name_leaves_nothing() -> None:
    memory = make_memory()
    sequence = TokenSequence()
    with memory.use(sequence):
        fill(memory, sequence, numbers(3))
    assert memory.pool.free_blocks == 12 and sequence.num_cached == 0


def test_names_do_not_pile_up() -> None:
    memory = make_memory(max_idle_blocks=4)
    for index in range(50):
        memory.sequence(f"only opened {index}")
        keep(memory, str(index), numbers(1))
    assert len(memory._named) == 4


def test_a_sequence_that_was_given_up_is_kept_again_after_its_next_turn() -> None:
    """A conversation that stays open holds on to its sequence, whatever memory does with it."""
    memory = make_memory()
    a = keep(memory, "a", numbers(4))
    keep(memory, "b", numbers(12))
    assert a.num_cached == 0
    with memory.use(a):
        fill(memory, a, numbers(2))
    assert memory.sequence("a") is a and holds(memory, a) and a.num_cached


def test_forgetting_gives_back_what_is_not_in_use() -> None:
    memory = make_memory()
    a = keep(memory, "a", numbers(4))
    with memory.use(a):
        memory.forget("a")
        assert holds(memory, a) and a.num_cached
    memory.forget("a")
    memory.forget("unknown")
    assert memory.pool.free_blocks == 12 and memory.sequence("a") is not a


def test_of_two_that_opened_one_session_the_last_one_stays() -> None:
    memory = make_memory()
    one, two = memory.sequence("a"), memory.sequence("a")
    for sequence in (one, two):
        with memory.use(sequence):
            fill(memory, sequence, numbers(2))
    assert memory.sequence("a") is two and memory.pool.free_blocks == 10


# --- equal beginnings ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_in_use", [False, True])
@pytest.mark.parametrize("own", [0, 10, BLOCK_TOKENS])
def test_an_equal_beginning_is_copied_to_the_token(own: int, is_in_use: bool) -> None:
    memory = make_memory()
    source = keep(memory, "source", numbers(3))
    ids = [*numbers(2.5), 7000, 7001]
    sequence = memory.sequence("new")
    with memory.use(source if is_in_use else TokenSequence()), memory.use(sequence):
        if own:
            fill(memory, sequence, [*ids[:own], 9000])
        assert memory.share(sequence, ids) == int(2.5 * BLOCK_TOKENS) - own
        assert sequence.num_cached == int(2.5 * BLOCK_TOKENS) and sequence.ids == ids
        assert holds(memory, sequence)
        # A copy: what one writes, the other does not see.
        memory.pool.slots(sequence.run, 0, sequence.num_cached).fill_(-1)
        assert holds(memory, source)


def test_the_last_token_is_left_to_be_computed() -> None:
    memory = make_memory()
    keep(memory, "source", numbers(3))
    sequence = TokenSequence()
    with memory.use(sequence):
        assert memory.share(sequence, numbers(2)) == 2 * BLOCK_TOKENS - 1


def test_less_than_a_block_is_not_copied_nor_what_has_gone_through_a_lossy_codec() -> None:
    memory = make_memory()
    keep(memory, "short", numbers(0.9))
    lossy = memory.sequence("lossy", is_shareable=False)
    with memory.use(lossy):
        fill(memory, lossy, numbers(3))
    sequence = TokenSequence()
    with memory.use(sequence):
        assert memory.share(sequence, numbers(3)) == 0
        assert sequence.num_cached == 0
    keep(memory, "exact", numbers(3))
    other = memory.sequence("lossy too", is_shareable=False)
    with memory.use(other):
        assert memory.share(other, numbers(3)) == 0


def test_sharing_takes_room_from_others_but_not_from_its_source() -> None:
    memory = make_memory()
    source, other = keep(memory, "source", numbers(4)), keep(memory, "other", numbers(6, 5000))
    sequence = TokenSequence()
    with memory.use(sequence):
        assert memory.share(sequence, [*numbers(4), 1]) == 4 * BLOCK_TOKENS
        assert holds(memory, sequence) and holds(memory, source)
        assert other.num_cached == 0


def test_a_source_that_is_written_over_meanwhile_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = make_memory()
    source = keep(memory, "source", numbers(3))
    slots = memory.pool.slots

    def while_copied(*arguments: Any) -> Any:
        source.become([1, 2, 3], 0)
        return slots(*arguments)

    monkeypatch.setattr(memory.pool, "slots", while_copied)
    sequence = TokenSequence()
    with memory.use(sequence), memory.use(source):
        assert memory.share(sequence, [*numbers(3), 1]) == 0
        assert sequence.num_cached == 0


def test_threads_that_use_grow_share_and_end_do_not_stand_in_each_others_way() -> None:
    memory = make_memory(num_blocks=24, max_idle_blocks=10)
    errors: list[str] = []

    def turns(seed: int) -> None:
        for index in range(60):
            sequence = memory.sequence(str((seed + index) % 5) if index % 3 else f"{seed} {index}")
            with one_turn[sequence.name or ""], memory.use(sequence):
                length = 1 + (index * 37 + seed * 11) % (4 * BLOCK_TOKENS)
                ids = [*range(length), seed + 10_000]
                memory.share(sequence, ids)
                common = min(sequence.common_prefix(ids), len(ids) - 1)
                try:
                    fill(memory, sequence, ids, common)
                except ContextFull:
                    continue
                if not holds(memory, sequence):
                    errors.append(f"{seed} {index}")

    one_turn: Any = _Locks()
    for turn in [Turn(lambda s=s: turns(s)) for s in range(5)]:  # type: ignore[misc]
        turn.result()
    assert not errors
    assert memory.pool.free_blocks * BLOCK_TOKENS + memory.num_idle_tokens == 24 * BLOCK_TOKENS


class _Locks:
    """A session has one turn at a time."""

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(name, threading.Lock())


# --- any order of events ------------------------------------------------------------------------


class MemoryMachine(RuleBasedStateMachine):
    """Conversations come, write, fork, end and are forgotten; nobody ever sees other KV."""

    turns = Bundle("turns")

    def __init__(self) -> None:
        super().__init__()
        self.memory = make_memory(max_idle_blocks=5)
        self.open: dict[str, tuple[Any, TokenSequence]] = {}

    @rule(target=turns, name=st.sampled_from("abcd"))
    def begin(self, name: str) -> str:
        if name not in self.open:
            sequence = self.memory.sequence(name)
            use = self.memory.use(sequence)
            use.__enter__()
            self.open[name] = (use, sequence)
        return name

    @rule(name=turns, kind=st.integers(0, 1), length=st.integers(1, 300), shares=st.booleans())
    def write(self, name: str, kind: int, length: int, shares: bool) -> None:
        if name not in self.open:
            return
        sequence = self.open[name][1]
        ids = [*range(length), 1000 * (kind + 1) + ord(name)]
        if shares:
            self.memory.share(sequence, ids)
            assert holds(self.memory, sequence)
        common = min(sequence.common_prefix(ids), len(ids) - 1)
        try:
            fill(self.memory, sequence, ids, common)
        except ContextFull:
            assert self.memory.num_idle_tokens == 0

    @rule(name=consumes(turns))
    def end(self, name: str) -> None:
        if name in self.open:
            self.open.pop(name)[0].__exit__(None, None, None)
            assert self.memory.num_idle_tokens <= 5 * BLOCK_TOKENS

    @rule(name=st.sampled_from("abcd"))
    def forget(self, name: str) -> None:
        self.memory.forget(name)

    @invariant()
    def all_kv_is_its_own(self) -> None:
        sequences = {*self.memory._named.values(), *(held for _, held in self.open.values())}
        assert all(holds(self.memory, sequence) for sequence in sequences)
        blocks = [b for s in sequences for b in range(s.run.first_block, s.run.end)]
        assert len(blocks) == len(set(blocks)) == 12 - self.memory.pool.free_blocks


MemoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMemoryMachine = MemoryMachine.TestCase
