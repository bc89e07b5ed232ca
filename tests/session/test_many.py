"""Many conversations on one runtime: each goes as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatkv import runtime as runtimes
from chatkv.client import ChatRequest, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.paths import folders
from chatkv.runtime import Runtime
from chatkv.session.turn import Listener, TurnOptions, TurnResult
from small_engine import Turn

STORY = "Tell me a long story about the sea, a ship, its captain and the captain's cat. "
TALKS: list[list[str]] = [
    ["Hello!", "And then?", "Why?"],
    [STORY * 6, "Go on."],
    ["What is a tide?", STORY * 3],
    [STORY, STORY * 5, "The end?"],
    ["x"],
]
GREEDY = TurnOptions(SamplingOptions(temperature=0), max_tokens=24)


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@contextmanager
def running(model: str, dtype: Any = "float32") -> Iterator[Runtime]:
    """A runtime with an empty session of its own that nobody uses."""
    with open_chat(folders(), ChatRequest(model, dtype, seed=1)) as chat:
        yield chat.runtime
        # Nothing is left behind: what is not free belongs to conversations that are not in use.
        memory, pool = chat.runtime.engine.memory, chat.runtime.engine.pool
        assert memory.num_in_use == 0
        used = (pool.num_blocks - pool.free_blocks) * BLOCK_TOKENS
        assert used == memory.num_idle_tokens <= memory.max_idle_tokens


def talk(
    runtime: Runtime,
    texts: Sequence[str],
    options: TurnOptions = GREEDY,
    listener: Listener | None = None,
    system: str | None = None,
) -> list[TurnResult]:
    """A new conversation, from its first word to its last."""
    with runtime.open(runtime.new_session(seed=1)) as conversation:
        results = []
        for text in texts:
            results.append(conversation.send(text, options, listener, system))
            system = None
        return results


def said(results: Sequence[TurnResult]) -> list[tuple[str, str, int]]:
    return [(one.text, one.finish_reason, one.tokens.generated) for one in results]


def alone(model: str, texts: Sequence[str], dtype: str = "float32") -> list[tuple[str, str, int]]:
    with running(model, dtype) as runtime:
        return said(talk(runtime, texts))


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    return [turn.result() for turn in [Turn(work) for work in works]]


def test_each_says_what_it_would_have_said_alone(model: str) -> None:
    with running(model) as runtime:
        results = at_once([lambda t=texts: said(talk(runtime, t)) for texts in TALKS])  # type: ignore[misc]
        assert runtime.engine.scheduler.num_steps < sum(one[2] for talk in results for one in talk)
    with running(model) as runtime:
        assert results == [said(talk(runtime, texts)) for texts in TALKS]


def test_with_too_little_memory_for_all_they_take_turns(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was preempted goes to the disk and comes back, and says the same."""
    options = TurnOptions(SamplingOptions(temperature=0), max_tokens=150)
    with running(model) as runtime:
        told = {str(n): said(talk(runtime, [f"{n}: {STORY}"], options)) for n in range(6)}
        per_token = runtime.layout.bytes_per_token
    # Those that a stop token does not end early: they need 4 of 5 blocks each.
    texts = [n for n, results in told.items() if results[0][1] == "length"][:3]
    assert len(texts) == 3
    stages: list[str] = []
    listener = Listener(on_progress=lambda stage, done, total: stages.append(stage))
    bytes_of_5_blocks = 5 * BLOCK_TOKENS * per_token / runtimes.POOL_SHARE_OF_MEMORY
    monkeypatch.setattr(runtimes, "available_bytes", lambda: bytes_of_5_blocks)
    with running(model) as runtime:
        assert runtime.engine.pool.num_blocks == 5
        results = at_once(
            [
                lambda n=n: said(talk(runtime, [f"{n}: {STORY}"], options, listener))  # type: ignore[misc]
                for n in texts
            ]
        )
    assert results == [told[n] for n in texts]
    assert "waiting for memory" in stages


def test_what_was_said_is_still_in_memory_after_closing(model: str) -> None:
    with running(model) as runtime:
        session = runtime.new_session(seed=1)
        with runtime.open(session) as conversation:
            first = conversation.send(STORY, GREEDY)
        again = runtime.conversations.get_session(session.id)
        with runtime.open(again) as conversation:
            second = conversation.send("Go on.", GREEDY)
    # All but the reply's last token, which was never fed.
    assert second.tokens.reused == first.tokens.prompt + first.tokens.generated - 1
    assert second.tokens.loaded == 0


