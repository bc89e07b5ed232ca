"""What a client may rely on while an answer is made: early headers, signs of life, an end when it
leaves, errors inside of streams."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from chatkv.client.link import Link
from chatkv.paths import folders
from chatkv_store.conversations import Conversations
from engines import eventually
from served import ask, chat, open_to, served, user

PATHS = {
    "/v1/chat/completions": {"max_tokens": 3000},
    "/v1/responses": {"max_output_tokens": 3000},
    "/v1/messages": {"max_tokens": 3000},
    "/api/chat": {"options": {"num_predict": 3000, "temperature": 0}},
}


@pytest.fixture(scope="module")
def slow_url(tiny_checkpoint: Callable[..., Path], own_home: Path) -> Iterator[str]:
    """A model whose answers take long enough to be met in the middle, and prompts as well."""
    slow = tiny_checkpoint("llama3", num_hidden_layers=24, max_position_embeddings=8192)
    with served(str(slow)) as url:
        yield url


def status() -> Any:
    return Link(folders().socket).call("GET", "/status")


def is_idle() -> bool:
    return not status()["answering"] and not num_in_use()


def num_in_use() -> int:
    """Tokens of KV that are neither free nor idle."""
    return sum(
        model["kv_tokens"]["total"] - model["kv_tokens"]["free"] - model["kv_tokens"]["idle"]
        for model in status()["models"]
    )


def streamed(url: str, path: str, text: str, **more: Any) -> Any:
    """A request whose stream is open: its connection and response."""
    said = {"input": text} if path == "/v1/responses" else {"messages": [user(text)]}
    connection = open_to(url)
    body = {"stream": True, "temperature": 0, **said, **PATHS[path], **more}
    connection.request("POST", path, json.dumps(body))
    return connection, connection.getresponse()


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_ends_its_answer(slow_url: str, path: str) -> None:
    connection, response = streamed(slow_url, path, f"Go on, {path}.")
    assert response.status == 200
    response.read(3000)  # some dialects say much before the first word
    assert status()["answering"] or num_in_use()
    response.close()
    connection.close()
    eventually(is_idle)
    with Conversations(folders().conversations) as store:
        last = store.last_session()
        assert last is not None
        turn = store.chain(last.id)[-1]
    assert (turn.user_text, turn.state) == (f"Go on, {path}.", "interrupted")
    assert 0 < len(turn.reply_ids) < 3000


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_prefill(slow_url: str, stream: bool) -> None:
    text = f"{stream} " + " the" * 4000
    before = ask(slow_url, "/metrics").body
    connection = open_to(slow_url)
    body = {"messages": [user(text)], "stream": stream, "max_tokens": 5}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    if stream:  # headers come before the prefill
        response = connection.getresponse()
        assert response.status == 200 and response.getheader("x-chatkv-session")
        response.close()
    else:
        eventually(num_in_use)
    connection.close()
    eventually(is_idle)
    after = ask(slow_url, "/metrics").body
    counted = [line for line in after.decode().split("\n") if line.startswith("chatkv_disconnects")]
    assert counted[0] not in before.decode()
    with Conversations(folders().conversations) as store:
        last = store.last_session()
        assert last is not None and store.chain(last.id)[-1].state == "interrupted"
        assert not store.chain(last.id)[-1].reply_ids


def test_headers_and_progress_come_before_the_prefill(slow_url: str) -> None:
    connection, response = streamed(
        slow_url, "/v1/chat/completions", "early" + " the" * 1800, max_tokens=1
    )
    lines = response.read().decode().split("\n")
    prefills = [line for line in lines if line.startswith(": prefill ")]
    done = [int(line.split()[2].split("/")[0]) for line in prefills]
    assert len(done) > 3 and done == sorted(done)
    first_text = next(
        i for i, line in enumerate(lines) if '"content":' in line and '""' not in line
    )
    assert lines.index(prefills[-1]) < first_text
    connection.close()


def test_silence_is_broken_by_comments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, so that silence can be short: nothing of an answer is sent for a while."""
    import asyncio

    from chatkv.server import http
    from chatkv.server.metrics import Metrics
    from chatkv.server.openai_writer import ChatWriter
    from chatkv.server.wire import Event

    monkeypatch.setattr(http, "KEEPALIVE_S", 0.0)

    class Answers:
        metrics = Metrics()

    async def stream() -> Any:
        for kind in ("alive", "alive", "error"):
            yield Event(kind, text="broken", data={"kind": "ContextFull"})  # type: ignore[arg-type]

    async def collect() -> list[bytes]:
        writer = ChatWriter(False, False)
        written = http._written([], stream(), writer, Answers())  # type: ignore[arg-type]
        return [out async for out in written]

    *comments, error = asyncio.run(collect())
    assert comments == [b": keepalive\n\n"] * 2
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "broken"


