"""Several answers at once: each is what it would have been alone, whatever others do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from chatkv.engine.engine import Engine
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.scheduler import Cancelled, EngineClosed
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ContextFull
from chatkv.model import batch
from chatkv.model.decoder import Pass
from chatkv.model.linear import packs_on_cpu
from small_engine import CONFIG, Turn, answer, make_engine, some_ids

DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not packs_on_cpu(torch.bfloat16), reason="in bf16, rows of this CPU are not independent"
        ),
    ),
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine()
    yield made
    made.close()
    assert made.pool.free_blocks * BLOCK_TOKENS + made.memory.num_idle_tokens == 40 * BLOCK_TOKENS


def alone(length: int, count: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """The answer to `some_ids(length, length)` in an engine of its own."""
    engine = make_engine(dtype=dtype)
    try:
        return answer(engine, some_ids(length, length), count)
    finally:
        engine.close()


def check(made: Sequence[int], length: int, dtype: torch.dtype) -> None:
    """That this is the answer to `some_ids(length, length)` alone. In bfloat16, company may round
    otherwise: up to where two tokens were as likely but for that."""
    expected = alone(length, len(made), dtype)
    if dtype == torch.float32 or list(made) == expected:
        assert list(made) == expected
        return
    at = next(i for i, (a, b) in enumerate(zip(made, expected, strict=True)) if a != b)
    engine = make_engine(dtype=dtype)
    sequence = TokenSequence([*some_ids(length, length), *expected[:at]])
    with engine.memory.use(sequence):
        logits = engine.prefill(sequence)
    engine.close()
    assert logits.max() - logits[[made[at], expected[at]]].min() < 2**-5 * logits.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_beside_others_are_those_of_a_turn_alone(dtype: torch.dtype) -> None:
    engine = make_engine(dtype=dtype)
    lengths = [1, 2, 17, 63, 64, 65, 130, 200, 300]
    turns = [
        Turn(lambda n=n: answer(engine, some_ids(n, n), 20 + n % 7))  # type: ignore[misc]
        for n in lengths
    ]
    answers = [turn.result() for turn in turns]
    engine.close()
    for n, made in zip(lengths, answers, strict=True):
        assert len(made) == 20 + n % 7
        check(made, n, dtype)
    assert engine.pool.free_blocks == 40


def test_steps_are_shared(engine: Engine) -> None:
    """Else the test above would prove nothing."""
    turns = [Turn(lambda n=n: answer(engine, some_ids(n, n), 30)) for n in (5, 6, 7, 8)]  # type: ignore[misc]
    for turn in turns:
        turn.result()
    assert engine.scheduler.num_steps < 4 * 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_read_layer_by_layer_changes_no_token(dtype: torch.dtype) -> None:
    """Neither of its own answer nor of those beside it, which every slice gives another company."""
    engine = make_engine(dtype=dtype)
    engine.scheduler.budget.max_stall = 1.0001  # a layer of a chunk at a time
    is_over, cut = threading.Event(), []
    advance = engine.decoder.advance

    def watched(passes: Sequence[Pass], stops: Sequence[int]) -> None:
        advance(passes, stops)
        cut.extend(one for one in passes if one.layer < CONFIG.num_layers)

    engine.decoder.advance = watched  # type: ignore[method-assign]
    beside = [
        Turn(lambda n=n: answer(engine, some_ids(n, n), 400, cancelled=is_over.is_set))  # type: ignore[misc]
        for n in (5, 66)
    ]
    while not engine.scheduler._last_tokens:
        threading.Event().wait(0.001)
    lengths = [12, 32, 64, 129, 300]
    answers = [answer(engine, some_ids(n, n), 9) for n in lengths]
    is_over.set()
    for turn, n in zip(beside, (5, 66), strict=True):
        check(turn.result(), n, dtype)
    engine.close()
    assert len(cut) > 5, "else it would prove nothing"
    for n, made in zip(lengths, answers, strict=True):
        assert len(made) == 9
        check(made, n, dtype)


def test_few_tokens_attend_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that a step would cut does not, nor what is left of it."""
    attended: list[int] = []
    short_attention = batch.short_attention

    def noted(queries: torch.Tensor, *more: Any) -> torch.Tensor:
        attended.append(len(queries))
        return short_attention(queries, *more)

    monkeypatch.setattr(batch, "short_attention", noted)
    for length, calls in ((1, []), (2, [2]), (32, [32]), (33, [])):
        engine = make_engine(dtype=torch.float32)
        engine.scheduler.budget.max_stall = 1.0001  # beside an answer, a slice at a time
        beside, is_over = threading.Event(), threading.Event()
        running = Turn(
            lambda engine=engine, beside=beside, is_over=is_over: answer(  # type: ignore[misc]
                engine,
                [5],
                900,
                on_token=lambda token: beside.set(),
                cancelled=is_over.is_set,
            )
        )
        assert beside.wait(60)
        sequence = TokenSequence(some_ids(length, length))
        with engine.memory.use(sequence):
            engine.prefill(sequence)
        is_over.set()
        running.result()
        engine.close()
        assert attended == calls * CONFIG.num_layers
        attended.clear()


