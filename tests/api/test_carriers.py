"""How requests name a session; which ones are a program's own, and which a person's."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from chatkv.server.carriers import carriers_of, is_background, is_scratch

BACKGROUND = [
    "### Task:\nGenerate a concise, 3-5 word title with an emoji.\n### Chat History:\nhello",
    "### Task:\nGenerate 1-3 broad tags\n\n<chat_history>\nhello\n</chat_history>",
    "Provide a concise, 5-word-or-less title for the conversation, using its same language.",
    "Generate a concise 3-7 word title for this conversation, omitting punctuation.",
    "Please write a 5-10 word title for the following conversation:\n\nUser: hello",
    "Summarize our conversation as a topic of 10 words or fewer for this chat",
    "Analyze if this message indicates a new conversation topic.",
]
PEOPLE = [
    "Write a title for my essay about rivers",
    "Generate a concise title for my talk",
    "Give this conversation a name",
    "Please write a 500 word essay on the French revolution",
    "### Task:\nWrite a poem",
    "What is the topic of this conversation?",
    "Suggest a name for my cat. The conversation with my wife went nowhere.",
    "",
]


@pytest.mark.parametrize("text", BACKGROUND)
def test_what_programs_ask(text: str) -> None:
    assert is_background(text)


@pytest.mark.parametrize("text", PEOPLE)
def test_what_people_ask(text: str) -> None:
    assert not is_background(text)


def request(**headers: str) -> Request:
    named = [(k.replace("_", "-").lower().encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "headers": named})


def test_a_title_of_a_session_that_was_named_is_a_turn() -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": BACKGROUND[2]}]
    assert is_scratch(request(), {}, said)
    assert not is_scratch(request(X_Chatkv_Session="x"), {}, said)
    assert not is_scratch(request(X_Chatkv_Scratch="0"), {}, said)
    assert is_scratch(request(X_Chatkv_Scratch="1"), {}, [{"role": "user", "content": "hello"}])


def test_the_most_telling_name_comes_first() -> None:
    body = {"user": "u", "prompt_cache_key": "k", "metadata": {"user_id": "a_session_12345678"}}
    found = carriers_of(request(X_Conversation_Id="c", X_OpenWebUI_Chat_Id="w"), body)
    assert [kind for kind, _ in found.keys] == [
        "prompt_cache_key",
        "x-openwebui-chat-id",
        "x-conversation-id",
        "metadata",
        "user",
    ]
    assert found.session is None
    for odd in ({"user": 5}, {"metadata": "x"}, {"metadata": {"user_id": "[1]"}}, {"user": ""}):
        assert carriers_of(request(), odd).keys == ()
