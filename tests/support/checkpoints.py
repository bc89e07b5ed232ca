"""A Hugging Face checkpoint made of a GGUF by this project's own reading of it, for programs that
read no GGUF."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from chatkv.model.catalog import find_model
from chatkv.model.config import ModelConfig
from chatkv.model.prepared import Dtype, prepare

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def checkpoint_of(gguf: Path, folder: Path, dtype: Dtype = "bfloat16") -> Path:
    """Write the model in `gguf` to `folder` as config.json, model.safetensors and a tokenizer."""
    prepared = prepare(find_model(str(gguf), folder), dtype, folder / "prepared")
    (weights,) = prepared.weights
    shutil.move(weights, folder / "model.safetensors")
    shutil.copy(prepared.tokenizer_path, folder / "tokenizer.json")
    special = {name: prepared.special_tokens[name] for name in prepared.special_tokens}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if prepared.template:
        settings["chat_template"] = prepared.template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    fields = _fields(prepared.config, dtype, prepared.eos_ids)
    (folder / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    shutil.rmtree(folder / "prepared")
    return folder


def _fields(config: ModelConfig, dtype: str, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    assert config.rope_scaling is None, "no model that tests use has one"
    return {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "eos_token_id": list(eos_ids),
        "torch_dtype": dtype,
    }
