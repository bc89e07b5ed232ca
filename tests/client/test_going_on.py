"""Going on with an answer that was cut, taking turns back: to the token, and in the file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chatkv.client import ChatRequest, OpenChat, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.errors import UsageError
from chatkv.paths import folders
from chatkv.session.turn import Listener, TurnOptions
from chatkv_store.conversations import Conversations
from killable import say_and_kill

GREEDY, SAMPLED = SamplingOptions(temperature=0), SamplingOptions(temperature=1.0)


@contextmanager
def opened(model: str, session: str | None = None) -> Iterator[OpenChat]:
    with open_chat(folders(), ChatRequest(model, "float32", resume=session, seed=7)) as chat:
        yield chat


def options(sampling: SamplingOptions, max_tokens: int) -> TurnOptions:
    return TurnOptions(sampling, max_tokens=max_tokens)


def stop_after(count: int) -> Listener:
    """Ctrl-C once so many pieces of text were heard."""
    heard: list[str] = []
    return Listener(on_text=heard.append, cancelled=lambda: len(heard) >= count)


def reply_ids(chat: OpenChat) -> list[int]:
    return list(chat.conversation.turns[-1].reply_ids)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stopped_answer_goes_on_to_the_token(
    home: Path, model: str, sampling: SamplingOptions
) -> None:
    """Stopped twice, cut once, in three processes: the answer of one that was left alone."""
    with opened(model) as chat:
        whole = chat.conversation.send("Go.", options(sampling, 40))
        expected = reply_ids(chat)
    with opened(model) as chat:
        talk = chat.conversation
        first = talk.send("Go.", options(sampling, 40), stop_after(3))
        assert first.finish_reason == "interrupted" and len(reply_ids(chat)) < 20
        heard: list[str] = []
        talk.resume_reply(options(sampling, 5), Listener(on_text=heard.append))
        assert first.text + "".join(heard) == talk.turns[-1].reply_text
    with opened(model, first.session) as chat:
        result = chat.conversation.resume_reply(options(sampling, 40 - len(reply_ids(chat))))
        assert reply_ids(chat) == expected
        assert (result.text, result.turn, len(chat.conversation.turns)) == (whole.text, 1, 1)


@pytest.mark.slow
def test_a_killed_answer_goes_on_with_the_numbers_it_would_have_drawn(
    home: Path, model: str
) -> None:
    """A checkpoint holds as many draws as ids, however far sampling was."""
    rng = random.Random(3)
    with opened(model) as chat:
        chat.conversation.send("hi", options(GREEDY, 4))
        origin = chat.conversation.session.id
    with Conversations(folders().conversations) as conversations:
        calm = conversations.fork(origin).id
    with opened(model, calm) as chat:
        chat.conversation.send("Go.", options(SAMPLED, 600))
        expected = reply_ids(chat)
    num_killed, delay_s = 0, 0.5 + rng.random() * 0.5
    while num_killed < 2:
        assert delay_s > 0.001, "the answer always ends before it is killed"
        with Conversations(folders().conversations) as conversations:
            session = conversations.fork(origin).id
        say_and_kill(
            home,
            session,
            "Go.",
            {"model": model, "dtype": "float32", "max_tokens": 600, "temperature": 1.0},
            "text",
            delay_s,
        )
        delay_s *= 0.6
        with opened(model, session) as chat:
            made = reply_ids(chat)
            assert made == expected[: len(made)]
            if chat.conversation.turns[-1].state == "done":
                continue  # a fast machine: killed earlier next time
            num_killed += 1
            chat.conversation.resume_reply(options(SAMPLED, 600 - len(made)))
            assert reply_ids(chat) == expected


def test_a_complete_answer_has_no_more_to_say(home: Path, model: str) -> None:
    with opened(model) as chat:
        with pytest.raises(UsageError, match="no answer to go on with"):
            chat.conversation.resume_reply()
        said = chat.conversation.send("Go.", options(GREEDY, 40))
        stop = said.text[4:6]
        chat.conversation.rewind(0)
        ended = TurnOptions(GREEDY, max_tokens=40, stop=(stop,))
        assert chat.conversation.send("Go.", ended).finish_reason == "stop"
        with pytest.raises(UsageError, match="the last one is complete"):
            chat.conversation.resume_reply()


def test_a_fork_keeps_the_shorter_answer(home: Path, model: str) -> None:
    with opened(model) as chat:
        short = chat.conversation.send("Go.", options(GREEDY, 5))
    with Conversations(folders().conversations) as conversations:
        fork = conversations.fork(short.session).id
    with opened(model, short.session) as chat:
        longer = chat.conversation.resume_reply(options(GREEDY, 20))
        assert longer.text.startswith(short.text) and len(reply_ids(chat)) == 25
    with opened(model, fork) as chat:
        assert chat.conversation.turns[-1].reply_text == short.text
        went_on = chat.conversation.resume_reply(options(GREEDY, 20))
        assert went_on.text == longer.text


def test_another_answer_is_another_one_also_tomorrow(home: Path, model: str) -> None:
    texts: list[str] = []
    with opened(model) as chat:
        session = chat.conversation.send("Go.", options(SAMPLED, 12)).session
        texts.append(chat.conversation.turns[-1].reply_text)
        chat.conversation.rewind(0)
        texts.append(chat.conversation.send("Go.", options(SAMPLED, 12)).text)
        chat.conversation.rewind(0)
    with opened(model, session) as chat:  # what was left behind is remembered
        assert chat.conversation.turns == []
        texts.append(chat.conversation.send("Go.", options(SAMPLED, 12)).text)
    assert len(set(texts)) == 3
    with Conversations(folders().conversations) as conversations:
        (head,) = conversations.chain(session)
        assert head.reply_text == texts[-1]
        assert {turn.reply_text for turn in conversations.tree(session)} == set(texts)
        assert conversations.get_session(session).num_turns == 1
        assert [hit.session.id for hit in conversations.search("Go")] == [session]


def test_taking_back_is_refused_where_there_is_nothing(home: Path, model: str) -> None:
    with opened(model) as chat:
        chat.conversation.rewind(0)
        for wrong in (-1, 1):
            with pytest.raises(UsageError, match="does not exist"):
                chat.conversation.rewind(wrong)


def test_an_answer_goes_on_after_others_used_its_memory(home: Path, model: str) -> None:
    """The KV is gone from memory: it comes from the disk, and the answer is the same."""
    with opened(model) as chat:
        talk: Any = chat.conversation
        expected = talk.send("Go on. " * 30, options(GREEDY, 30)).text
        talk.rewind(0)
        talk.send("Go on. " * 30, options(GREEDY, 10))
        chat.runtime.restorer.disk.writer.flush(10)  # type: ignore[union-attr]
        while chat.runtime.engine.memory.reclaim():
            pass
        result = talk.resume_reply(options(GREEDY, 20))
        assert result.text == expected and result.tokens.loaded > 0
