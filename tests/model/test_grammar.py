"""Answers of a form: whatever a model would say, what comes out is what the grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from chatkv.engine.options import SamplingOptions
from chatkv.engine.sampling import Sampler
from chatkv.errors import UsageError
from chatkv.model.grammar import GrammarState
from chatkv.model.tokenizer import Tokenizer
from chatkv.server.form import Calls, Form
from tiny_tokenizers import byte_level, sentencepiece_style

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "is": {"enum": ["a", "ü"]},
    },
    "required": ["x", "is"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    POINT,
    {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]{2}-[0-9]{3}$"},
    {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}},
]


def spm(prefix: str) -> Tokenizer:
    tokenizer = sentencepiece_style(prefix)
    tokenizer.stop_ids = frozenset({tokenizer.special_ids["</s>"]})
    return tokenizer


TOKENIZERS = {"bytes": byte_level, "spm": lambda: spm("first"), "spm-never": lambda: spm("never")}


def babble(tokenizer: Tokenizer, grammar: str, seed: int, temperature: float = 5.0) -> str:
    """What a model says that knows nothing, under a grammar."""
    return tokenizer.decode(babbled(tokenizer, GrammarState(tokenizer, grammar), seed, temperature))


def babbled(
    tokenizer: Tokenizer, state: GrammarState, seed: int, temperature: float, most: int = 3000
) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    sampler = Sampler(SamplingOptions(temperature, 1.0, 0, 0.0), seed, grammar=state)
    ids: list[int] = []
    for _ in range(most):
        # More logits than tokens, as models have that are padded.
        logits = torch.randn(tokenizer.num_ids + 7, generator=draw)
        ids.append(sampler.pick(logits))
        if ids[-1] in tokenizer.stop_ids:
            return ids[:-1]
    raise AssertionError(f"no end: {tokenizer.decode(ids)!r}")


@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "array", "pattern", "ref"])
@pytest.mark.parametrize("make", TOKENIZERS)
def test_what_is_said_follows_the_schema(make: str, schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema_rs")
    grammar = Form(schema).grammar(is_thinking=False)
    assert grammar is not None
    said = {babble(TOKENIZERS[make](), grammar, seed, seed % 2 * 5.0) for seed in range(6)}
    for text in said:
        jsonschema.validate(schema, json.loads(text))
    assert len(said) > 1


def test_a_state_is_built_again_from_ids() -> None:
    tokenizer = byte_level()
    grammar = Form(SCHEMAS[1]).grammar(is_thinking=False)
    assert grammar is not None
    whole = babbled(tokenizer, GrammarState(tokenizer, grammar), 3, 1.0)
    logits = torch.zeros(tokenizer.num_ids)
    walking = GrammarState(tokenizer, grammar)
    for count, id in enumerate(whole):
        again = GrammarState(tokenizer, grammar, whole[:count])
        assert torch.equal(again.masked(logits), walking.masked(logits))
        assert walking.masked(logits)[id] == 0
        walking.accept(id)
    with pytest.raises(UsageError, match="cannot have the form"):
        GrammarState(tokenizer, grammar, tokenizer.encode("Well, "))


def test_thoughts_come_first_where_they_were_opened() -> None:
    tokenizer = byte_level()
    grammar = Form(POINT).grammar(is_thinking=True)
    assert grammar is not None
    told = tokenizer.encode('Hm, "{". </think>\n\n')
    json.loads(tokenizer.decode(babbled(tokenizer, GrammarState(tokenizer, grammar, told), 1, 1.0)))


@pytest.mark.parametrize("is_one", [True, False])
def test_calls_have_their_exact_form(is_one: bool) -> None:
    from chatkv.server.parts import said_in

    tokenizer = byte_level()
    calls = Calls(
        (("plot", POINT), ('say "ü"', {"type": "object", "maxProperties": 0})), True, is_one
    )
    grammar = Form(calls=calls).grammar(is_thinking=False)
    assert grammar is not None
    said = [said_in(babble(tokenizer, grammar, seed), has_tools=True) for seed in range(8)]
    assert {one.content.strip() for one in said} == {""}
    assert {call["function"]["name"] for one in said for call in one.calls} == {"plot", 'say "ü"'}
    assert all(json.loads(c["function"]["arguments"]) is not None for s in said for c in s.calls)
    assert is_one == all(len(one.calls) == 1 for one in said)


def test_strict_calls_leave_words_alone() -> None:
    tokenizer = byte_level()
    grammar = Form(calls=Calls((("plot", POINT),))).grammar(is_thinking=False)
    assert grammar is not None
    logits = torch.zeros(tokenizer.num_ids)
    words = GrammarState(tokenizer, grammar, tokenizer.encode("I say {nothing}. "))
    assert (words.masked(logits) == 0).sum() > 100
    called = GrammarState(tokenizer, grammar, tokenizer.encode("So: <tool_call>"))
    allowed = (called.masked(logits) == 0).nonzero().flatten().tolist()
    assert {tokenizer.bytes_of(id)[:1] for id in allowed} == {b"\n"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "banana"},
        {"$ref": "https://example.com/schema"},
        {"type": "string", "pattern": "("},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, Any]) -> None:
    grammar = Form(schema).grammar(is_thinking=False)
    assert grammar is not None
    with pytest.raises(UsageError, match="cannot have the form") as refused:
        GrammarState(byte_level(), grammar)
    assert "\n" not in str(refused.value)


def test_sizes_are_bounded_and_an_end_is_needed() -> None:
    with pytest.raises(UsageError, match="256 KiB"):
        Form({"enum": ["x" * 300_000]}).grammar(is_thinking=False)
    endless = sentencepiece_style("always")
    assert not endless.stop_ids
    with pytest.raises(UsageError, match="no token that ends"):
        GrammarState(endless, "start: /x/")


def test_the_smallest_temperature_is_greedy() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for min_p in (0.0, 0.05):
        sampler = Sampler(SamplingOptions(5e-324, 1.0, 0, min_p), seed=1)
        assert sampler.pick(logits) == int(logits.argmax())
