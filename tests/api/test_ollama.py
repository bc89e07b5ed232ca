"""Ollama's dialect, through its official client and as bytes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import ollama
import pytest

from chatkv.paths import folders
from chatkv_store.conversations import Conversations
from served import ask, user

LONG = "the history is not read again and the session holds many blocks " * 3
OPTIONS = {"num_predict": 8, "temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url, timeout=60)


def test_what_there_is(client: ollama.Client, url: str, name: str) -> None:
    (listed,) = client.list().models
    assert listed.model == name and listed.size and listed.digest and listed.modified_at
    shown = client.show(name)
    assert "completion" in (shown.capabilities or [])
    assert shown.modelinfo and shown.modelinfo["chatkv.context_length"] == 1024
    assert ask(url, "/api/show", {"name": f"{name}:latest"}).status == 200
    (running,) = client.ps().models
    assert running.model == name and running.context_length == 1024
    assert ask(url, "/api/version").json["version"]
    assert ask(url, "/").status == ask(url, "/", method="HEAD").status == 200


def test_whole_and_streamed_say_the_same(client: ollama.Client, name: str) -> None:
    said = [user("hello there")]
    whole = client.chat(name, said, options=OPTIONS)
    parts = list(client.chat(name, said, stream=True, options=OPTIONS))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert last.done_reason == "length" and last.eval_count == 8
    assert last.prompt_eval_count == whole.prompt_eval_count
    for nanoseconds in (last.total_duration, last.prompt_eval_duration, last.eval_duration):
        assert nanoseconds is not None and nanoseconds > 1000
    assert datetime.fromisoformat(str(last.created_at)).tzinfo is not None


def test_a_conversation_is_gone_on_with(client: ollama.Client, url: str, name: str) -> None:
    first = client.chat(name, [user(LONG)], options=OPTIONS)
    messages = [user(LONG), dict(first.message), user("And?")]
    body = {"model": name, "messages": messages, "stream": False, "options": OPTIONS}
    got = ask(url, "/api/chat", body | {"keep_alive": -1, "think": False})
    assert got.json["timings"]["hit"] == "chain" and got.headers["x-chatkv-session"]
    assert got.json["prompt_eval_cached_count"] > 0.7 * got.json["prompt_eval_count"]


def test_generate_belongs_to_no_conversation(client: ollama.Client, name: str) -> None:
    def num_sessions() -> int:
        with Conversations(folders().conversations) as store:
            return len(store.list_sessions())

    before = num_sessions()
    whole = client.generate(name, "Once upon", options=OPTIONS)
    parts = client.generate(name, "Once upon", stream=True, options=OPTIONS)
    assert "".join(part.response for part in parts) == whole.response
    raw = client.generate(name, "Once upon", raw=True, options=OPTIONS)
    assert raw.prompt_eval_count is not None and whole.prompt_eval_count is not None
    assert raw.prompt_eval_count < whole.prompt_eval_count
    assert client.generate(name, "").done_reason == "load"
    assert num_sessions() == before


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_a_text(client: ollama.Client, name: str, stream: bool) -> None:
    wanted: list[tuple[int, str, dict[str, Any]]] = [
        (404, "there is no model", {"model": "nobody"}),
        (400, "context ends at", {"messages": [user("word " * 2000)]}),
        (400, "banana", {"format": {"type": "banana"}}),
        (400, "temperature", {"options": {"temperature": "hot"}}),
    ]
    for status, said, more in wanted:
        request = {"model": name, "messages": [user("x")], "stream": stream} | more
        with pytest.raises(ollama.ResponseError, match=said) as refused:
            list(client.chat(**request))
        assert refused.value.status_code == status


def test_a_stream_is_lines(url: str, name: str) -> None:
    got = ask(url, "/api/chat", {"model": name, "messages": [user("x")], "options": OPTIONS})
    assert got.headers["content-type"] == "application/x-ndjson"
    assert got.body.endswith(b"\n") and b"\n\n" not in got.body