@pytest.mark.slow
def test_an_answer_that_meets_the_end_of_the_context(slow_url: str) -> None:
    got = chat(slow_url, [user("full" + " the" * 8100)], max_tokens=None)
    assert got.status == 200 and got.json["choices"][0]["finish_reason"] == "length"
    assert got.json["usage"]["total_tokens"] == 8192
    after = [user("full" + " the" * 8100), got.json["choices"][0]["message"], user("more")]
    assert chat(slow_url, after).json["error"]["code"] == "context_length_exceeded"


def test_two_answers_of_a_named_session_do_not_mix(slow_url: str) -> None:
    first = chat(slow_url, [user("One")], max_tokens=2)
    session = first.headers["x-chatkv-session"]
    messages = [user("One"), first.json["choices"][0]["message"], user("Two")]
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": 3000})
    connection = open_to(slow_url)
    connection.request("POST", "/v1/chat/completions", body, {"X-Chatkv-Session": session})
    response = connection.getresponse()
    response.read(500)
    second = chat(slow_url, messages, headers={"X_Chatkv_Session": session})
    assert (second.status, second.json["error"]["code"]) == (409, "session_busy")
    response.close()
    connection.close()
    third = chat(slow_url, messages, headers={"X_Chatkv_Session": session})  # regenerated
    assert third.status == 200 and third.headers["x-chatkv-session"] == session


def test_garbage_ends_nothing(slow_url: str) -> None:
    place = urlsplit(slow_url)
    for garbage in (
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((place.hostname, place.port)) as raw:
            raw.sendall(garbage)
    assert ask(slow_url, "/health").json == {"status": "ok"}
    eventually(is_idle)


def test_metrics_are_prometheus(slow_url: str) -> None:
    chat(slow_url, [user("count me")], max_tokens=2)
    got = ask(slow_url, "/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in got.body.decode().split("\n") if line and not line.startswith("#")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert len(values) == len(lines)
    assert values['chatkv_requests_total{path="/v1/chat/completions",status="200"}'] > 0
    assert values["chatkv_ttft_seconds_count"] == values['chatkv_ttft_seconds_bucket{le="+Inf"}']
    assert values['chatkv_tokens_total{source="generated"}'] >= 2


def test_the_schema_names_every_way(slow_url: str) -> None:
    schema = ask(slow_url, "/openapi.json").json
    assert schema["openapi"].startswith("3.1")
    for path in (*PATHS, "/v1/models", "/api/tags", "/metrics", "/v1/messages/count_tokens"):
        (operation,) = schema["paths"][path].values()
        assert operation["summary"]
        assert ask(slow_url, path, method="PATCH").status == 405


@pytest.mark.parametrize("named", [{}, {"prompt_cache_key": "left"}])
def test_a_client_goes_on_behind_what_it_has_heard(slow_url: str, named: dict[str, str]) -> None:
    """It stopped the answer, and has less of it than was made by then."""
    text = f"Go on {named}." + " the" * 100
    connection, response = streamed(slow_url, "/v1/chat/completions", text, **named)
    heard = made = ""
    while len(made) < 60:
        line = response.readline().decode()
        if line.startswith("data: "):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            made += choice["delta"].get("content") or ""
            heard = made if len(heard) < 40 else heard
    session = response.getheader("x-chatkv-session")
    response.close()
    connection.close()
    messages = [user(text), {"role": "assistant", "content": heard}, user("Stop there.")]
    got = chat(slow_url, messages, **named)
    assert got.status == 200
    assert (got.headers["x-chatkv-session"] == session) == bool(named)
    with Conversations(folders().conversations) as store:
        first, second = store.chain(got.headers["x-chatkv-session"])
    assert (first.reply_text, second.user_text) == (heard, "Stop there.")
    assert got.json["timings"]["cache_n"] > 100  # what stands in front of the answer
