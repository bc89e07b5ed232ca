"""Whoever gives up ends the work that was done for them, whichever face they had."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv.client.link import Link
from chatkv.paths import folders
from chatkv.server.wire import SendRequest
from chatkv.session.turn import Listener, TurnOptions
from chatkv_store.conversations import Conversations
from engines import GREEDY, chat_with, eventually, greedy
from forked import Forked, chatkv

# Long enough for several chunks of prefill.
LONG = "Tell me of the sea, a ship and its captain. " * 60


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3", num_hidden_layers=24, max_position_embeddings=8192))


def last_turn(session: str) -> Any:
    with Conversations(folders().conversations) as conversations:
        return conversations.chain(session)[-1]


def answering(link: Link) -> list[str]:
    sessions: list[str] = link.call("GET", "/status")["answering"]
    return sessions


def test_a_connection_that_ends_while_its_prompt_is_read(link: Link, model: str) -> None:
    """Another one goes on; the words are kept, and can still be answered."""
    with chat_with(model) as chat, chat_with(model) as other:
        running = link.stream(
            f"/sessions/{other.session}/turns", SendRequest("Go.", None, greedy(7000))
        )
        while next(running).event != "text":
            pass
        stream = link.stream(f"/sessions/{chat.session}/turns", SendRequest(LONG, None, greedy(4)))
        while next(stream).stage != "prefill":
            pass
        stream.close()
        eventually(lambda: answering(link) == [other.session])
        assert next(running).event in ("text", "alive")
        turn = last_turn(chat.session)
        assert (turn.state, turn.user_text, turn.reply_text) == ("interrupted", LONG, "")
        assert len(turn.prompt_ids) > 1000 and not turn.reply_ids
        running.close()
        eventually(lambda: not answering(link))


def test_a_connection_that_ends_while_its_history_comes_back(link: Link, model: str) -> None:
    with chat_with(model) as chat:
        session = chat.session
        said = chat.send(LONG, greedy(8), Listener())
        link.call("POST", f"/sessions/{session}/release")  # its KV is on the disk alone
        options = TurnOptions(GREEDY, max_tokens=8, restore="both")
        stream = link.stream(f"/sessions/{session}/turns", SendRequest("And?", None, options))
        while next(stream).event == "alive":
            pass
        stream.close()
        eventually(lambda: not answering(link))
        assert last_turn(session).user_text == "And?"
        with Conversations(folders().conversations) as conversations:
            first = conversations.chain(session)[0]
        assert first.reply_text == said.text
        assert chat.send("Still there?", greedy(4), Listener()).turn == 3


def test_ctrl_c_of_ask_ends_its_turn_in_the_engine(link: Link, model: str) -> None:
    words = ("--model", model, "--dtype", "float32", "--max-tokens", "7000")
    asking = Forked(chatkv, "ask", *words, LONG)
    eventually(lambda: answering(link))
    (session,) = answering(link)
    asking.send_signal(signal.SIGINT)
    out, errors = asking.communicate()
    assert asking.returncode == 130 and "Traceback" not in errors
    eventually(lambda: not answering(link))
    turn = last_turn(session)
    assert (turn.state, turn.user_text) == ("interrupted", LONG)
    assert turn.reply_text.rstrip("\n") == out.rstrip("\n")
