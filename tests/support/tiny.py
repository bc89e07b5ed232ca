"""Random tiny checkpoints of every architecture that chatkv reads, in the layout of the hub.

    folder = make_checkpoint(tmp_path, "llama3")      config.json, model.safetensors,
                                                      tokenizer.json, tokenizer_config.json, ...

They are built through `transformers`' own classes, so `load_reference(folder)` is the oracle for
them. Every weight is drawn from one seed, biases and norms included: left at their usual zeros and
ones, a decoder that forgot them would still agree.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Literal

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
VOCAB_SIZE = 384  # 256 bytes, 3 special tokens, 125 merges

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

# name -> (model_type of transformers, what differs from _SHAPE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": (
        "llama",
        {  # an original context of 64 puts this head_dim into all three frequency bands
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm": (
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
        | {"rope_theta": 100000.0, "tie_word_embeddings": True},
    ),
    "bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "yarn": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": 24}),
    "qwen2": (  # like the real ones, more rows in the embedding than tokens in the tokenizer
        "qwen2",
        {"vocab_size": VOCAB_SIZE + 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-6},
    ),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_theta": 1000000.0}),
}


def make_checkpoint(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    sharded: bool = False,
    template_file: bool = False,
    **changes: Any,
) -> Path:
    """Write the checkpoint `name` of ARCHITECTURES into `folder` and return the folder.

    `sharded` splits the weights over several files with an index; `template_file` puts the chat
    template into chat_template.jinja instead of tokenizer_config.json; `changes` override fields
    of config.json. The same arguments write the same bytes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = ARCHITECTURES[name]
    tokenizer_ids = write_tokenizer(folder, template_file=template_file)
    special = {
        "bos_token_id": tokenizer_ids[END_OF_TEXT],
        "eos_token_id": tokenizer_ids[IM_END],
        "pad_token_id": tokenizer_ids[END_OF_TEXT],
    }
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **special, **fields, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(
        folder, max_shard_size="100KB" if sharded else "5GB"
    )
    return folder


def load_reference(folder: Path, dtype: str = "float32") -> Any:
    """The checkpoint as `transformers` runs it: eager attention, on the CPU, for inference."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def _draw_weights(model: Any, seed: int) -> None:
    """Fill every parameter in the order of its name, with variances that keep logits lively."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif "embed_tokens" in name:
                weight.copy_(0.5 * noise)
            else:
                weight.copy_(noise * weight.shape[1] ** -0.5)


def write_tokenizer(folder: Path, *, template_file: bool = False) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json; returns the ids of SPECIAL_TOKENS.

    Byte-level BPE as in GPT-2, its merges learnt from a fixed text, so that every string encodes
    and one character may need several tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    merges = _learn_merges(_TEXT, VOCAB_SIZE - 256 - len(SPECIAL_TOKENS))
    alphabet = sorted(_byte_alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    assert len(vocab) == VOCAB_SIZE
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[token], "content": token, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for token in SPECIAL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": [" ".join(pair) for pair in merges],
        },
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    if template_file:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    else:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return {token: vocab[token] for token in SPECIAL_TOKENS}


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """The first `count` BPE merges of `text`; ties go to the alphabetically first pair."""
    stand_in = _byte_alphabet()
    words = [[stand_in[byte] for byte in f" {word}".encode()] for word in text.split()]
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = [_merge(word, best) for word in words]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for part in word:
        if merged and (merged[-1], part) == pair:
            merged[-1] += part
        else:
            merged.append(part)
    return merged


_TEXT = """
the chat goes on where it was left the day before and the history is not read again
a block holds the keys and values of sixty four tokens and a session holds many blocks
the user asks a question and the assistant answers it with the words that it has learnt
system user assistant system user assistant the that this there then they these those with
keys values tokens blocks turns sessions models weights prompts answers questions histories
when the terminal is closed the conversation is on the disk and when it is opened it is there
"""