def test_a_cancelled_answer_ends_within_a_token_and_leaves_the_others(engine: Engine) -> None:
    made: list[int] = []
    other = Turn(lambda: answer(engine, some_ids(40, 40), 60))
    cancelled = Turn(
        lambda: answer(
            engine, some_ids(7, 7), 500, on_token=made.append, cancelled=lambda: len(made) >= 5
        )
    )
    assert cancelled.result() == alone(7, 5)
    assert other.result() == alone(40, 60)


def test_a_cancelled_prefill_keeps_its_chunks(engine: Engine) -> None:
    ids, done = some_ids(900, 1), []
    with pytest.raises(Cancelled):
        answer(
            engine,
            ids,
            5,
            name="long",
            cancelled=lambda: bool(done),
            on_progress=lambda now, total: done.append(now),
        )
    assert len(done) == 1
    assert engine.memory.sequence("long").num_cached == done[0] < 900


def test_a_turn_that_waits_for_room_can_be_cancelled() -> None:
    engine = make_engine(num_blocks=6)
    goes_on, is_cancelled = threading.Event(), threading.Event()

    def reader(token: int) -> None:
        goes_on.wait(60)

    holder = Turn(
        lambda: answer(
            engine, some_ids(300, 300), 3, on_token=lambda token: goes_on.wait(60) or None
        )
    )
    while engine.pool.free_blocks == 6:
        threading.Event().wait(0.005)
    waiting = Turn(lambda: answer(engine, some_ids(200, 2), 3, cancelled=is_cancelled.is_set))
    waiting.join(0.2)
    assert waiting.is_alive(), "there is no room for it"
    is_cancelled.set()
    with pytest.raises(Cancelled):
        waiting.result()
    goes_on.set()
    assert holder.result() == alone(300, 3)
    assert engine.pool.free_blocks == 6
    engine.close()


def test_turns_get_room_in_the_order_in_which_they_asked() -> None:
    engine = make_engine(num_blocks=6)
    goes_on, order = threading.Event(), []

    def reader(token: int) -> None:
        goes_on.wait(60)

    holder = Turn(
        lambda: answer(
            engine, some_ids(300, 300), 2, on_token=lambda token: goes_on.wait(60) or None
        )
    )
    while engine.pool.free_blocks == 6:
        threading.Event().wait(0.005)

    def take(name: str, length: int) -> None:
        answer(engine, some_ids(length, 1), 1, on_token=lambda token: order.append(name))

    big = Turn(lambda: take("big", 350))
    while engine.memory.room.num_waiting < 1:
        threading.Event().wait(0.005)
    small = Turn(lambda: take("small", 10))  # would fit, and is not to pass the big one for ever
    while engine.memory.room.num_waiting < 2:
        threading.Event().wait(0.005)
    goes_on.set()
    for turn in (holder, big, small):
        turn.result()
    assert order == ["big", "small"]
    engine.close()


def test_two_that_hold_what_the_other_needs_both_finish() -> None:
    """Each has KV of an earlier turn, and neither's new prompt fits beside the other's KV."""
    engine = make_engine(num_blocks=8, max_idle_tokens=8 * BLOCK_TOKENS)
    for name, seed in (("a", 1), ("b", 2)):
        answer(engine, some_ids(4 * BLOCK_TOKENS - 5, seed), 2, name=name)
    assert engine.pool.free_blocks == 0
    both_in_use = threading.Barrier(2)

    def turn(name: str, seed: int) -> list[int]:
        sequence = engine.memory.sequence(name)
        with engine.memory.use(sequence):
            both_in_use.wait(60)
            return answer(engine, some_ids(7 * BLOCK_TOKENS, seed), 4, name=name)

    turns = [Turn(lambda n=n, s=s: turn(n, s)) for n, s in (("a", 1), ("b", 2))]  # type: ignore[misc]
    assert [t.result() for t in turns] == [
        answer(make_engine(), some_ids(7 * BLOCK_TOKENS, seed), 4) for seed in (1, 2)
    ]
    engine.close()


