"""The checkpoints that the model's tests stand on are what they claim to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    first = _bytes(tiny.make_checkpoint(tmp_path / "a", "llama3", sharded=True))
    second = _bytes(tiny.make_checkpoint(tmp_path / "b", "llama3", sharded=True))
    other = _bytes(tiny.make_checkpoint(tmp_path / "c", "llama3", sharded=True, seed=1))
    assert first == second
    assert first.keys() == other.keys() and first != other
    assert sum(name.endswith(".safetensors") for name in first) > 1


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_transformers_finds_every_weight_in_its_place(
    name: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(name), output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.randint(0, tiny.VOCAB_SIZE, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(ids).logits[0]
    # Lively enough for greedy decoding to be a test: neither flat nor stuck on one token.
    assert logits.std() > 0.5
    assert logits.argmax(-1).unique().numel() > 10


def test_tokenizer_reads_back_any_text(tiny_checkpoint: Callable[..., Path]) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    folder = tiny_checkpoint("smollm", template_file=True)
    text = "the chat  of\tthe day\n🙂 漢字 é ½"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) and max(ids) >= 256 + len(tiny.SPECIAL_TOKENS)
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
