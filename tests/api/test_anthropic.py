"""Anthropic's dialect, through its official client and as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from served import ask, user

if TYPE_CHECKING:  # it takes seconds to import, which only who runs these tests has to wait for
    import anthropic

LONG = "the history is not read again and the session holds many blocks " * 3


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=60)


def create(client: anthropic.Anthropic, name: str, messages: Any, **more: Any) -> Any:
    wanted: dict[str, Any] = {"max_tokens": 8, "extra_body": {"temperature": 0}} | more
    return client.messages.create(model=name, messages=messages, **wanted)


def test_whole_and_streamed_say_the_same(client: anthropic.Anthropic, name: str) -> None:
    said = [user(f"{LONG} hello there")]  # a block at least, which is found in memory
    whole = create(client, name, said)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
    with client.messages.stream(
        model=name, messages=said, max_tokens=8, extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == "max_tokens"
    usage = final.usage
    assert usage.cache_read_input_tokens and usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == whole.usage.input_tokens


def test_the_events_of_a_stream(url: str, name: str) -> None:
    body = {"model": name, "messages": [user("x")], "max_tokens": 4, "stream": True}
    got = ask(url, "/v1/messages", body)
    kinds = [event["type"] for event in got.events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert got.events[0]["message"]["usage"]["input_tokens"] > 0


def test_a_billing_line_that_changes_is_left_out(client: anthropic.Anthropic, name: str) -> None:
    def system(number: int) -> list[dict[str, Any]]:
        first = f"x-anthropic-billing-header: cc_version=1; cch={number};"
        return [{"type": "text", "text": first}, {"type": "text", "text": "Be brief."}]

    first = create(client, name, [user(LONG)], system=system(1))
    text = first.content[0].text
    messages = [user(LONG), {"role": "assistant", "content": text}, user("And?")]
    second = create(client, name, messages, system=system(2))
    assert second.timings["hit"] == "chain"
    usage = second.usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens > 0.7 * total


def test_blocks_and_thoughts_are_read(client: anthropic.Anthropic, name: str) -> None:
    first = create(client, name, [{"role": "user", "content": [{"type": "text", "text": LONG}]}])
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        *(block.model_dump() for block in first.content),
    ]
    messages = [user(LONG), {"role": "assistant", "content": blocks}, user("And?")]
    metadata = {"user_id": "user_1_account__session_11111111-2222"}
    assert create(client, name, messages, metadata=metadata).timings["hit"] == "chain"


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic, name: str) -> None:
    messages: Any = [user("How long is this?")]
    counted = client.messages.count_tokens(model=name, messages=messages, system="Be brief.")
    used = create(client, name, messages, system="Be brief.").usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_errors(client: anthropic.Anthropic, url: str, name: str) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="there is no model"):
        create(client, "nobody", [user("x")])
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError, match="context ends at"):
            create(client, name, [user("word " * 2000)], stream=stream)
    for wrong in (
        {"messages": [user("x")]},
        {"messages": [], "max_tokens": 5},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
        {"messages": [{"role": "wizard", "content": "x"}], "max_tokens": 5},
        {"messages": [user("x")], "max_tokens": 5, "tools": [{"name": 5}]},
    ):
        got = ask(url, "/v1/messages", {"model": name} | wrong)
        assert (got.status, got.json["type"]) == (400, "error")
        assert got.json["error"]["type"] == "invalid_request_error"
