"""Checkpoints that others have quantised: read, kept in their own codes, or refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatkv.errors import ModelError
from chatkv.model.catalog import find_model
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.hf_checkpoint import read_checkpoint, read_scheme
from chatkv.model.prepared import PreparedModel, prepare
from chatkv.model.published.sources import published_sources
from chatkv.model.quantise import CodedSource
from chatkv.model.quantised_linear import dequantised
from chatkv.model.weights import load_weights
from chatkv.session.predictions import TextOnModel
from tiny import make_checkpoint
from tiny_published import AWQ, FP8, GPTQ, Compressed, Form, change_config, write_published

# What a form's matrices are kept as; None: dense.
FORMS: dict[str, tuple[Form, str | None]] = {
    "gptq": (GPTQ(), "int4 in groups of 32"),
    "gptq-v2": (GPTQ(version=2, group_size=64), "int4 in groups of 64"),
    "gptq-order": (GPTQ(act_order=True), "int4 in groups of 32, its inputs reordered"),
    "gptq-whole": (GPTQ(group_size=-1), "int4 in groups of 128"),
    "gptq-symmetric": (GPTQ(group_size=128, symmetric=True), "int4 in groups of 128"),
    "gptq-8": (GPTQ(bits=8, symmetric=True), "int8 in groups of 32"),
    "gptq-8-whole": (GPTQ(bits=8, group_size=-1, symmetric=True), "int8"),
    "gptq-8-zeros": (GPTQ(bits=8), None),
    "awq": (AWQ(), "int4 in groups of 32"),
    "awq-128": (AWQ(group_size=128), "int4 in groups of 128"),
    "fp8": (FP8(), "fp8"),
    "fp8-blocks": (FP8("block"), "fp8 in groups of 64"),
    "fbgemm": (FP8("channel", "fbgemm_fp8"), "fp8"),
    "packed": (Compressed(), "int4 in groups of 32"),
    "packed-zeros": (Compressed(symmetric=False, group_size=64), "int4 in groups of 64"),
    "packed-order": (Compressed(act_order=True), "int4 in groups of 32, its inputs reordered"),
    "packed-whole": (Compressed(group_size=None), "int4 in groups of 128"),
    "packed-8": (Compressed(bits=8), "int8 in groups of 32"),
    "plain": (Compressed("int-quantized", 8, None), "int8"),
    "plain-zeros": (Compressed("int-quantized", 8, None, symmetric=False), None),
    "float": (Compressed("float-quantized", 8, None), "fp8"),
}
IDS = [5, 9, 20, 3, 11, 40, 7, 33]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, and inputs that are whole groups of every size."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2", **shape)


def prepared(folder: Path, models: Path, quantised: Any, dtype: Any = "float32") -> PreparedModel:
    return prepare(find_model(str(folder), models), dtype, models, None, quantised)


def logits(config: ModelConfig, weights: Any, most: int) -> torch.Tensor:
    """After each of IDS, computed two at a time; up to `most` rows are few."""
    text = TextOnModel(Decoder(config, weights, few_rows=lambda *_: most), IDS)
    return torch.cat([text.compute(place, place + 2) for place in range(0, len(IDS), 2)])


@pytest.mark.parametrize("name", FORMS)
def test_it_says_what_its_numbers_say(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Kept in its codes as made dense: what the codes stand for, by an independent reading."""
    form, kept = FORMS[name]
    wanted = write_published(tmp_path / "published", checkpoint, form)
    own, full = (prepared(tmp_path / "published", tmp_path, kind) for kind in ("own", None))
    dense = load_weights(full)
    for tensor, numbers in wanted.items():
        if tensor in dense:
            found = dense[tensor]
            assert isinstance(found, torch.Tensor)
            assert torch.allclose(found.double(), numbers.double(), rtol=1e-6, atol=0), tensor
    weights = load_weights(own)
    for tensor in (one for one in weights if one.endswith("_proj.weight")):
        stored = weights[tensor]
        assert isinstance(stored, torch.Tensor) == (kept is None)
        numbers = stored if isinstance(stored, torch.Tensor) else dequantised(stored, torch.float32)
        assert torch.allclose(numbers, wanted[tensor].float(), rtol=2e-6, atol=1e-7), tensor
    exact = logits(full.config, {key: value.float() for key, value in wanted.items()}, 0)
    assert exact.std() > 0.1
    largest = float(exact.abs().max())
    assert torch.allclose(logits(full.config, dense, 0), exact, rtol=0, atol=1e-4 * largest)
    assert torch.allclose(logits(own.config, weights, 0), exact, rtol=0, atol=5e-4 * largest)
    # A CPU's kernels for few rows round to bfloat16.
    assert torch.allclose(logits(own.config, weights, 2), exact, rtol=0, atol=0.05 * largest)


