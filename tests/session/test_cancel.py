"""A cancel ends a turn where it is, and keeps what was said and made until then."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from chatkv.client import ChatRequest, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.engine.piece import Piece
from chatkv.paths import folders
from chatkv.restore import pool_loads
from chatkv.session.turn import Listener, TurnOptions
from engines import eventually
from small_engine import Turn

STORY = "Tell me a long story about the sea, a ship, its captain and the captain's cat. "
GREEDY = SamplingOptions(temperature=0)


@pytest.fixture
def home_model(home: Path, slow_model: str) -> str:
    return slow_model


@pytest.mark.slow
def test_it_ends_a_prompt_between_its_layers_beside_an_answer(
    home_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, is_cancelled, is_answering = (threading.Event() for _ in range(3))
    heard: list[str] = []
    slices: list[tuple[int, int]] = []  # of the prompt: tokens, and layers that it is through

    def hear(text: str) -> None:
        heard.append(text)
        is_answering.set()

    with open_chat(folders(), ChatRequest(home_model, "float32", seed=1)) as chat:
        runtime, scheduler = chat.runtime, chat.runtime.engine.scheduler
        scheduler.budget.max_stall = 1.0001  # a layer of a slice at a time
        forward = scheduler.forward

        def watched(pieces: Sequence[Piece]) -> Sequence[Tensor | None]:
            computed = forward(pieces)
            for piece in pieces:
                if not piece.is_decode:
                    slices.append((piece.length, piece.layer))
                    is_cancelled.set()
                    eventually(lambda: piece.is_withdrawn)  # noqa: B023
            return computed

        def answer_beside() -> Any:
            with runtime.open(runtime.new_session(seed=2)) as other:
                options = TurnOptions(GREEDY, max_tokens=100_000)
                return other.send("Go.", options, Listener(hear, cancelled=is_over.is_set))

        beside = Turn(answer_beside)
        assert is_answering.wait(60)
        monkeypatch.setattr(scheduler, "forward", watched)
        talk = chat.conversation
        listener = Listener(cancelled=is_cancelled.is_set)
        cancelled = talk.send(STORY * 10, TurnOptions(GREEDY), listener)
        monkeypatch.undo()
        num_heard = len(heard)
        ((_, layer),) = slices
        assert 0 < layer < runtime.engine.runner.num_layers, "all layers at once prove nothing"
        assert (cancelled.finish_reason, cancelled.text) == ("interrupted", "")
        assert (talk.turns[-1].user_text, list(talk.turns[-1].reply_ids)) == (STORY * 10, [])
        eventually(lambda: len(heard) > num_heard)
        assert talk.resume_reply(TurnOptions(GREEDY, max_tokens=4)).tokens.generated == 4
        is_over.set()
        beside.result()


def test_it_ends_both_ends_and_keeps_the_answer_so_far(
    home_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was stopped, taken up again after a restart, and stopped while its history
    comes back: it is as it was, and goes on as if nothing had happened."""
    heard: list[str] = []
    half = Listener(on_text=heard.append, cancelled=lambda: len(heard) >= 5)
    request: dict[str, Any] = {"dtype": "float32", "seed": 1}
    options = TurnOptions(GREEDY, max_tokens=12)
    with open_chat(folders(), ChatRequest(home_model, **request)) as chat:
        session = chat.conversation.session.id
        chat.conversation.send(STORY * 20, options, half)
        told = chat.conversation.turns[-1]
        chat.conversation.resume_reply(TurnOptions(GREEDY, max_tokens=16))
        whole = chat.conversation.turns[-1]
        chat.conversation.switch(told.id)
    assert 0 < len(told.reply_ids) < 12

    num_loads, is_cancelled = 0, threading.Event()
    load = pool_loads.load_blocks

    def watched(*arguments: Any, **named: Any) -> Any:
        nonlocal num_loads
        loaded = load(*arguments, **named)
        num_loads += 1
        is_cancelled.set()
        return loaded

    both = TurnOptions(GREEDY, max_tokens=12, restore="both")
    with open_chat(folders(), ChatRequest(home_model, resume=session, **request)) as chat:
        monkeypatch.setattr(pool_loads, "load_blocks", watched)
        stopped = chat.conversation.resume_reply(both, Listener(cancelled=is_cancelled.is_set))
        monkeypatch.undo()
        assert num_loads in (1, 2), "one may have begun before it was asked"
        assert stopped.finish_reason == "interrupted"
        assert not any(one.name == "kv-from-the-end" for one in threading.enumerate())
        kept = chat.conversation.turns[-1]
        assert len(told.reply_ids) <= len(kept.reply_ids) <= len(told.reply_ids) + 1
        assert kept.reply_ids == whole.reply_ids[: len(kept.reply_ids)]
        assert kept.reply_text.startswith(told.reply_text.rstrip("\ufffd"))
        chat.conversation.resume_reply(both)
        gone_on = chat.conversation.turns[-1]
        assert len(gone_on.reply_ids) == len(kept.reply_ids) + 12
        assert gone_on.reply_ids == whole.reply_ids[: len(gone_on.reply_ids)]