@pytest.mark.parametrize("num_answers", [2, 3])
def test_answers_that_do_not_fit_together_step_aside_and_come_back(num_answers: int) -> None:
    engine = make_engine(num_blocks=5)
    preempted: list[int] = []
    turns = [
        Turn(
            lambda n=n: answer(  # type: ignore[misc]
                engine, some_ids(n, n), 150, on_preempted=lambda: preempted.append(n)
            )
        )
        for n in range(70, 70 + num_answers)
    ]
    answers = [turn.result() for turn in turns]
    assert answers == [alone(n, 150) for n in range(70, 70 + num_answers)]
    assert preempted, "they were meant to be in each other's way"
    assert engine.pool.free_blocks == 5
    engine.close()


def test_what_can_never_fit_is_said(engine: Engine) -> None:
    with pytest.raises(ContextFull, match="has 1025 tokens, and the model's context ends at 1024"):
        answer(engine, some_ids(1025, 1), 1)
    small = make_engine(num_blocks=2)
    with pytest.raises(ContextFull, match="ends at 128"):
        answer(small, some_ids(129, 1), 1)
    small.close()


def test_an_answer_ends_where_memory_does() -> None:
    small = make_engine(num_blocks=2)
    assert len(answer(small, some_ids(100, 1), 500)) == 28
    small.close()


def test_an_error_reaches_every_turn_of_its_step_and_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, poison = engine.decoder.begin, 95
    monkeypatch.setattr(
        engine.decoder,
        "begin",
        lambda ids, span: 1 / 0 if poison in ids.tolist() else begin(ids, span),
    )
    goes_on, running = threading.Event(), threading.Event()

    def reader(token: int) -> None:
        running.set()
        assert goes_on.wait(60)

    survivor = Turn(lambda: answer(engine, [1, 2, 3], 3, on_token=reader))
    assert running.wait(60)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            answer(engine, [4, poison, 6], 5)
    goes_on.set()
    monkeypatch.undo()
    assert survivor.result() == answer(engine, [1, 2, 3], 3)


def test_a_slow_reader_holds_up_nobody(engine: Engine) -> None:
    goes_on, is_reading = threading.Event(), threading.Event()

    def slow(token: int) -> None:
        is_reading.set()
        goes_on.wait(60)

    reader = Turn(lambda: answer(engine, some_ids(9, 9), 4, on_token=slow))
    assert is_reading.wait(60)
    assert answer(engine, some_ids(30, 30), 40) == alone(30, 40)
    assert not goes_on.is_set()
    goes_on.set()
    assert reader.result() == alone(9, 4)


def test_running_answers_get_tokens_while_a_long_prompt_is_read(engine: Engine) -> None:
    events: list[str] = []
    running = threading.Event()
    engine.scheduler.budget.max_stall = 1.01

    def token(_: int) -> None:
        events.append("token")
        running.set()

    short = Turn(lambda: answer(engine, some_ids(5, 5), 200, on_token=token))
    assert running.wait(60)
    answer(engine, some_ids(700, 700), 1, on_progress=lambda done, total: events.append("chunk"))
    short.result()
    chunks = [at for at, event in enumerate(events) if event == "chunk"]
    assert len(chunks) > 3, "one piece would have held the answer up"
    between = events[chunks[0] : chunks[-1]].count("token")
    assert between >= (len(chunks) - 1) // 2


def test_ctrl_c_leaves_nothing_that_writes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the main thread waits for its step: it goes on when that has ended."""
    forward, steps = engine._forward, []

    def interrupted(pieces: object) -> object:
        steps.append("begun")
        signal.raise_signal(signal.SIGINT)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        threading.Event().wait(0.1)
        result = forward(pieces)  # type: ignore[arg-type]
        steps.append("ended")
        return result

    monkeypatch.setattr(engine.scheduler, "forward", interrupted)
    sequence = TokenSequence(ids=[1, 2, 3])
    with pytest.raises(KeyboardInterrupt), engine.memory.use(sequence):
        try:
            engine.prefill(sequence)
        except KeyboardInterrupt:
            assert steps == ["begun", "ended"]
            raise
    monkeypatch.undo()
    assert answer(engine, [1, 2, 3], 3) == answer(engine, [1, 2, 3], 3)


def test_closing_ends_turns_that_wait() -> None:
    engine = make_engine()
    running = threading.Event()
    turn = Turn(lambda: answer(engine, some_ids(5, 5), 10**6, on_token=lambda token: running.set()))
    assert running.wait(60)
    engine.close()
    with pytest.raises(EngineClosed):
        turn.result()
    with pytest.raises(EngineClosed):
        answer(engine, [1], 1)
