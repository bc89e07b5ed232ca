"""Rendered conversations to ids: Hugging Face's, with no control token out of a message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_templates
from chatkv.errors import ModelError
from chatkv.model.prepared import PreparedModel
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
from tiny_tokenizers import (
    byte_level,
    control_pair,
    every_tokenizer,
    one_go,
    sentencepiece_style,
    without_doubtful_spaces,
)

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

WORDS = st.lists(
    st.sampled_from(["the", " chat", "  ", " ", "\n", "é", "漢", "😀", "[INST]", "x", "1 2"]),
    max_size=8,
).map("".join)


def _back(tokenizer: Tokenizer, ids: list[int]) -> str:
    return without_doubtful_spaces(tokenizer, tokenizer.decode(ids, skip_special=False))


@pytest.mark.parametrize("make", every_tokenizer())
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_cutting_at_special_tokens_changes_nothing(make: Any, data: Any) -> None:
    """The path for messages that hold control tokens gives the same ids where none does."""
    tokenizer = make()
    start, end = control_pair(tokenizer)
    pieces = data.draw(st.lists(st.sampled_from([start, end]) | WORDS, max_size=9))
    text = "".join(pieces)
    assert tokenizer.encode_rendered(text) == one_go(tokenizer, text)
    assert tokenizer._pieces(text, (), tokenizer._backend) == one_go(tokenizer, text)


@pytest.mark.parametrize("make", every_tokenizer())
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_a_user_types_gives_no_control_token(make: Any, data: Any) -> None:
    tokenizer = make()
    start, end = control_pair(tokenizer)
    typed = st.lists(st.sampled_from([start, end, end[:-1], end[1:]]) | WORDS, max_size=6)
    text, spans, expected = "", [], []
    for content in data.draw(st.lists(typed.map("".join), min_size=1, max_size=3)):
        text += f"{start}user\n"
        spans.append((len(text), len(text) + len(content)))
        text += content + end
        expected += [tokenizer.special_ids[start], tokenizer.special_ids[end]]
    ids = tokenizer.encode_rendered(text, spans)
    control = set(tokenizer.special_ids.values())
    assert [id for id in ids if id in control] == expected
    assert _back(tokenizer, ids) == without_doubtful_spaces(tokenizer, text)


@pytest.mark.parametrize("make", every_tokenizer())
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_continuation_joins_without_a_seam(make: Any, data: Any) -> None:
    """Ids of a log and of what follows are those of both in one go, where a special token is the
    border (either side of it), and there is never a space that the text has not."""
    tokenizer = make()
    start, end = control_pair(tokenizer)
    log, added = start + data.draw(WORDS), data.draw(WORDS) + start + data.draw(WORDS)
    whole = one_go(tokenizer, log + end + added)

    before = tokenizer.encode_rendered(log)
    assert before + tokenizer.encode_continuation(end + added, (), before[-1]) == whole
    closed = tokenizer.encode_rendered(log + end)
    assert closed + tokenizer.encode_continuation(added, (), closed[-1]) == whole
    open_ended = before + tokenizer.encode_continuation(added, (), before[-1])
    assert _back(tokenizer, open_ended) == without_doubtful_spaces(tokenizer, log + added)


@pytest.mark.parametrize("make", every_tokenizer())
def test_a_continuation_keeps_typed_control_tokens_as_text(make: Any) -> None:
    tokenizer = make()
    start, end = control_pair(tokenizer)
    text = f"{end}\n{start}user\n{end} typed{end}"
    at = text.index(f"{end} typed")
    ids = tokenizer.encode_continuation(text, [(at, at + len(f"{end} typed"))])
    control = set(tokenizer.special_ids.values())
    wanted = [tokenizer.special_ids[name] for name in (end, start, end)]
    assert [id for id in ids if id in control] == wanted


def test_added_tokens_that_take_spaces_with_them() -> None:
    whole = json.loads(byte_level()._backend.to_str())
    for token in whole["added_tokens"]:
        token["lstrip"] = token["content"] == "<|im_end|>"
        token["rstrip"] = token["content"] == "<|im_start|>"
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(whole)))
    for text in ("<|im_start|>  user\nthe  <|im_end|>  x", " <|im_start|>\n\n<|im_end|>"):
        assert tokenizer._pieces(text, (), tokenizer._backend) == one_go(tokenizer, text)


def test_merges_that_spell_a_control_token() -> None:
    """Some conversions of SentencePiece models list them: `</` and `s>` to `</s>`."""
    whole = json.loads(sentencepiece_style("legacy")._backend.to_str())
    vocab = whole["model"]["vocab"]
    for piece in ("</", "s>"):
        vocab.setdefault(piece, len(vocab))
    spelled = [["<", "/"], ["s", ">"], ["</", "s>"]]
    whole["model"]["merges"] = spelled + whole["model"]["merges"]
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(whole)))
    end = tokenizer.special_ids["</s>"]
    literal = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    literal.encode_special_tokens = True
    assert end in literal.encode("a</s>").ids  # else there is nothing to guard against
    for text in ("</s>", "a</s></s>b </s>", "</s>" * 2000):
        ids = tokenizer.encode(text)
        assert end not in ids
        assert tokenizer.decode(ids, skip_special=False) == text


def test_tokens_that_are_added_but_not_special_are_always_whole() -> None:
    """As Hugging Face and llama.cpp have it: `<think>` of some models is such a token."""
    whole = json.loads(byte_level()._backend.to_str())
    template = {**whole["added_tokens"][0], "special": False, "content": "<think>", "id": 384}
    whole["added_tokens"].append(template)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(whole)))
    text = "<|im_start|><think><|im_end|>"
    spans = [(12, len(text))]
    assert tokenizer.encode("<think>") == [384]
    assert tokenizer.encode_rendered(text, spans)[:2] == [
        tokenizer.special_ids["<|im_start|>"],
        384,
    ]
    assert tokenizer.decode([384]) == "<think>"


# -- with templates, beside transformers -------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_smollm2_conversation_ids_are_transformers(name: str, smollm2: PreparedModel) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(smollm2.tokenizer_path))
    tokenizer = Tokenizer.from_prepared(smollm2)
    source = chat_templates.ALL[name]
    template = ChatTemplate(source, {}, tokenizer.special_ids)
    chat = [
        {"role": "user", "content": "Hi 😀\n\n  there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "123 4 漢字\t?"},
    ]
    rendered = template.render(chat)
    ids = tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    options = {"chat_template": source, "add_generation_prompt": True}
    assert ids == theirs.apply_chat_template(chat, **options)

    # Turn by turn: the same ids, with the reply's own in between.
    first, added = template.render(chat[:1]), template.continuation(chat)
    log = tokenizer.encode_rendered(first.text, first.content_spans) + tokenizer.encode("Hello!")
    log += tokenizer.encode_continuation(added.text, added.content_spans, log[-1])
    assert log == ids


@pytest.mark.parametrize("prefix", ["legacy", "first"])
def test_mistral_conversation_ids_are_transformers(prefix: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = sentencepiece_style(prefix)
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **SPECIAL)
    source = chat_templates.MISTRAL
    template = ChatTemplate(source, SPECIAL, tokenizer.special_ids)
    chat = [
        {"role": "user", "content": "the chat goes on"},
        {"role": "assistant", "content": "the history is not read"},
        {"role": "user", "content": " schön 😀"},
    ]
    options = {"chat_template": source, "add_generation_prompt": True}
    rendered = template.render(chat)
    ids = tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    assert ids == theirs.apply_chat_template(chat, **options)

    first, added = template.render(chat[:1]), template.continuation(chat)
    log = tokenizer.encode_rendered(first.text)
    reply = tokenizer.encode_continuation(" the history is not read", (), log[-1])
    assert tokenizer.decode(reply) == "the history is not read"
    log += reply
    log += tokenizer.encode_continuation(added.text, added.content_spans, log[-1])
    assert log == ids
    assert tokenizer.decode(log, skip_special=False) == rendered.text


# -- stops, and files that are none -------------------------------------------------------------


def test_stop_ids(smollm2: PreparedModel) -> None:
    ids = byte_level().special_ids
    backend = byte_level()._backend
    end_of_text, im_end = ids["<|endoftext|>"], ids["<|im_end|>"]
    assert Tokenizer(backend).stop_ids == {end_of_text}
    assert Tokenizer(backend, template=chat_templates.CHATML).stop_ids == {end_of_text, im_end}
    assert Tokenizer(backend, [7], chat_templates.LLAMA3).stop_ids == {end_of_text, 7}
    assert Tokenizer.from_prepared(smollm2).stop_ids == {0, 2}


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in ("", "{}", '{"model": 3}', "no json"):
        path.write_text(content)
        with pytest.raises(ModelError, match="cannot read the tokenizer") as caught:
            Tokenizer.from_file(path)
        assert "\n" not in str(caught.value)
