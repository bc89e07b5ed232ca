"""Stateful responses, through OpenAI's client: what is new is sent, beside what it follows."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from chatkv.paths import folders
from chatkv_store.conversations import Conversations
from served import ask

LONG = "the history is not read again and the session holds many blocks " * 3


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)


def create(client: openai.OpenAI, name: str, said: Any, **more: Any) -> Any:
    wanted: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0} | more
    return client.responses.create(model=name, input=said, **wanted)


def texts(response_id: str) -> list[str]:
    """What was said up to a response."""
    from chatkv.server.named import name_digest

    with Conversations(folders().conversations) as store:
        turn = store.turn_of_messages(name_digest("response", response_id))
        path = []
        while turn is not None:
            path.insert(0, turn.user_text)
            turn = store.get_turn(turn.parent_id) if turn.parent_id else None
        return path


def test_a_response_follows_another(client: openai.OpenAI, name: str) -> None:
    first = create(client, name, LONG, instructions="Be brief.")
    assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"
    assert first.usage.output_tokens == 8 and first.output_text
    second = create(client, name, "And?", instructions="Be brief.", previous_response_id=first.id)
    assert second.timings["hit"] == "chain"
    details = second.usage.input_tokens_details
    assert details.cached_tokens > 0.7 * second.usage.input_tokens
    assert texts(second.id) == [LONG, "And?"]
    # Another branch of the same response, and then the first one again.
    other = create(client, name, "Or?", instructions="Be brief.", previous_response_id=first.id)
    third = create(client, name, "More", instructions="Be brief.", previous_response_id=second.id)
    assert texts(other.id) == [LONG, "Or?"] and texts(third.id) == [LONG, "And?", "More"]
    got = client.responses.retrieve(second.id)
    assert got.output_text == second.output_text


def test_a_response_is_deleted(client: openai.OpenAI, name: str) -> None:
    first = create(client, name, "Remember the heron.")
    second = create(client, name, "And the otter.", previous_response_id=first.id)
    # What another one follows loses its name, and its words stay for that one ...
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    third = create(client, name, "And?", previous_response_id=second.id)
    assert texts(third.id) == ["Remember the heron.", "And the otter.", "And?"]
    # ... and what nothing follows goes, up to the whole conversation.
    for response in (third, second):
        client.responses.delete(response.id)
    with Conversations(folders().conversations) as store:
        assert store.search("heron") and not store.search("otter")
    alone = create(client, name, "Remember the stork.")
    client.responses.delete(alone.id)
    with Conversations(folders().conversations) as store:
        assert not store.search("stork") and not store.list_sessions(search="stork")


def test_instructions_are_not_carried_over(client: openai.OpenAI, name: str) -> None:
    first = create(client, name, LONG, instructions="Be brief.")
    second = create(client, name, "And?", previous_response_id=first.id)
    assert second.timings["hit"] == "adopted"
    assert texts(second.id) == [LONG, "And?"]
    with Conversations(folders().conversations) as store:
        from chatkv.server.named import name_digest

        turn = store.turn_of_messages(name_digest("response", second.id))
        assert turn is not None and turn.parent_id is not None
        assert store.get_turn(turn.parent_id).system_text is None


def test_the_events_of_a_stream(client: openai.OpenAI, name: str) -> None:
    events = list(create(client, name, "hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    wanted = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert kinds == wanted
    assert events[0].response.id == events[-1].response.id
    assert "".join(deltas) == events[-1].response.output_text == events[-4].text
    after = create(client, name, "And?", previous_response_id=events[-1].response.id)
    assert after.timings["hit"] == "chain"


def test_what_is_not_stored_cannot_be_followed(client: openai.OpenAI, name: str) -> None:
    first = create(client, name, "A secret.", store=False)
    assert first.output_text and first.store is False
    with pytest.raises(openai.NotFoundError):
        create(client, name, "And?", previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with Conversations(folders().conversations) as store:
        assert not store.search("secret")


def test_a_conversation_that_the_client_names(client: openai.OpenAI, name: str) -> None:
    first = create(client, name, [{"role": "user", "content": LONG}], conversation="conv_1")
    second = create(client, name, "And?", conversation={"id": "conv_1"})
    assert texts(second.id) == [LONG, "And?"] and second.timings["hit"] == "chain"
    assert first.id != second.id
    with pytest.raises(openai.BadRequestError, match="not both"):
        create(client, name, "x", conversation="conv_1", previous_response_id=first.id)


def test_a_whole_conversation_as_items(client: openai.OpenAI, name: str) -> None:
    first = create(client, name, LONG)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": LONG}]},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "And?"},
    ]
    assert create(client, name, items).timings["hit"] == "chain"


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": 5},
        {"input": [{"type": "image_generation_call"}]},
        {"input": "x", "text": {"format": {"type": "json_schema"}}},
        {"input": "x", "max_output_tokens": 0},
    ],
)
def test_nonsense_is_one_line(url: str, body: Any) -> None:
    got = ask(url, "/v1/responses", body)
    assert got.status == 400 and "\n" not in got.json["error"]["message"]