def test_an_equal_beginning_is_computed_once(model: str) -> None:
    with running(model) as runtime:
        alone_first, system = said(talk(runtime, ["Hello!"], system=STORY * 4)), STORY * 4
        other = talk(runtime, ["Who are you?"], system=system)[0]
        assert other.tokens.reused > 2 * BLOCK_TOKENS
        assert other.tokens.prompt - other.tokens.reused < 60
    with running(model) as runtime:
        assert said(talk(runtime, ["Who are you?"], system=system)) == said([other])
        assert said(talk(runtime, ["Hello!"], system=system)) == alone_first


def test_a_cancel_ends_one_and_no_other(model: str) -> None:
    pieces: list[str] = []
    listener = Listener(on_text=pieces.append, cancelled=lambda: len(pieces) >= 3)
    long = TurnOptions(SamplingOptions(temperature=0), max_tokens=500)
    with running(model) as runtime:
        cancelled, other = at_once(
            [
                lambda: talk(runtime, [STORY], long, listener),
                lambda: said(talk(runtime, TALKS[0])),
            ]
        )
    assert cancelled[0].finish_reason == "interrupted"
    assert 3 <= cancelled[0].tokens.generated < 50
    assert cancelled[0].text == "".join(pieces)
    assert other == alone(model, TALKS[0])


def test_one_that_waits_for_room_can_be_cancelled(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model) as runtime:
        per_token = runtime.layout.bytes_per_token
    room = 5 * BLOCK_TOKENS * per_token / runtimes.POOL_SHARE_OF_MEMORY
    monkeypatch.setattr(runtimes, "available_bytes", lambda: room)
    goes_on, is_answering, is_cancelled = (threading.Event() for _ in range(3))

    def read_slowly(text: str) -> None:
        is_answering.set()
        goes_on.wait(60)

    with running(model) as runtime:
        holder = Turn(lambda: talk(runtime, [STORY * 4], GREEDY, Listener(on_text=read_slowly)))
        assert is_answering.wait(60)
        waiting = Turn(
            lambda: talk(runtime, [STORY * 2], GREEDY, Listener(cancelled=is_cancelled.is_set))
        )
        while not runtime.engine.memory.room.num_waiting:
            threading.Event().wait(0.005)
        is_cancelled.set()
        cancelled: Any = waiting.result()
        assert cancelled[0].finish_reason == "interrupted"
        assert not goes_on.is_set()
        goes_on.set()
        holder.result()


def test_an_answer_that_nobody_reads_keeps_no_memory(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to the disk, for others to be answered, and comes back when its reader does."""
    texts = [f"1: {STORY * 4}", f"2: {STORY * 2}"]
    with running(model) as runtime:
        told = [said(talk(runtime, [text])) for text in texts]
        per_token = runtime.layout.bytes_per_token
    room_bytes = 5 * BLOCK_TOKENS * per_token / runtimes.POOL_SHARE_OF_MEMORY
    monkeypatch.setattr(runtimes, "available_bytes", lambda: room_bytes)
    is_reading, goes_on = threading.Event(), threading.Event()

    def read(text: str) -> None:
        is_reading.set()
        assert goes_on.wait(60)

    with running(model) as runtime:
        room = runtime.engine.memory.room
        slow = Turn(lambda: said(talk(runtime, texts[:1], GREEDY, Listener(on_text=read))))
        assert is_reading.wait(60)
        clock = room.clock
        room.clock = lambda: clock() + 60
        other = said(talk(runtime, texts[1:]))
        assert not goes_on.is_set()
        goes_on.set()
        assert [slow.result(), other] == told


def test_a_cancel_ends_a_restore_that_loads(model: str) -> None:
    options = replace(GREEDY, restore="reload")
    with running(model) as runtime:
        session = runtime.new_session(seed=1)
        with runtime.open(session) as conversation:
            conversation.send(STORY * 4, GREEDY)
    with running(model) as runtime:
        again = runtime.conversations.get_session(session.id)
        with runtime.open(again) as conversation:
            cancelled = conversation.send("Go on.", options, Listener(cancelled=lambda: True))
            assert (cancelled.finish_reason, cancelled.tokens.loaded) == ("interrupted", 0)
            goes_on = conversation.send("Go on.", options)
            assert goes_on.tokens.loaded > BLOCK_TOKENS, "nothing was taken for damaged"


@pytest.mark.slow
def test_so_it_is_with_a_real_model(home: Path, smollm2_gguf: Path) -> None:
    model = str(smollm2_gguf)
    texts = [["Name three rivers.", "And seas?"], ["What is a tide?"], [STORY * 4], ["Why?"]]
    with running(model) as runtime:
        together = at_once([lambda t=each: said(talk(runtime, t)) for each in texts])  # type: ignore[misc]
    with running(model) as runtime:
        assert together == [said(talk(runtime, each)) for each in texts]
