"""Tokenizers rebuilt from GGUF metadata give the ids of those they were made from."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_spm
from chatkv.model.gguf_file import GGUFFile
from chatkv.model.gguf_tokenizer import _PATTERNS, tokenizer_from_gguf
from chatkv.model.prepared import PreparedModel
from chatkv.model.tokenizer import Tokenizer
from make_smollm2_tokens import FRAGMENTS, texts

GOLDEN = Path(__file__).parents[1] / "data" / "smollm2_tokens.json"


@functools.cache
def trained() -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """A SentencePiece model, and our tokenizer for it."""
    spm = sentencepiece.SentencePieceProcessor(model_proto=tiny_spm.train())
    return spm, _tokenizer(tiny_spm.gguf_metadata(spm))


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_from_gguf(GGUFFile(Path("model.gguf"), metadata, {})))


def test_smollm2_gives_the_ids_of_llama_cpp(smollm2: PreparedModel) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["made_by"].startswith("llama.cpp")
    assert len(golden["cases"]) >= 300
    tokenizer = Tokenizer.from_prepared(smollm2)
    for case in golden["cases"]:
        text = case["text"]
        assert tokenizer.encode(text) == case["plain"], text
        assert tokenizer.encode_rendered(text) == case["special"], text
        assert tokenizer.decode(case["plain"], skip_special=False) == text
        assert tokenizer.decode(case["special"], skip_special=False) == text


def test_the_golden_file_holds_what_its_script_asks_for() -> None:
    assert [case["text"] for case in json.loads(GOLDEN.read_text())["cases"]] == texts()


def test_sentencepiece_ids() -> None:
    spm, rebuilt = trained()
    for text in [*tiny_spm.TEXT.splitlines(), *texts()]:
        if "\x00" in text:  # sentencepiece's own API ends a text there
            continue
        assert rebuilt.encode(text) == spm.encode(text), text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS + list("aeinst ")), max_size=12).map("".join))
def test_sentencepiece_ids_of_any_text(text: str) -> None:
    spm, rebuilt = trained()
    if "\x00" not in text:
        assert rebuilt.encode(text) == spm.encode(text)


def test_sentencepiece_text_comes_back() -> None:
    _, rebuilt = trained()
    for text in texts():
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_control_tokens_typed_by_a_user_stay_text() -> None:
    _, rebuilt = trained()
    control = set(rebuilt.special_ids.values())
    assert set(rebuilt.special_ids) == {"<unk>", "<s>", "</s>"}
    for text in ("</s>", "a</s>b", "<s><s>", "[INST] </s><s> [/INST]", "<unk>"):
        assert control.isdisjoint(rebuilt.encode(text)), text
        assert rebuilt.decode(rebuilt.encode(text)) == text


def test_merges_make_no_control_token() -> None:
    """Here the halves of `</s>` are pieces too; joined they would outrank every other merge."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "<", "/", "s", ">", "</", "s>", "ss"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *(-float(i) for i in range(8))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 8,
    }
    backend = tokenizer_from_gguf(GGUFFile(Path("model.gguf"), metadata, {}))
    merges = json.loads(backend.to_str())["model"]["merges"]
    assert ["".join(merge) for merge in merges] == ["</", "s>", "ss"]


def test_no_space_prefix_where_the_file_says_so() -> None:
    spm, _ = trained()
    metadata = tiny_spm.gguf_metadata(spm) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = _tokenizer(metadata)
    ids = tokenizer.encode("the chat")
    assert not spm.id_to_piece(ids[0]).startswith("▁")
    assert tokenizer.decode(ids) == "the chat"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize("pre", _PATTERNS)
def test_every_byte_level_family_keeps_all_text(pre: str, smollm2: PreparedModel) -> None:
    model = json.loads(smollm2.tokenizer_path.read_text())["model"]
    vocab = model["vocab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
    }
    tokenizer = _tokenizer(metadata)
    for text in texts()[:200]:
        if pre != "qwen2" or text.isascii():  # Qwen composes characters, as its own tokenizer does
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 2024 x", ["it", "'s", " 2024", " x"]),
        ("smollm", "it's 2024 x", ["it", "'s", " ", "2", "0", "2", "4", " x"]),
        ("llama-bpe", "IT'S 2024!\n\n x", ["IT", "'S", " ", "202", "4", "!\n\n", " x"]),
        ("qwen2", "IT'S 2024!\n\n x", ["IT", "'S", " ", "2", "0", "2", "4", "!\n\n", " x"]),
        ("tekken", "helloWorld 12/", ["hello", "World", " ", "1", "2", "/"]),
        ("default", "a-b 12345", ["a", "-", "b", " ", "123", "45"]),
    ],
)
def test_what_each_family_splits_on(pre: str, text: str, pieces: list[str]) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
    }
    backend = tokenizer_from_gguf(GGUFFile(Path("model.gguf"), metadata, {}))
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == pieces
