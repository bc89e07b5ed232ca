"""A server whose memory holds less than is asked of it at once: who waits, who gives way, whose KV
stays, and that none of it changes an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from chatkv.runtime import POOL_CONVERSATIONS
from chatkv.session.turn import Listener
from engines import chat_with, eventually, greedy
from served import ask, served

CONTEXT = 256
STORIES = [
    f"Number {number}. Who had sailed on {number} ships wrote home from the island of the {number} "
    "cats, where it had been raining for days, and nobody came: "
    for number in range(12)
]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama3", max_position_embeddings=CONTEXT))


def at_once(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What they return, each in a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            found[index] = works[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [one for one in found if isinstance(one, Exception)], found
    return found


def answered(model: str, text: str) -> tuple[str, bool]:
    """The answer of a new conversation, and whether it had to give its memory to others on the
    way."""
    heard: list[str] = []
    waited_after: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "waiting for memory":
            waited_after.append(len(heard))

    listener = Listener(on_text=heard.append, on_progress=progress)
    with chat_with(model) as chat:
        text = chat.send(text, greedy(110), listener).text
    return text, any(waited_after)


def test_who_gives_way_answers_as_if_alone(
    own_home: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts fit, but not all answers: those that began last go to the disk and come back."""
    with served(model):
        alone = [answered(model, story)[0] for story in STORIES]
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path))
    with served(model):
        together = at_once([lambda story=story: answered(model, story) for story in STORIES])
    assert [text for text, _ in together] == alone
    assert any(gave_way for _, gave_way in together)


def test_background_takes_no_conversation_out_of_memory(url: str, model: str) -> None:
    held: list[tuple[str, int]] = []
    for story in STORIES[: POOL_CONVERSATIONS // 2]:
        with chat_with(model) as chat:
            chat.send(story, greedy(100), Listener())
            held.append((chat.session, chat.num_tokens))
    stored = stored_tokens(url)

    def title(number: int) -> str:
        prompt = f"{number} titles for a story: " + "the sea, a ship and its captain. " * 3
        body = {"prompt": prompt, "max_tokens": 60, "temperature": 0}
        return str(ask(url, "/v1/completions", body).json["choices"][0]["text"])

    # Together they need more than is free, and one after the other more than there is at all.
    assert all(at_once([lambda number=number: title(number) for number in range(12)]))
    assert stored_tokens(url) == stored
    for session, num_tokens in held:
        with chat_with(None, resume=session, dtype="auto") as chat:
            tokens = chat.send("And?", greedy(2), Listener()).tokens
        # The last token of an answer is computed with what comes behind it.
        assert tokens.reused >= num_tokens - 1 and not tokens.loaded


def stored_tokens(url: str) -> int:
    """On disk, once that is all there is to write."""
    found = [-1]

    def is_settled() -> bool:
        before, found[0] = found[0], ask(url, "/cache").json["stored_tokens"]
        return bool(before == found[0])

    eventually(is_settled)
    return found[0]


def test_conversations_that_begin_alike_share_it_in_memory(url: str, model: str) -> None:
    beginning = "Once upon a time there was a captain who had a ship, a map and two cats. "
    with chat_with(model) as chat:
        chat.send(beginning * 2 + "First?", greedy(2), Listener())
    with chat_with(model) as chat:
        tokens = chat.send(beginning * 2 + "Second?", greedy(2), Listener()).tokens
    assert tokens.loaded == 0 and tokens.reused >= len(beginning) / 2
    assert tokens.computed < 64


def test_what_never_fits_is_refused_with_numbers(url: str) -> None:
    got = ask(url, "/v1/completions", {"prompt": "sea " * 400, "max_tokens": 4})
    assert got.status == 400
    message = got.json["error"]["message"]
    assert "tokens" in message and str(CONTEXT) in message