@pytest.mark.parametrize("name", ["gptq-order", "awq", "fp8-blocks", "packed-8"])
def test_it_says_so_in_bfloat16_too(name: str, checkpoint: Path, tmp_path: Path) -> None:
    wanted = write_published(tmp_path / "published", checkpoint, FORMS[name][0])
    own = prepared(tmp_path / "published", tmp_path, "own", "bfloat16")
    exact = logits(own.config, {key: value.float() for key, value in wanted.items()}, 0)
    for most in (0, 2):
        found = logits(own.config, load_weights(own), most)
        assert torch.allclose(found, exact, rtol=0, atol=0.1 * float(exact.abs().max()))


@pytest.mark.parametrize("name", FORMS)
def test_what_it_is_kept_as(name: str, checkpoint: Path, tmp_path: Path) -> None:
    form, kept = FORMS[name]
    write_published(tmp_path / "published", checkpoint, form)
    config = read_checkpoint(tmp_path / "published")["config"]
    scheme = read_scheme(tmp_path / "published")
    assert scheme is not None
    sources = published_sources([tmp_path / "published" / "model.safetensors"], config, scheme)
    coded = [source for source in sources if isinstance(source, CodedSource)]
    assert len(coded) == 2 * 7
    assert {str(one.layout) if one.layout else None for one in coded} == {kept}


def test_it_is_taken_over_once(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    write_published(folder, checkpoint, GPTQ())
    first = prepared(folder, tmp_path, "own")
    written = first.weights[0].stat().st_mtime_ns
    again = prepared(folder, tmp_path, "own")
    assert again == first and again.weights[0].stat().st_mtime_ns == written
    assert prepared(folder, tmp_path, "int4").weights_digest != first.weights_digest
    taken, own = (load_weights(prepared(folder, tmp_path, kind)) for kind in ("int4", "own"))
    for name, weight in own.items():
        other = taken[name]
        if isinstance(weight, torch.Tensor) or isinstance(other, torch.Tensor):
            continue
        assert torch.equal(dequantised(other, torch.float32), dequantised(weight, torch.float32))


def test_the_same_tensors_under_another_config_are_other_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    write_published(folder, checkpoint, GPTQ())
    first = prepared(folder, tmp_path, "own")
    name = "model.layers.1.mlp.down_proj.weight"
    before = dequantised(load_weights(first)[name], torch.float32)  # type: ignore[arg-type]
    change_config(folder, GPTQ(version=2).config())
    second = prepared(folder, tmp_path, "own")
    assert second.weights_digest != first.weights_digest
    after = dequantised(load_weights(second)[name], torch.float32)  # type: ignore[arg-type]
    assert (after - before).abs().min() > 0  # every zero point is one less
    assert prepared(folder, tmp_path, None).weights_digest != second.weights_digest


def group(**weights: Any) -> dict[str, Any]:
    config = Compressed().config()
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised with 'bitsandbytes' are not supported"),
        ({"bits": 4}, "quantised with 'unknown'"),
        ([4], "quantization_config should be an object"),
        ({"quant_method": ["gptq"]}, "are not supported (supported: gptq,"),
        (GPTQ().config() | {"dynamic": 7}, "gptq: a field makes no sense"),
        (Compressed().config() | {"sparsity_config": "no"}, "a field makes no sense"),
        (GPTQ().config() | {"bits": 3}, "gptq: bits 3 is not supported (supported: 4, 8)"),
        (GPTQ().config() | {"bits": "four"}, "gptq: bits 'four' is not supported"),
        (GPTQ().config() | {"group_size": 0}, "gptq: group_size 0"),
        (GPTQ().config() | {"group_size": "32"}, "gptq: group_size '32'"),
        (GPTQ().config() | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ().config() | {"dynamic": {"+:it": {"bits": 8}}}, "matrices with rules of their own"),
        (AWQ().config() | {"version": "gemv"}, "awq: version 'gemv'"),
        (AWQ().config() | {"backend": "llm-awq"}, "awq: backend 'llm-awq'"),
        (FP8().config() | {"weight_block_size": 128}, "fp8: weight_block_size 128"),
        (FP8().config() | {"fmt": "e5m2"}, "fp8: fmt 'e5m2'"),
        (Compressed("nvfp4-pack-quantized").config(), "format 'nvfp4-pack-quantized'"),
        (group(num_bits=2), "num_bits 2 is not supported (supported: 4, 8)"),
        (group(type="float", num_bits=8), "type 'float' is not supported (supported: int, where"),
        (group(strategy="tensor_group"), "strategy 'tensor_group'"),
        (group(group_size=None), "group_size None"),
        (Compressed().config() | {"config_groups": {}}, "config_groups names no group"),
        (Compressed().config() | {"config_groups": None}, "config_groups is missing"),
        (Compressed().config() | {"sparsity_config": {"format": "sparse-24"}}, "sparse weights"),
    ],
)
def test_what_is_not_understood_is_named(config: Any, message: str, checkpoint: Path) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    from chatkv.model.hf_config import config_from_hf

    with pytest.raises(ModelError) as caught:
        config_from_hf(fields | {"quantization_config": config}, "config.json")
    line = str(caught.value)
    assert line.startswith("config.json: ") and message in line and "\n" not in line


