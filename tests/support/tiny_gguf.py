"""Tiny GGUF files made from the checkpoints of `tiny`, as llama.cpp's converter would make them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    checkpoint: Path,
    *,
    quantised: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    packed: Mapping[str, tuple[str, np.ndarray[Any, Any]]] | None = None,
) -> Path:
    """Write the tiny checkpoint as `path`; matrices as `quantised` ("Q8_0", ...), else as F32.

    `metadata` adds or replaces values, `without` leaves out values and tensors by name, `tensors`
    adds or replaces tensors by GGUF name, `packed` those that are bytes of a type.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    values = _shape_metadata(config, arch) | _tokenizer_metadata(checkpoint, config)
    values |= dict(metadata or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        if key not in without:
            _add(writer, key, value)
    packed = packed or {}
    for name, (kind_name, rows) in packed.items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[kind_name])
    for name, tensor in (_gguf_tensors(checkpoint, config, arch) | dict(tensors or {})).items():
        if name in without or name in packed:
            continue
        if quantised is not None and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantised]
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _shape_metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": config["rope_theta"],
    }
    if config["model_type"] == "mistral":
        values["attention.sliding_window"] = config["sliding_window"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = scaling["rope_type"]
        values["rope.scaling.factor"] = scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        original = scaling["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    return {f"{arch}.{key}": value for key, value in values.items()}


def _tokenizer_metadata(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    control = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": tokenizer["model"]["merges"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": settings["chat_template"],
    }


def _gguf_tensors(
    checkpoint: Path, config: dict[str, Any], arch: str
) -> dict[str, np.ndarray[Any, Any]]:
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
            tensor = permute(tensor, config[key])
        tensors[f"{prefix}{_NAMES[stem]}.{suffix}"] = tensor
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(config)
    return tensors


def permute(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's row order, from its definition: row i of a head's first half goes to 2i, row i of
    its second half to 2i + 1."""
    head_dim = rows.shape[0] // num_heads
    permuted = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            start = head * head_dim
            permuted[start + 2 * i] = rows[start + i]
            permuted[start + 2 * i + 1] = rows[start + head_dim // 2 + i]
    return permuted


def llama3_divisors(config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What Llama 3's scaling divides each frequency by, from transformers' own two frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = LlamaConfig(**config)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    exponents = np.arange(0, hf.head_dim, 2) / hf.head_dim
    plain = np.array([math.pow(hf.rope_theta, -exponent) for exponent in exponents])
    return (plain / scaled.numpy()).astype(np.float32)
