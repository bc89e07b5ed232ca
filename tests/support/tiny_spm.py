"""A SentencePiece model trained on a page of text, and the GGUF metadata that describes it."""

from __future__ import annotations

import io
from typing import Any

import sentencepiece

TEXT = """\
The chat goes on where it was left the day before, and the history is not read again.
A block holds the keys and values of 64 tokens; a session holds many blocks (and 3 turns).
Der Nutzer fragt, und die Antwort kommt: schön, größer, Straße. L'été à la plage, où ça?
def add(a, b):\n    return a + b\n
今日は良い天気です。你好，世界。 Привет, мир! 😀
[INST] [/INST] <s> </s> <<SYS>> <</SYS>> user assistant system </ s>
"""


def train() -> bytes:
    """Train with Llama's settings (BPE, bytes for the rest, text as it is); the model's file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=560,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def gguf_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    """The tokenizer keys that llama.cpp's converter writes for `model`."""
    ids = range(model.get_piece_size())

    def kind(id: int) -> int:
        if model.is_unknown(id):
            return 2
        if model.is_control(id):
            return 3
        return 6 if model.is_byte(id) else 1

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [model.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [kind(id) for id in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
