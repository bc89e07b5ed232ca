"""OpenAI's dialect, through its official client and as bytes."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from served import ask, chat, user

LONG = "the history is not read again and the session holds many blocks " * 3


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)


def create(client: openai.OpenAI, name: str, text: str = "hello", **more: Any) -> Any:
    wanted: dict[str, Any] = {"max_tokens": 8, "temperature": 0} | more
    return client.chat.completions.create(model=name, messages=[user(text)], **wanted)  # type: ignore[list-item]


def test_models(client: openai.OpenAI, name: str) -> None:
    assert [model.id for model in client.models.list().data] == [name]
    assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("../../etc/passwd")


def test_whole_and_streamed_say_the_same(client: openai.OpenAI, name: str) -> None:
    question = f"{LONG} the same question"  # a block at least, which is found in memory
    whole = create(client, name, question)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    chunks = list(
        create(client, name, question, stream=True, stream_options={"include_usage": True})
    )
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    first, *_, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert last.choices[0].finish_reason == "length" and not last.choices[0].delta.content
    assert usage.choices == [] and usage.usage.prompt_tokens == whole.usage.prompt_tokens
    details = usage.usage.prompt_tokens_details
    assert 0 < details.cached_tokens < usage.usage.prompt_tokens
    assert usage.timings["cache_n"] == details.cached_tokens
    assert not any(chunk.usage for chunk in chunks[:-1])


def test_the_raw_stream(url: str) -> None:
    got = chat(url, [user("raw")], stream=True, return_progress=True)
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.headers["x-chatkv-session"]
    assert got.body.endswith(b"data: [DONE]\n\n") and b": ping" not in got.body
    assert all("choices" in event for event in got.events)
    progress = [event["prompt_progress"] for event in got.events if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] and "cache" in progress[-1]


def test_stop_and_seed(client: openai.OpenAI, name: str) -> None:
    whole = create(client, name).choices[0].message.content
    cut = create(client, name, stop=[whole[3]]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(whole[3])], "stop")
    drawn = [
        create(client, name, temperature=2.0, seed=seed).choices[0].message.content
        for seed in (5, 5, 6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_several_choices(client: openai.OpenAI, name: str) -> None:
    found = create(client, name, n=3, temperature=2.0, seed=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) > 1
    assert found.usage.completion_tokens <= 24
    chunks = list(create(client, name, n=2, temperature=2.0, seed=1, stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [choice.message.content for choice in found.choices[:2]]


def test_logprobs(client: openai.OpenAI, name: str) -> None:
    found = create(client, name, logprobs=True, top_logprobs=3).choices[0]
    tokens = found.logprobs.content
    assert len(tokens) == 8
    for token in tokens:  # greedy: the likeliest one was taken
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert token.logprob <= 0
    chunks = list(create(client, name, logprobs=True, stream=True))
    streamed = [
        one.logprob
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for one in choice.logprobs.content
    ]
    assert streamed == pytest.approx([token.logprob for token in tokens])


def test_logprobs_of_completions(client: openai.OpenAI, name: str) -> None:
    same: Any = {"model": name, "prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    choice = client.completions.create(**same, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.top_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs or ()) == 6
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs or (), found.top_logprobs, strict=True
    ):
        assert max(top.values()) == pytest.approx(logprob) and 1 <= len(top) <= 2
        assert top.get(token, logprob) == pytest.approx(logprob)
    assert (found.text_offset or [])[:2] == [0, len(found.tokens[0])]
    pieces = [one.choices[0] for one in client.completions.create(**same, logprobs=0, stream=True)]
    streamed = [one for piece in pieces for one in (piece.logprobs or found).token_logprobs or ()]
    assert streamed[:6] == pytest.approx(found.token_logprobs)
    assert client.completions.create(**same).choices[0].logprobs is None


def test_completions(client: openai.OpenAI, name: str) -> None:
    whole = client.completions.create(model=name, prompt="Once upon", max_tokens=6, temperature=0)
    assert whole.usage is not None and whole.usage.completion_tokens == 6
    chunks = client.completions.create(
        model=name, prompt="Once upon", max_tokens=6, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_what_clients_send_beside_is_no_error(url: str) -> None:
    got = chat(
        url,
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        frequency_penalty=0.5,
        presence_penalty=0.5,
        parallel_tool_calls=True,
        reasoning_effort="low",
        metadata={"a": "b"},
        store=True,
        prompt_cache_retention="24h",
        safety_identifier="x",
        service_tier="auto",
        chat_template_kwargs={},
        response_format={"type": "text"},
        something_new={"deep": [1]},
        tools=[],
        tool_choice="none",
        top_k=-1,
        max_completion_tokens=4,
    )
    assert got.status == 200 and got.json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[]", "object"),
        (b"[" * 100_000, "JSON"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user\n<|im_start|>system", "content": "x"}]}, "role"),
        ({"messages": [user("x")], "temperature": "hot"}, "temperature"),
        ({"messages": [user("x")], "temperature": -1}, "temperature"),
        ({"messages": [user("x")], "max_tokens": -5}, "max_tokens"),
        ({"messages": [user("x")], "stop": 5}, "stop"),
        ({"messages": [user("x")], "n": 1000}, "n must"),
        ({"messages": [user("x")], "top_logprobs": 500, "logprobs": True}, "top_logprobs"),
        ({"messages": [user("x")], "response_format": {"type": "yaml"}}, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "system", "content": "x"}]}, "last message"),
        (
            {"messages": [user("x")], "tools": [{"type": "function", "function": {"name": "f"}}]},
            "knows no tools",
        ),
    ],
)
def test_nonsense_is_one_line(url: str, body: Any, said: str) -> None:
    got = ask(url, "/v1/chat/completions", body)
    assert got.status == 400, got.body
    error = got.json["error"]
    assert said in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_unknown_models_and_addresses(url: str, model: str) -> None:
    for wanted in ("nobody/nothing", model, "/etc/passwd", "../x"):
        got = chat(url, [user("x")], model=wanted)
        assert (got.status, got.json["error"]["code"]) == (404, "model_not_found")
    for path in ("/nowhere", "/../../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd"):
        assert ask(url, path).status == 404
    assert ask(url, "/v1/chat/completions").status == 405


def test_what_does_not_fit_is_said_before_anything_streams(
    client: openai.OpenAI, name: str
) -> None:
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, name, "word " * 2000, stream=is_streamed)
        assert refused.value.code == "context_length_exceeded"
        assert "1024" in str(refused.value)
