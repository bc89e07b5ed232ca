"""The shapes and switches of a model from a Hugging Face `config.json`.

Knows both spellings of rotary settings: `rope_theta` beside `rope_scaling` (transformers 4) and
`rope_parameters` (5). Left-out fields mean what transformers' own config class means by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig, RopeScaling
from chatkv.model.one_line import one_line
from chatkv.model.published.scheme import scheme_of

# Per architecture, transformers' defaults for fields that config.json may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "attention_bias": False},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def config_from_hf(fields: dict[str, Any], where: str) -> ModelConfig:
    """`fields` as in config.json; `where` (its path) begins each error.

    Raises ModelError for an unknown architecture, rotary scaling, activation or quantisation, and
    for a field that is missing or makes no sense.
    """
    try:
        config = _read(fields, where)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{where}: a field makes no sense: {one_line(error)}") from error
    if problem := config.problem():
        raise ModelError(f"{where}: {problem}")
    return config


def _read(fields: dict[str, Any], where: str) -> ModelConfig:
    architecture = _architecture(fields, where)
    scheme_of(fields, where)
    for name in _REQUIRED:
        if not isinstance(fields.get(name), int):
            raise ModelError(f"{where}: {name} is missing or no number")
    # null stands for "left out" in every one of these fields but sliding_window.
    present = {k: v for k, v in fields.items() if v is not None or k == "sliding_window"}
    get: Callable[..., Any] = (_DEFAULTS[architecture] | present).get
    if (activation := get("hidden_act", "silu")) != "silu":
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported (supported: silu)")

    num_heads = fields["num_attention_heads"]
    head_dim = get("head_dim") or fields["hidden_size"] // num_heads
    max_position = get("max_position_embeddings")
    rope_theta, rope_scaling = _rope(fields, where, max_position)
    sliding_window, window_from_layer = _window(architecture, get, where)
    attention_bias = bool(get("attention_bias")) and architecture in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=get("num_key_value_heads", num_heads),
        head_dim=head_dim,
        norm_eps=float(get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta,
        max_position=max_position,
        rope_scaling=rope_scaling,
        tie_embeddings=bool(get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(get("mlp_bias")) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        sliding_window=sliding_window,
        window_from_layer=window_from_layer,
    )


def _architecture(fields: dict[str, Any], where: str) -> str:
    name = fields.get("model_type")
    if name is None and fields.get("architectures"):
        name = str(fields["architectures"][0]).removesuffix("ForCausalLM").lower()
    if name not in _DEFAULTS:
        raise ModelError(
            f"{where}: architecture {name!r} is not supported (supported: {', '.join(_DEFAULTS)})"
        )
    return str(name)


def _window(architecture: str, get: Callable[..., Any], where: str) -> tuple[int | None, int]:
    """Sliding window in tokens and the first layer it holds for."""
    window = get("sliding_window")
    if architecture == "llama" or not window:
        return None, 0
    if architecture == "mistral":
        return int(window), 0
    if not get("use_sliding_window", False):
        return None, 0
    num_layers = get("num_hidden_layers")
    first = int(get("max_window_layers", 28))
    if kinds := get("layer_types"):
        first = kinds.index("sliding_attention") if "sliding_attention" in kinds else num_layers
        if any(kind != "sliding_attention" for kind in kinds[first:]) or len(kinds) != num_layers:
            raise ModelError(f"{where}: layer_types that alternate are not supported")
    # The same function has one config: a window that no layer uses is none.
    return (int(window), first) if first < num_layers else (None, 0)


def _rope(
    fields: dict[str, Any], where: str, max_position: int
) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, from either spelling."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{where}: rope_scaling should be an object")
    if "full_attention" in rope or "sliding_attention" in rope:
        raise ModelError(f"{where}: rotary settings that differ by layer are not supported")
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor {partial} is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            f"{where}: rope type {kind!r} is not supported (supported: linear, llama3, yarn)"
        )

    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{where}: {kind} rope scaling needs a number for {key!r}")
        return float(value)

    factor = number("factor")
    if kind == "linear":
        return theta, RopeScaling("linear", factor)
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor,
            original_max_position=int(number("original_max_position_embeddings")),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
        )
    return theta, RopeScaling(
        "yarn",
        factor,
        original_max_position=int(number("original_max_position_embeddings", max_position)),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: dict[str, Any], factor: float) -> float | None:
    """What cos and sin are multiplied by; None stands for the paper's 0.1 ln(factor) + 1."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not (mscale and mscale_all_dim) or factor <= 1:
        return None
    growth = 0.1 * math.log(factor)  # DeepSeek's variant: the ratio of two such factors
    return float((growth * mscale + 1) / (growth * mscale_all_dim + 1))
