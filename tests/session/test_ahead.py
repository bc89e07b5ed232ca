"""Work before Enter: the draft's KV is reused, nothing of it is saved, the answer is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chatkv.client import ChatRequest, OpenChat, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.paths import folders
from chatkv.session.ahead import UNSETTLED_TOKENS, prefill_draft
from chatkv.session.turn import TurnOptions, TurnResult
from chatkv_store.conversations import Conversations

TEXT = "Tell me a story about the sea, a ship and its captain. " * 6
DRAFT = "And what became of the cat that the captain had left at home with his old mother?"


@pytest.fixture
def model(home: Path, tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3"))


@contextmanager
def opened(model: str, session: str | None = None) -> Iterator[OpenChat]:
    with open_chat(folders(), ChatRequest(model, "float32", resume=session, seed=1)) as chat:
        yield chat


def say(chat: OpenChat, text: str) -> TurnResult:
    options = TurnOptions(SamplingOptions(temperature=0), max_tokens=10, restore="reload")
    return chat.conversation.send(text, options)


@pytest.fixture
def session(model: str) -> str:
    with opened(model) as chat:
        return say(chat, TEXT).session


def fork(session: str) -> str:
    with Conversations(folders().conversations) as conversations:
        return conversations.fork(session).id


def test_a_draft_that_is_sent_is_reused(model: str, session: str) -> None:
    twin = fork(session)
    with opened(model, twin) as chat:
        plain = say(chat, DRAFT)
    with opened(model, session) as chat:
        history = len(chat.conversation.log)
        assert prefill_draft(chat.conversation) == history
        for length in (10, 40, len(DRAFT)):
            cached = prefill_draft(chat.conversation, DRAFT[:length])
        result = say(chat, DRAFT)
        assert result.tokens.reused == cached > history + 10
        assert result.tokens.loaded == 0
        # The end of the message, the template's words behind it, and nothing else.
        assert result.tokens.computed <= UNSETTLED_TOKENS + 12
        assert result.text == plain.text
        assert result.tokens.prompt == plain.tokens.prompt


def test_a_draft_that_changes_costs_only_what_changed(model: str, session: str) -> None:
    with opened(model, session) as chat:
        prefill_draft(chat.conversation, DRAFT)
        cached = prefill_draft(chat.conversation, DRAFT[:40] + " something else altogether, really")
        assert cached > len(chat.conversation.log)
        result = say(chat, "Never mind.")
        assert result.tokens.reused >= len(chat.conversation.turns[0].prompt_ids)
        assert "Never mind." in chat.conversation.turns[-1].user_text


def test_nothing_of_a_draft_is_saved(model: str, session: str) -> None:
    with opened(model, session) as chat:
        prefill_draft(chat.conversation, DRAFT)
    with Conversations(folders().conversations) as conversations:
        assert len(conversations.chain(session)) == 1
    with opened(model, session) as chat:
        disk = chat.runtime.restorer.disk
        assert disk is not None
        ids = [*chat.conversation.log, *chat.conversation.prompt_ids(DRAFT)]
        found = disk.store.match(disk.namespace, ids, chat.runtime.layout)
        assert found.num_tokens <= len(chat.conversation.log)


def test_a_cancelled_draft_keeps_what_is_computed(model: str, session: str) -> None:
    with opened(model, session) as chat:
        assert prefill_draft(chat.conversation, DRAFT, cancelled=lambda: True) >= 0
        assert say(chat, DRAFT).turn == 2


def test_a_draft_of_a_new_session(model: str) -> None:
    with opened(model) as chat:
        assert prefill_draft(chat.conversation) == 0
        cached = prefill_draft(chat.conversation, DRAFT)
        assert cached > 10
        assert say(chat, DRAFT).tokens.reused == cached


def test_a_draft_that_does_not_fit_is_left_alone(model: str) -> None:
    with opened(model) as chat:
        assert prefill_draft(chat.conversation, "word " * 3000) == 0
        assert say(chat, "hello").turn == 1