PROJECTION = "model.layers.0.mlp.down_proj"
Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (GPTQ(), lambda it: it.pop(f"{PROJECTION}.qzeros"), "lacks the tensor .*down_proj.qzeros"),
        (GPTQ(), lambda it: it[f"{PROJECTION}.g_idx"].fill_(99), "names a group that is not"),
        (GPTQ(), lambda it: it[f"{PROJECTION}.scales"].fill_(torch.inf), "not finite"),
        (GPTQ(), lambda it: it.update({f"{PROJECTION}.scale": torch.ones(1)}), "is no tensor of"),
        (GPTQ(), lambda it: it.update({f"{PROJECTION}.bias": torch.ones(1)}), "is no tensor of"),
        (
            GPTQ(),
            lambda it: it.update({f"{PROJECTION}.qweight": torch.ones(4)}),
            "qweight is stored as float32",
        ),
        (
            FP8("block"),
            lambda it: it.update({f"{PROJECTION}.weight_scale_inv": torch.ones(3, 3)}),
            r"has shape \[3, 3\], expected \[4, 4\]",
        ),
        (
            Compressed(),
            lambda it: it[f"{PROJECTION}.weight_shape"].fill_(7),
            r"says \[7, 7\], expected \[128, 256\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    form: Form, change: Change, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    write_published(folder, checkpoint, form)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message) as caught:
        prepared(folder, tmp_path, "own")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        (GPTQ(), {"bits": 8}),
        (GPTQ(), {"group_size": 64}),
        (GPTQ(), {"quant_method": "awq"}),
        (AWQ(), {"quant_method": "gptq"}),
        (FP8("block"), {"weight_block_size": None}),
        (FP8(), {"weight_block_size": [128, 128]}),
    ],
)
def test_a_config_that_contradicts_its_tensors_is_said(
    form: Form, changes: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    write_published(tmp_path / "published", checkpoint, form)
    change_config(tmp_path / "published", form.config() | changes)
    with pytest.raises(ModelError, match=r"has shape \[.*\], expected \["):
        prepared(tmp_path / "published", tmp_path, "own")


def test_a_bias_of_zeros_and_modules_left_dense_are_fine(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    wanted = write_published(folder, checkpoint, Compressed())
    tensors = load_file(folder / "model.safetensors")
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{PROJECTION}.{part}"]
    tensors |= {
        f"{PROJECTION}.bias": torch.zeros(128),
        f"{PROJECTION}.weight": torch.ones(128, 256),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = load_weights(prepared(folder, tmp_path, "own"))
    kept = weights[f"{PROJECTION}.weight"]
    assert isinstance(kept, torch.Tensor) and torch.equal(kept, torch.ones(128, 256))
    other = "model.layers.0.mlp.up_proj.weight"
    found = dequantised(weights[other], torch.float32)  # type: ignore[arg-type]
    assert torch.allclose(found, wanted[other].float(), rtol=2e-6)
    shutil.rmtree(folder)
