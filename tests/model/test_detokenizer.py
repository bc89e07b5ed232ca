"""Text token by token: whole characters, and in the end the text of all ids at once."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv.errors import ModelError
from chatkv.model.prepared import PreparedModel
from chatkv.model.tokenizer import Tokenizer
from make_smollm2_tokens import FRAGMENTS
from tiny_tokenizers import byte_level, every_tokenizer, sentencepiece_style

TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@pytest.mark.parametrize("make", every_tokenizer())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_add_up(make: Any, data: Any) -> None:
    """Over any ids at all: most spell no valid UTF-8, some are outside the vocabulary."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, 600), max_size=60))
    for skip_special in (True, False):
        stream = tokenizer.stream(skip_special)
        pieces = [stream.push(id) for id in ids] + [stream.flush()]
        assert "".join(pieces) == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize("make", every_tokenizer())
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_no_half_characters(make: Any, text: str) -> None:
    """Every piece is the next piece of the text itself, never a stand-in taken back later."""
    tokenizer = make()
    stream, said = tokenizer.stream(skip_special=False), ""
    expected = text
    if tokenizer in (sentencepiece_style("first"), sentencepiece_style("always")):
        expected = text.removeprefix(" ")  # these give text with and without it the same ids
    elif tokenizer is byte_level(True) and not text.startswith(" ") and text:
        expected = " " + text  # GPT-2's own prefix is part of the text, as in its decoder
    for id in tokenizer.encode(text):
        said += stream.push(id)
        assert expected.startswith(said)
    assert said + stream.flush() == expected


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_bytes_decode_as_in_the_library(data: Any) -> None:
    """For byte-level tokenizers, invalid bytes included; SentencePiece's differ on purpose."""
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, 383), max_size=40))
    for skip in (True, False):
        expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip) == expected


@settings(max_examples=80, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_sentencepiece_decodes_as_in_the_library(text: str) -> None:
    tokenizer = sentencepiece_style("legacy")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids) == text


def test_invalid_bytes_are_replaced_one_by_one() -> None:
    """As sentencepiece does it: what is valid beside them stays."""
    tokenizer = sentencepiece_style("never")
    byte = {b: tokenizer._backend.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    euro = [byte[b] for b in "€".encode()]
    assert tokenizer.decode([*euro, byte[0xFF], *euro]) == "€\ufffd€"
    stream = tokenizer.stream()
    assert [stream.push(id) for id in [*euro[:2], *euro]] == ["", "", "\ufffd", "", "€"]
    stream = tokenizer.stream()
    assert [stream.push(id) for id in euro[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_emoji_waits_for_its_last_token(smollm2: PreparedModel) -> None:
    tokenizer = Tokenizer.from_prepared(smollm2)
    stream = tokenizer.stream()
    pieces = [stream.push(id) for id in tokenizer.encode("a 🤖!")]
    assert len(pieces) > 3 and "" in pieces
    assert [piece for piece in pieces if piece] == ["a", " ", "🤖", "!"]


def test_special_tokens_are_skipped_or_spelled(smollm2: PreparedModel) -> None:
    tokenizer = Tokenizer.from_prepared(smollm2)
    ids = [*tokenizer.encode("Hi"), 2]
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(ids, skip_special=False) == "Hi<|im_end|>"


def test_an_unknown_decoder_is_named() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(backend).decode([0])
