"""Answers in JSON and calls of tools, of a model that knows neither: the form is the grammar's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import ollama
import openai
import pytest

from chat_templates import TOLD_OF_TOOLS
from chatkv.paths import folders
from chatkv_store.conversations import Conversations
from served import ask, chat, served, user

PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["river", "lake", "Straße"]},
        "depths": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
        "is_far": {"type": ["boolean", "null"]},
    },
    "required": ["name", "kind", "depths", "is_far"],
    "additionalProperties": False,
}
SAID = [user("Name a place.")]
WILD = {"temperature": 3.0, "top_p": 1.0, "min_p": 0.0}
LIMIT = 600


@pytest.fixture(scope="module")
def url(own_home: Any, with_template: Callable[[str, str], str]) -> Iterator[str]:
    with served(with_template("calls", TOLD_OF_TOOLS)) as url:
        yield url


def wanted(seed: int, stream: bool) -> dict[str, dict[str, Any]]:
    """A request for a place in every dialect."""
    said = {"messages": SAID, "stream": stream, "seed": seed, **WILD}
    form = {"type": "json_schema", "schema": PLACE}
    named = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}
    options = {"num_predict": LIMIT, "seed": seed, **WILD}
    ollama = {"stream": stream, "format": PLACE, "options": options}
    return {
        "/v1/chat/completions": {**said, "max_tokens": LIMIT, "response_format": named},
        "/v1/completions": {
            "prompt": "A place:",
            "stream": stream,
            "seed": seed,
            **WILD,
            "max_tokens": LIMIT,
            "response_format": named,
        },
        "/v1/responses": {
            "input": "Name a place.",
            "stream": stream,
            "seed": seed,
            **WILD,
            "max_output_tokens": LIMIT,
            "text": {"format": {**form, "name": "place"}},
        },
        "/v1/messages": {**said, "max_tokens": LIMIT, "output_config": {"format": form}},
        "/api/chat": {"messages": SAID, **ollama},
        "/api/generate": {"prompt": "Name a place.", **ollama},
    }


def text_of(path: str, answer: Any, is_streamed: bool) -> str:
    """What was said, in whatever form it came."""
    if not is_streamed:
        whole = answer.json
        match path:
            case "/v1/chat/completions":
                assert whole["choices"][0]["finish_reason"] == "stop"
                return str(whole["choices"][0]["message"]["content"])
            case "/v1/completions":
                return str(whole["choices"][0]["text"])
            case "/v1/responses":
                return str(whole["output"][-1]["content"][0]["text"])
            case "/v1/messages":
                return str(whole["content"][0]["text"])
        return str(whole["message"]["content"] if path == "/api/chat" else whole["response"])
    if path.startswith("/api/"):
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert lines[-1]["done_reason"] == "stop"
        pieces = [
            line["message"]["content"] if "message" in line else line["response"] for line in lines
        ]
        return "".join(pieces)
    events = answer.events
    if path == "/v1/responses":
        return "".join(one["delta"] for one in events if one["type"].endswith("output_text.delta"))
    if path == "/v1/messages":
        deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
        return "".join(delta["text"] for delta in deltas)
    choices = [choice for one in events for choice in one["choices"]]
    if path == "/v1/completions":
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("path", wanted(0, False))
def test_json_by_a_schema(url: str, path: str, stream: bool) -> None:
    answer = ask(url, path, wanted(3, stream)[path])
    assert answer.status == 200, answer.body
    jsonschema_rs.validate(PLACE, json.loads(text_of(path, answer, stream)))


def test_several_answers_and_seeds(url: str) -> None:
    body = wanted(1, False)["/v1/chat/completions"]
    got = chat(url, **body, n=3)
    said = [choice["message"]["content"] for choice in got.json["choices"]]
    assert len(set(said)) == 3
    for text in said:
        jsonschema_rs.validate(PLACE, json.loads(text))
    assert chat(url, **body).json["choices"][0]["message"]["content"] == said[0]


def test_json_of_any_kind_is_json_as_far_as_it_goes(url: str) -> None:
    """A model that knows nothing need not come to an end; until then nothing is wrong."""
    ends = 0
    for seed in range(2):
        for path, more in (
            ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
            ("/api/chat", {"format": "json", "stream": False}),
        ):
            sampling = {"max_tokens": 80, "seed": seed, **WILD, "options": {"num_predict": 80}}
            got = ask(url, path, {"messages": SAID, **sampling, **more}).json
            is_done = (got.get("done_reason") or got["choices"][0]["finish_reason"]) == "stop"
            message = got.get("message") or got["choices"][0]["message"]
            assert message["content"].lstrip().startswith("{")
            if is_done:
                ends += 1
                assert isinstance(json.loads(message["content"]), dict)
    small = {"type": "json_object", "schema": {"type": "object", "maxProperties": 0}}
    got = chat(url, SAID, response_format=small, max_tokens=40, **WILD)
    assert json.loads(got.json["choices"][0]["message"]["content"]) == {}


def test_an_answer_that_was_cut_off_goes_on_in_its_form(url: str) -> None:
    """Also behind a restart of its client: the state of the grammar comes from the tokens."""
    body = wanted(5, False)["/v1/chat/completions"]
    messages = [user("Name a place that is cut.")]
    told = body | {"messages": messages}
    whole = chat(url, **told, store=False).json["choices"][0]["message"]["content"]
    answer = ""
    for _ in range(40):
        got = chat(url, **{**told, "messages": messages, "max_tokens": 7}).json["choices"][0]
        answer += got["message"]["content"]
        messages = [told["messages"][0], {"role": "assistant", "content": answer}]
        if got["finish_reason"] == "stop":
            break
    jsonschema_rs.validate(PLACE, json.loads(answer))
    assert whole.lstrip()[0] == answer.lstrip()[0] == "{"
    other = {"type": "json_schema", "schema": {"type": "integer"}}
    cut = chat(url, [user("Another one.")], max_tokens=3, response_format=body["response_format"])
    resent = [user("Another one."), cut.json["choices"][0]["message"]]
    assert chat(url, resent, response_format=other).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_refused_and_leaves_nothing(url: str, stream: bool) -> None:
    def num_turns() -> int:
        with Conversations(folders().conversations) as store:
            return sum(len(store.chain(one.id)) for one in store.list_sessions())

    before = num_turns()
    history = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    for form, why in (
        ({"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}, "banana"),
        ({"type": "json_schema", "json_schema": {}}, "must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": []}}}, "Unsatisfiable"),
        ({"type": "yaml"}, "'yaml' is not known"),
        (["json"], "must be an object"),
    ):
        got = chat(url, history, response_format=form, stream=stream)
        assert got.status == 400 and why in got.json["error"]["message"], got.body
    bad: dict[str, Any] = {"messages": history, "format": {"type": "banana"}, "stream": stream}
    assert "banana" in ask(url, "/api/chat", bad).json["error"]
    assert num_turns() == before


TOOLS = [
    {"type": "function", "function": {"name": "place", "parameters": PLACE}},
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}},
    },
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_has_its_arguments(url: str, name: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    choice: Any = {"type": "function", "function": {"name": "place"}}
    same: Any = {"model": "calls", "messages": SAID, "tools": TOOLS, "tool_choice": choice}
    same |= {"parallel_tool_calls": False, "max_tokens": LIMIT, "seed": 2, "temperature": 2}
    if stream:
        chunks = [one.choices[0] for one in client.chat.completions.create(**same, stream=True)]
        calls = [call for one in chunks for call in one.delta.tool_calls or ()]
        reason = chunks[-1].finish_reason
    else:
        one = client.chat.completions.create(**same).choices[0]
        calls, reason = one.message.tool_calls, one.finish_reason
    (call,) = calls
    assert (call.function.name, reason) == ("place", "tool_calls")
    jsonschema_rs.validate(PLACE, json.loads(call.function.arguments))


@pytest.mark.slow
def test_calls_that_must_be_in_other_dialects(url: str) -> None:
    import anthropic  # here, since it takes seconds

    claude = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    tools: Any = [{"name": "place", "input_schema": PLACE}]
    said: Any = {"model": "calls", "messages": SAID, "max_tokens": LIMIT, "tools": tools}
    got = claude.messages.create(**said, tool_choice={"type": "any"}, extra_body=WILD)
    assert got.stop_reason == "tool_use"
    for block in got.content:
        if block.type == "tool_use":
            jsonschema_rs.validate(PLACE, block.input)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    tool: Any = {"type": "function", "name": "place", "parameters": PLACE, "strict": True}
    answer = client.responses.create(
        model="calls", input="Name a place.", tools=[tool], tool_choice="required", temperature=2
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls
    for call in calls:
        jsonschema_rs.validate(PLACE, json.loads(call.arguments))
    wrong = {"type": "function", "function": {"name": "nothing"}}
    refused = chat(url, SAID, tools=TOOLS, tool_choice=wrong)
    assert refused.status == 400 and "no such tool" in refused.json["error"]["message"]


def test_pydantic_models_are_parsed(url: str) -> None:
    """As the clients' helpers ask for them."""
    from typing import Literal

    from pydantic import BaseModel

    class Place(BaseModel, extra="forbid"):
        kind: Literal["river", "lake"]
        depth: Literal[1, 2, 3]

    said: Any = SAID
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    parsed = client.chat.completions.parse(model="calls", messages=said, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    answer = client.responses.parse(model="calls", input="Name a place.", text_format=Place)
    assert isinstance(answer.output_parsed, Place)
    local = ollama.Client(host=url).chat("calls", said, format=Place.model_json_schema())
    assert Place.model_validate_json(local.message.content or "")
