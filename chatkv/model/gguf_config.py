"""The shapes and switches of a model from a GGUF file's metadata.

Key names follow the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md): each is prefixed
with the architecture, `llama.block_count` and so on. Mistral files call themselves "llama".
"""

from __future__ import annotations

import math
from typing import Any

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig, RopeScaling
from chatkv.model.gguf_file import GGUFFile
from chatkv.model.one_line import one_line

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Llama 3.1 and 3.2 differ in `factor` alone; a GGUF keeps only the resulting divisors, as a tensor.
_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises ModelError for what is not supported, is missing or makes no sense."""
    try:
        config = _read(file)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{file.path}: its metadata makes no sense: {one_line(error)}") from error
    if problem := config.problem():
        raise ModelError(f"{file.path}: {problem}")
    return config


def _read(file: GGUFFile) -> ModelConfig:
    architecture = str(file.require("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported "
            f"(supported: {', '.join(ARCHITECTURES)})"
        )

    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    def number(key: str) -> int:
        found = file.require(f"{architecture}.{key}")
        if not isinstance(found, int):  # a list: a different count for each layer
            raise ModelError(f"{file.path}: {architecture}.{key} is {found!r}, a number is needed")
        return found

    if value("expert_count"):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported")

    num_heads = number("attention.head_count")
    hidden_size = number("embedding_length")
    head_dim = int(value("attention.key_length", hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {architecture}.{key} is {value(key)}, "
                f"only the head size ({head_dim}) is supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor 'token_embd.weight'")
    rope_theta = _decimal(value("rope.freq_base", 10000.0))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(embedding.shape[1]),  # GGUF lists the innermost dimension first
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=int(value("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        norm_eps=_decimal(file.require(f"{architecture}.attention.layer_norm_rms_epsilon")),
        rope_theta=rope_theta,
        max_position=number("context_length"),
        rope_scaling=_rope_scaling(file, architecture, head_dim, rope_theta),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        # Other architectures carry the key even where the window is off; llama.cpp ignores it.
        sliding_window=_window(file) if architecture == "llama" else None,
    )


def _window(file: GGUFFile) -> int | None:
    """Mistral's sliding window in tokens."""
    return int(file.metadata.get("llama.attention.sliding_window", 0)) or None


def _rope_scaling(
    file: GGUFFile, architecture: str, head_dim: int, rope_theta: float
) -> RopeScaling | None:
    def value(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.rope.{key}", default)

    kind = value("scaling.type", "none")
    factor = _decimal(value("scaling.factor", value("scale_linear", 1.0)))
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise ModelError(
                f"{file.path}: rope_freqs.weight beside {kind!r} scaling is not supported"
            )
        return _llama3_scaling(file, head_dim, rope_theta)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind in ("none", "linear"):
        return RopeScaling("linear", factor)
    if kind == "yarn":
        for key, usual in {"yarn_log_multiplier": 0.0, "yarn_ext_factor": 1.0}.items():
            if value(f"scaling.{key}", usual) != usual:
                raise ModelError(f"{file.path}: rope.scaling.{key} is not supported")
        attn_factor = value("scaling.attn_factor", value("scaling.yarn_attn_factor"))
        # llama.cpp scales cos and sin by attn_factor times the paper's own 1 + 0.1 ln(factor).
        default = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return RopeScaling(
            "yarn",
            factor,
            original_max_position=int(
                file.require(f"{architecture}.rope.scaling.original_context_length")
            ),
            beta_fast=_decimal(value("scaling.yarn_beta_fast", 32.0)),
            beta_slow=_decimal(value("scaling.yarn_beta_slow", 1.0)),
            attention_factor=None if attn_factor is None else _decimal(attn_factor) * default,
        )
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported")


def _llama3_scaling(file: GGUFFile, head_dim: int, rope_theta: float) -> RopeScaling:
    """Llama 3's scaling, recognised by the divisors in `rope_freqs.weight` ([head_dim / 2]).

    The largest divisor is the factor; the bands are those of every Llama 3 release. Divisors that
    this does not reproduce belong to another scheme, and guessing would bend every position.
    """
    found = [float(divisor) for divisor in file.tensors["rope_freqs.weight"].data]
    factor = max(found, default=1.0)
    scaling = RopeScaling("llama3", factor, **_LLAMA3_BANDS)  # type: ignore[arg-type]
    wanted = llama3_divisors(scaling, head_dim, rope_theta)
    if len(found) != len(wanted) or any(
        not math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, wanted, strict=True)
    ):
        raise ModelError(f"{file.path}: rope_freqs.weight is not Llama 3's rotary scaling")
    return scaling


def llama3_divisors(scaling: RopeScaling, head_dim: int, rope_theta: float) -> list[float]:
    """What Llama 3.1's scheme divides each rotary frequency by, head_dim / 2 numbers.

    Frequencies whose wavelength fits `high_freq_factor` times into the original context keep
    theirs, those longer than it / `low_freq_factor` are stretched by `factor`, and between the two
    the frequency itself is interpolated.
    """
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope_theta ** (index / head_dim)
        turns = scaling.original_max_position / wavelength
        smooth = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = min(max(smooth, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return divisors


def _decimal(value: float) -> float:
    """The number a float32 was written as: 9.999999747378752e-06 is 1e-05.

    The same model then has the same config, and so the same digest, from a GGUF as from its
    checkpoint; in the float32 that the decoder computes with, nothing changes.
    """
    import numpy

    return float(str(numpy.float32(value)))
