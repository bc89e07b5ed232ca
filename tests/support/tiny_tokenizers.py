"""Tokenizers of every kind, tiny, each differing in how it marks the beginning of a text."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

import tiny
import tiny_spm
from chatkv.model.gguf_file import GGUFFile
from chatkv.model.gguf_tokenizer import tokenizer_from_gguf
from chatkv.model.tokenizer import Tokenizer

# Four ways to mark the beginning of a text: in none of these may they leak into its middle.
PREFIXES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "legacy": (
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        None,
    ),
    **{
        scheme: (
            None,
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        )
        for scheme in ("first", "always", "never")
    },
}


@functools.cache
def sentencepiece_style(prefix: str) -> Tokenizer:
    """A SentencePiece tokenizer that marks the beginning of a text in one of these ways."""
    spm = sentencepiece.SentencePieceProcessor(model_proto=tiny_spm.train())
    backend = tokenizer_from_gguf(GGUFFile(Path("model.gguf"), tiny_spm.gguf_metadata(spm), {}))
    whole = json.loads(backend.to_str())
    whole["normalizer"], whole["pre_tokenizer"] = PREFIXES[prefix]
    if prefix == "never":
        del whole["decoder"]["decoders"][-1]  # strips the space that the others put first
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(whole)))


@functools.cache
def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_tokenizer(Path(folder))
        whole = json.loads((Path(folder) / "tokenizer.json").read_text())
    whole["pre_tokenizer"]["add_prefix_space"] = add_prefix_space
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(whole)))


def every_tokenizer() -> list[Any]:
    kinds = {f"spm-{prefix}": functools.partial(sentencepiece_style, prefix) for prefix in PREFIXES}
    kinds |= {"bytes": byte_level, "bytes-prefix": functools.partial(byte_level, True)}
    return [pytest.param(make, id=name) for name, make in kinds.items()]


def without_doubtful_spaces(tokenizer: Tokenizer, text: str) -> str:
    """`text` less what the tokenizer itself does not tell apart.

    Those that put a space after every special token unless one is there give "x" and " x" the same
    ids; all others are held to every character.
    """
    if tokenizer not in (sentencepiece_style("always"), byte_level(True)):
        return text
    names = "|".join(re.escape(name) for name in tokenizer.special_ids)
    return re.sub(rf"^ |({names}) ?", r"\1", text)


def one_go(tokenizer: Tokenizer, text: str) -> list[int]:
    """What the library itself makes of `text`, special tokens recognised everywhere."""
    ids: list[int] = tokenizer._backend.encode(text, add_special_tokens=False).ids
    return ids


def control_pair(tokenizer: Tokenizer) -> tuple[str, str]:
    """A token that opens and one that closes, as special tokens of `tokenizer`."""
    names = tokenizer.special_ids
    return ("<s>", "</s>") if "<s>" in names else ("<|im_start|>", "<|im_end|>")
