"""GGUF files: config and tensors equal those of the checkpoint they were made from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chatkv.errors import ModelError
from chatkv.model.config import RopeScaling
from chatkv.model.gguf_config import config_from_gguf
from chatkv.model.gguf_file import open_gguf
from chatkv.model.gguf_tokenizer import tokenizer_from_gguf
from chatkv.model.gguf_weights import tensor_sources
from chatkv.model.hf_config import config_from_hf
from chatkv.model.prepared import PreparedModel
from chatkv.model.weights import load_weights
from tiny import VOCAB_SIZE
from tiny_gguf import write_gguf

Checkpoint = Callable[..., Path]

# Llama 3's bands are fixed by its original context; the tiny checkpoint's own is shorter.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {}),
    ("llama3", {"rope_scaling": LLAMA3}),
    ("smollm", {}),
    ("bias", {}),
    ("linear", {}),
    ("yarn", {}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=[name for name, _ in MODELS])
def test_config_and_tensors_are_the_checkpoints(
    name: str, changes: dict[str, Any], tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = _checkpoint(tiny_checkpoint, name, changes, tmp_path)
    file = open_gguf(write_gguf(tmp_path / "model.gguf", checkpoint))

    config = config_from_gguf(file)
    expected = config_from_hf(json.loads((checkpoint / "config.json").read_text()), "config.json")
    if name == "mistral":
        expected = dataclasses.replace(expected, architecture="llama")
    assert config == expected

    original = load_file(checkpoint / "model.safetensors")
    loaded = {source.name: source.load() for source in tensor_sources(file, config)}
    assert loaded.keys() == original.keys()
    for tensor_name, tensor in loaded.items():
        assert torch.equal(tensor, original[tensor_name]), tensor_name


@pytest.mark.parametrize("name", ["llama2", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantised", [None, "Q8_0"])
def test_tensors_are_those_that_transformers_reads(
    name: str, quantised: str | None, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    # transformers takes the number of tokens for that of the embedding's rows, and 128 for the
    # head size of any qwen3.
    sizes = {"vocab_size": VOCAB_SIZE} | ({"head_dim": 128} if name == "qwen3" else {})
    checkpoint = tiny_checkpoint(name, **sizes)
    file = open_gguf(write_gguf(tmp_path / "model.gguf", checkpoint, quantised=quantised))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    for source in tensor_sources(file, config_from_gguf(file)):
        assert torch.equal(source.load(), theirs[source.name]), source.name


@pytest.mark.slow
def test_smollm2_is_what_transformers_reads(smollm2: PreparedModel, smollm2_gguf: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).state_dict()
    ours = load_weights(smollm2)
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_smollm2_config(smollm2: PreparedModel) -> None:
    config = smollm2.config
    shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    assert shape == (30, 9, 3, 64)
    assert (config.norm_eps, config.rope_theta, config.max_position) == (1e-5, 1e5, 8192)
    assert config.tie_embeddings and not config.qkv_bias
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.eos_ids == (2,)
    assert smollm2.template is not None and "<|im_start|>" in smollm2.template


def test_every_float_dtype_can_be_stored(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama2")
    weight = np.arange(64, dtype=np.float32)
    half = {"output_norm.weight": weight.astype(np.float16)}
    file = open_gguf(write_gguf(tmp_path / "model.gguf", checkpoint, tensors=half))
    loaded = {source.name: source.load() for source in tensor_sources(file, config_from_gguf(file))}
    assert torch.equal(loaded["model.norm.weight"], torch.from_numpy(weight))


def test_yarn_settings(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    settings = {"beta_fast": 24.0, "beta_slow": 2.0, "attn_factor": 0.5}
    keys = {f"llama.rope.scaling.yarn_{key}": value for key, value in settings.items()}
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("yarn"), metadata=keys)
    scaling = config_from_gguf(open_gguf(path)).rope_scaling
    assert scaling is not None and scaling.attention_factor is not None
    assert scaling.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))
    assert (scaling.beta_fast, scaling.beta_slow) == (24.0, 2.0)


def test_old_linear_scaling_key(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_checkpoint("llama2"),
        metadata={"llama.rope.scale_linear": 8.0},
    )
    assert config_from_gguf(open_gguf(path)).rope_scaling == RopeScaling("linear", 8.0)


# -- what cannot be read says so in one line, naming it ---------------------------------------


def _broken(change: dict[str, Any], message: str) -> Any:
    return pytest.param(change, message, id=message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        _broken({"metadata": {"general.architecture": "gemma3"}}, "architecture 'gemma3'"),
        _broken({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        _broken({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        _broken(
            {
                "metadata": {
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 4.0,
                    "llama.rope.scaling.yarn_log_multiplier": 0.1,
                }
            },
            "rope.scaling.yarn_log_multiplier is not supported",
        ),
        _broken({"metadata": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count is 8"),
        _broken({"metadata": {"llama.attention.head_count": 0}}, "metadata makes no sense"),
        _broken({"metadata": {"llama.attention.head_count_kv": 3}}, "4 heads cannot share 3"),
        _broken({"metadata": {"llama.attention.head_count_kv": [2]}}, "makes no sense: int()"),
        _broken({"metadata": {"llama.context_length": 0}}, "max_position is 0"),
        _broken({"metadata": {"split.count": 3}}, "is one of 3 parts"),
        _broken({"without": ["llama.block_count"]}, "lacks the GGUF metadata 'llama.block_count'"),
        _broken({"metadata": {"llama.attention.head_count": [4, 4, 2]}}, "head_count is [4, 4, 2]"),
        _broken(
            {"without": ["blk.1.ffn_up.weight"]},
            "lacks the tensor for model.layers.1.mlp.up_proj.weight",
        ),
        _broken({"without": ["token_embd.weight"]}, "lacks the tensor 'token_embd.weight'"),
        _broken(
            {"tensors": {"blk.0.attn_q.weight": np.zeros((48, 64), np.float32)}},
            "blk.0.attn_q.weight has shape [48, 64], expected [64, 64]",
        ),
        _broken(
            {"tensors": {"blk.0.ffn_gate_exps.weight": np.zeros((4, 4), np.float32)}},
            "blk.0.ffn_gate_exps.weight is not known",
        ),
        _broken(
            {"tensors": {"blk.7.attn_q.weight": np.zeros((64, 64), np.float32)}},
            "blk.7.attn_q.weight is no tensor of a llama model",
        ),
        _broken(
            {"tensors": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}},
            "rope_freqs.weight is not Llama 3's",
        ),
        _broken({"metadata": {"tokenizer.ggml.pre": "gpt-5"}}, "pre-tokenizer 'gpt-5'"),
        _broken({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer 'bert'"),
        _broken({"metadata": {"tokenizer.ggml.merges": ["the nothing"]}}, "tokenizer is damaged"),
        _broken(
            {"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "384 tokens but 2 token types"
        ),
    ],
)
def test_what_is_not_supported_is_named(
    change: dict[str, Any], message: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama2"), **change)
    with pytest.raises(ModelError) as caught:
        file = open_gguf(path)
        tensor_sources(file, config_from_gguf(file))
        tokenizer_from_gguf(file)
    line = str(caught.value)
    assert message in line and str(path) in line and "\n" not in line


def test_no_gguf_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a zip file, say" * 100):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="is no GGUF file"):
            open_gguf(path)
    with pytest.raises(ModelError, match="cannot read"):
        open_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_cut_file_is_reported(share: float, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama2"))
    content = path.read_bytes()
    path.write_bytes(content[: max(5, int(len(content) * share))])
    with pytest.raises(ModelError, match="is cut short or damaged") as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)


def _checkpoint(
    tiny_checkpoint: Checkpoint, name: str, changes: dict[str, Any], tmp_path: Path
) -> Path:
    """The tiny checkpoint with fields of config.json that change no weight."""
    folder = tiny_checkpoint(name)
    if changes:
        folder = Path(shutil.copytree(folder, tmp_path / "checkpoint"))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
