"""config.json of every supported family, in the spelling of transformers 4 and of 5."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig, RopeScaling
from chatkv.model.hf_config import config_from_hf

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
}


def _read(**changes: Any) -> ModelConfig:
    return config_from_hf(MINIMAL | changes, "config.json")


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_tiny_checkpoints(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Every field is what transformers' own config object says."""
    from transformers import AutoConfig

    folder = tiny_checkpoint(name)
    ours = config_from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    theirs = AutoConfig.from_pretrained(folder)
    assert ours.architecture == theirs.model_type
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_theta
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (getattr(theirs, "attention_bias", False) or name.startswith("qwen2"))
    assert ours.o_bias == ours.mlp_bias == (name == "bias")
    assert ours.qk_norm == (name == "qwen3")
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    sliding = getattr(theirs, "sliding_window", None)
    for layer, kind in enumerate(kinds):
        assert ours.window(layer) == (sliding if kind == "sliding_attention" else None)
    if scaling := getattr(theirs, "rope_scaling", None):
        assert ours.rope_scaling is not None
        assert ours.rope_scaling.kind == scaling["rope_type"]
        assert ours.rope_scaling.factor == scaling["factor"]
    else:
        assert ours.rope_scaling is None


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_left_out_fields_mean_what_they_mean_to_transformers(model_type: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type, **{k: v for k, v in MINIMAL.items() if "_t" not in k})
    ours = _read(model_type=model_type)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2048 // 32)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_theta
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.sliding_window == (4096 if model_type == "mistral" else None)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, None),
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope_type": "linear", "factor": 4}, RopeScaling("linear", 4.0)),
        (LLAMA3, RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            RopeScaling("yarn", 4.0, 32768),
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 24, "beta_slow": 2}
            | {"attention_factor": 1.5, "truncate": False},
            RopeScaling(
                "yarn", 2.0, 2048, beta_fast=24.0, beta_slow=2.0, attention_factor=1.5,
                truncate=False,
            ),
        ),
    ],
    ids=["default", "type", "rope_type", "llama3", "yarn", "yarn in full"],
)  # fmt: skip
def test_both_spellings_of_rotary_settings(
    scaling: dict[str, Any], expected: RopeScaling | None
) -> None:
    old = _read(rope_theta=500000.0, rope_scaling=scaling)
    new = _read(rope_parameters={**scaling, "rope_theta": 500000.0})
    assert old == new
    assert old.rope_scaling == expected
    assert old.rope_theta == 500000.0


def test_yarn_attention_factor_of_deepseek_is_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}
    _, theirs = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**MINIMAL, rope_scaling=scaling), "cpu")
    ours = _read(rope_scaling=scaling).rope_scaling
    assert ours is not None and ours.attention_factor is not None
    assert math.isclose(ours.attention_factor, theirs)


def test_windows_of_qwen2() -> None:
    fields = {"model_type": "qwen2", "sliding_window": 4096}
    assert _read(**fields).sliding_window is None
    used = _read(**fields, use_sliding_window=True, max_window_layers=30)
    assert [used.window(layer) for layer in (0, 29, 30, 39)] == [None, None, 4096, 4096]
    assert _read(**fields, use_sliding_window=True).window_from_layer == 28
    unused = _read(**fields, use_sliding_window=True, max_window_layers=40)
    assert unused == _read(model_type="qwen2")
    kinds = ["full_attention"] * 10 + ["sliding_attention"] * 30
    listed = _read(**fields, use_sliding_window=True, layer_types=kinds)
    assert listed.window_from_layer == 10


def test_mistral_without_a_window() -> None:
    assert _read(model_type="mistral", sliding_window=None).sliding_window is None
    assert _read(model_type="mistral", sliding_window=1024).sliding_window == 1024


def test_the_class_name_stands_in_for_the_model_type() -> None:
    fields = {**MINIMAL, "architectures": ["MistralForCausalLM"]}
    del fields["model_type"]
    assert config_from_hf(fields, "config.json").architecture == "mistral"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "architecture 'gemma3' is not supported"),
        ({"model_type": None}, "architecture None"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised with 'hqq'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is missing or no number"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "needs a number for 'factor'"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "needs a number for 'factor'"),
        ({"rope_scaling": "linear"}, "should be an object"),
        ({"rope_parameters": {"full_attention": {}}}, "differ by layer"),
        ({"num_attention_heads": 0}, "a field makes no sense: integer division"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "8 heads cannot share 3 heads"),
        ({"num_key_value_heads": "2"}, "num_kv_heads is '2'"),
        ({"head_dim": 63}, "a head size of 63"),
        ({"rms_norm_eps": "small"}, "a field makes no sense: could not convert"),
        ({"max_position_embeddings": -1}, "max_position is -1"),
        ({"quantization_config": 8}, "quantization_config should be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}
            | {"layer_types": ["sliding_attention", "full_attention"] * 20},
            "layer_types",
        ),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        _read(**changes)
    line = str(caught.value)
    assert line.startswith("config.json: ") and message in line and "\n" not in line
