"""Weights of 8 and 4 bits: what is stored, what is computed with it, and which weights they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from chatkv.errors import ModelError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.few_rows import MeasuredRows
from chatkv.model.gguf_packed import GGUF_LAYOUTS, packed_weight, unpack
from chatkv.model.linear import HalfLinear, Linear, has_half_product
from chatkv.model.prepared import PreparedModel, Quantised, prepare
from chatkv.model.quantise import QuantisedWeight, join, quantise, tensors_of
from chatkv.model.quantised_linear import QuantisedLinear, cpu_product, dequantised
from chatkv.model.tiled_product import TiledProduct, tile_outputs
from chatkv.model.weights import load_weights
from chatkv.session.predictions import TextOnModel
from chatkv_kernels.linear_quantised import Weight8
from tiny import make_checkpoint
from tiny_gguf import write_gguf

Checkpoint = Callable[..., Path]
KINDS: tuple[Any, ...] = ("int8", "fp8", "int4")
# Largest error of a weight, as a share of the largest weight of its output or group.
ERRORS = {"int8": 0.5 / 127, "fp8": 1 / 16, "int4": 1 / 15}


def packed_tensor(kind: str, num_out: int, num_in: int, seed: int = 0, scale: float = 0.02) -> Any:
    """A matrix in a GGUF type as the gguf package reads it: random bytes, sound scales, and a group
    whose scale is zero."""
    rng = np.random.default_rng(seed)
    block, size, num_scales, first = {
        "Q4_0": (32, 18, 1, 0),
        "Q4_1": (32, 20, 2, 0),
        "Q4_K": (256, 144, 2, 0),
        "Q6_K": (256, 210, 1, 208),
        "Q8_0": (32, 34, 1, 0),
    }[kind]
    blocks = rng.integers(0, 256, (num_out, num_in // block, size), dtype=np.uint8)
    scales = (rng.standard_normal((*blocks.shape[:2], num_scales)) * scale).astype(np.float16)
    scales[0, 0, 0] = 0
    scales[1, 0, 0] = 2.0**-24  # the least there is
    blocks[..., first : first + 2 * num_scales] = scales.view(np.uint8)
    return SimpleNamespace(
        tensor_type=gguf.GGMLQuantizationType[kind],
        shape=[num_in, num_out],
        data=blocks.reshape(num_out, -1),
    )


@pytest.mark.parametrize("kind", GGUF_LAYOUTS)
def test_packed_gguf_is_what_its_library_dequantises(kind: str) -> None:
    tensor = packed_tensor(kind, 48, 512)
    theirs = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(48, 512)
    layout = GGUF_LAYOUTS[kind]
    codes, scales, least = unpack(kind, tensor.data)
    numbers = codes * np.repeat(scales, layout.group_size, 1)
    assert np.array_equal(
        numbers if least is None else numbers + np.repeat(least, layout.group_size, 1), theirs
    )
    weight = packed_weight(kind, tensor.data)
    parts = [(tuple(part.shape), part.dtype) for part in tensors_of(weight)]
    assert parts == [*layout.parts((48, 512)).values()]
    # Scales and zero points of a Q4_K are rounded to 11 bits; a zero point is up to 64 steps away.
    # Other types of 4 bits round zero points, those of 8 bits nothing.
    tolerance = 0 if layout.kind == "int8" else 1e-3 * abs(theirs).max()
    ours = dequantised(weight, torch.float32)
    assert torch.allclose(ours, torch.from_numpy(theirs), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_near_what_it_was(kind: Quantised) -> None:
    weight = torch.randn(32, 160, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    error = (dequantised(quantise(weight, kind), torch.float32) - weight).abs()
    assert (error.amax(1) <= 1.01 * ERRORS[kind] * 2 * weight.abs().amax(1) + 1e-6).all()
    assert not error[3].any()


def product_of(
    kind: Quantised, dtype: torch.dtype, most: int
) -> tuple[QuantisedLinear, torch.Tensor, torch.Tensor]:
    """A matrix [48, 64], its weights as stored, and its bias."""
    generator = torch.Generator().manual_seed(2)
    parts = [quantise(torch.randn(size, 64, generator=generator), kind) for size in (32, 16)]
    bias = torch.randn(48, generator=generator).to(dtype)
    joined = join(parts)
    linear = QuantisedLinear(joined, bias, dtype, lambda *_: most)
    return linear, dequantised(joined, torch.float64), bias


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_products_agree(kind: Quantised, dtype: torch.dtype) -> None:
    linear, weight, bias = product_of(kind, dtype, most=4)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = x.double() @ weight.T + bias.double()
    exact, rounded = (2e-5 if dtype == torch.float32 else 0.3), 0.3  # of up to 24
    has_kernel = kind != "fp8"
    for rows in (1, 2, 4, 5, 9):
        is_packed = has_kernel and rows <= 4
        tolerance = rounded if is_packed else exact  # those kernels round to bfloat16
        assert torch.allclose(linear(x[:rows]).double(), wanted[:rows], rtol=0, atol=tolerance)
    tolerance = rounded if has_kernel else exact
    residual = torch.ones(4, 48, dtype=dtype)
    before = residual.clone()
    total = linear.add(x[:4], residual).double()
    assert torch.allclose(total, wanted[:4] + 1, rtol=0, atol=tolerance)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("kind", [*KINDS, "int8 in groups"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inputs", [40, 160, 16_100])
def test_many_rows_are_multiplied_with_the_same_numbers(
    kind: Any, dtype: torch.dtype, inputs: int
) -> None:
    """Of a matrix of several tiles, the last one narrower, whose inputs are no whole run."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(2 * tile_outputs(inputs) + 48, inputs, generator=generator)
    if kind in KINDS:
        weight = quantise(rows, kind)
    else:
        scales = torch.rand(-(-inputs // 16), len(rows), generator=generator).half() / 127
        weight = Weight8((rows * 40).to(torch.int8), scales, 16)
    x = torch.randn(5, inputs, generator=generator).to(dtype)
    wanted = x.double() @ dequantised(weight, torch.float64).T
    got = TiledProduct(weight, dtype)(x)
    assert got.dtype == dtype and got.shape == wanted.shape
    assert torch.allclose(
        got.double(),
        wanted,
        rtol=1e-6 if dtype == torch.float32 else 0.01,
        atol=(1e-4 if dtype == torch.float32 else 0.1) * max(1, inputs / 160),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_does_not_depend_on_the_others(kind: Quantised, dtype: torch.dtype) -> None:
    linear, _, _ = product_of(kind, dtype, most=8)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 8):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_8_bits_in_groups_are_two_planes_of_4(group_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    codes = torch.randint(-128, 128, (48, 256), generator=generator).to(torch.int8)
    scales = torch.rand(256 // group_size, 48, generator=generator).half()
    weight = Weight8(codes, scales, group_size)
    product = cpu_product(weight, dtype)
    assert product is not None
    x = torch.randn(3, 256, generator=generator).to(dtype)
    wanted = x.double() @ dequantised(weight, torch.float64).T
    assert (product(x).double() - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert cpu_product(weight._replace(group_size=16), dtype) is None


@pytest.mark.skipif(not has_half_product(), reason="this CPU has no product in float16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_float16_is_multiplied_as_it_is(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(80, 100, generator=generator).half()
    bias = torch.randn(80, generator=generator).to(dtype)
    linear = HalfLinear(weight, bias)
    x = torch.randn(40, 100, generator=generator).to(dtype)
    wanted = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-4 if dtype == torch.float32 else 0.2  # of up to 40
    for rows in (1, 2, 3, 5, 8, 9, 40):
        found = linear(x[:rows])
        assert found.dtype == dtype and found.shape == (rows, 80)
        assert torch.allclose(found.double(), wanted[:rows], rtol=0, atol=tolerance)
        assert torch.equal(linear.add(x[:rows], torch.ones(rows, 80, dtype=dtype)), 1 + found)


def test_a_model_in_float16_says_what_the_full_one_says(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """It takes half the room, its head too while it is computed with, and has KV of its own."""
    checkpoint = tiny_checkpoint("qwen2")
    full, made = (prepared(checkpoint, tmp_path, kind) for kind in (None, "fp16"))
    assert made.weights_digest != full.weights_digest and made.stored == "fp16"
    for name, weight in load_weights(made).items():
        assert isinstance(weight, torch.Tensor)
        half = name.endswith("_proj.weight")
        assert weight.dtype == (torch.float16 if half else torch.float32)
    whole, halved = (Decoder(one.config, load_weights(one)) for one in (full, made))
    if has_half_product():
        assert isinstance(halved.head, HalfLinear) and isinstance(whole.head, Linear)
    wanted = logits(whole)
    assert 0 < (logits(halved) - wanted).abs().max() <= 2e-3 * wanted.abs().max()


def prepared(path: Path, models: Path, kind: Quantised | None, dtype: Any = "float32") -> Any:
    return prepare(find_model(str(path), models), dtype, models, None, kind)


def matrices(model: PreparedModel) -> dict[str, torch.Tensor]:
    return {
        name: weight if isinstance(weight, torch.Tensor) else dequantised(weight, torch.float32)
        for name, weight in load_weights(model).items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_quantised_once(
    kind: Quantised, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("qwen2")  # it has biases
    dense, made = (prepared(checkpoint, tmp_path, one) for one in (None, kind))
    written = made.weights[0].stat().st_mtime_ns
    again = prepared(checkpoint, tmp_path, kind)
    assert again == made and again.weights[0].stat().st_mtime_ns == written
    assert made.weights[0].stat().st_size < sum(file.stat().st_size for file in dense.weights)
    assert made.weights_digest != dense.weights_digest
    assert made.config == dense.config and made.template == dense.template

    before, after = load_weights(dense), load_weights(made)
    assert before.keys() == after.keys()
    for name, weight in after.items():
        original = before[name]
        assert isinstance(original, torch.Tensor)
        if name.endswith("_proj.weight"):
            assert not isinstance(weight, torch.Tensor)
            assert torch.equal(
                dequantised(weight, torch.float32),
                dequantised(quantise(original, kind), torch.float32),
            )
        else:
            assert isinstance(weight, torch.Tensor) and torch.equal(weight, original)


def test_a_gguf_of_four_bits_is_taken_as_it_is(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Quantising what its library dequantises would change it."""
    checkpoint = tiny_checkpoint("llama2")
    path = write_gguf(tmp_path / "model.gguf", checkpoint, quantised="Q4_1")
    whole = matrices(prepared(path, tmp_path, None))
    packed = matrices(prepared(path, tmp_path, "int4"))
    for name, weight in whole.items():
        assert torch.allclose(packed[name], weight, rtol=0, atol=2e-3 * float(weight.abs().max()))
    name = "model.layers.0.mlp.up_proj.weight"
    requantised = dequantised(quantise(whole[name], "int4"), torch.float32)
    assert (requantised - whole[name]).abs().max() > 5 * (packed[name] - whole[name]).abs().max()


def test_a_gguf_of_several_types_keeps_them_all(tmp_path: Path) -> None:
    """As mixtures of K types are published: matrices of one input differ, and some have no kernel
    on a CPU."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    checkpoint = make_checkpoint(tmp_path / "llama2", "llama2", **shape)
    kinds = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q8_0"} | {
        "ffn_gate": "Q4_K",
        "ffn_up": "Q4_K",
        "ffn_down": "Q6_K",
    }
    scales = {"Q4_K": 1e-4, "Q6_K": 3e-5, "Q8_0": 1e-3}
    packed = {
        f"blk.{layer}.{name}.weight": (
            kind,
            packed_tensor(kind, 256, 256, layer, scales[kind]).data,
        )
        for layer in range(2)
        for name, kind in kinds.items()
    }
    path = write_gguf(tmp_path / "model.gguf", checkpoint, packed=packed)
    full, own = (prepared(path, tmp_path, kind) for kind in (None, "own"))
    whole = logits(Decoder(full.config, load_weights(full)))
    weights = load_weights(own)
    assert sum(not isinstance(weight, torch.Tensor) for weight in weights.values()) == 14
    largest = float(whole.abs().max())
    for most, tolerance in ((0, 2e-3), (4, 0.05)):  # a Q4_K's scales are rounded to 11 bits
        found = logits(Decoder(own.config, weights, few_rows=lambda *_, most=most: most))
        assert (found - whole).abs().max() <= tolerance * largest
    assert prepared(path, tmp_path, "own").weights_digest != full.weights_digest


def test_models_and_quantisations_all_have_weights_of_their_own(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint("llama2")
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    digests = {
        prepared(model, tmp_path, kind, dtype).weights_digest
        for model in (checkpoint, path)
        for kind in (None, *KINDS)
        for dtype in ("float32", "bfloat16")
    }
    assert len(digests) == 16


def test_a_matrix_that_is_not_there_is_said(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    from dataclasses import replace

    checkpoint = tiny_checkpoint("llama3")
    dense = prepared(checkpoint, tmp_path, None)
    with pytest.raises(ModelError, match=r"q_proj\.weight is not there as it was quantised"):
        load_weights(replace(dense, quantised="int8"))
    made = prepared(checkpoint, tmp_path, "int8")
    with pytest.raises(ModelError, match=r"proj\.weight\.codes is no tensor of a llama model"):
        load_weights(replace(made, quantised=None))


@pytest.mark.parametrize("name", ["llama3", "qwen2", "smollm"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_says_what_its_dequantised_weights_say(
    name: str, kind: Quantised, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """In float32; also a model whose inputs are no whole groups. Many rows are computed as by
    dense weights but for the head, few of them within what rounding to bfloat16 makes of logits."""
    model = prepared(tiny_checkpoint(name), tmp_path, kind)
    whole = logits(Decoder(model.config, matrices(model)))
    largest = float(whole.abs().max())
    for most, tolerance in ((0, 5e-4), (4, 0.05)):  # the head is of float16
        decoder = Decoder(model.config, load_weights(model), few_rows=lambda *_, most=most: most)
        assert (logits(decoder) - whole).abs().max() <= tolerance * largest


def logits(decoder: Decoder) -> torch.Tensor:
    """After each of a few tokens: those of the first six at once, then one at a time."""
    text = TextOnModel(decoder, [5, 9, 20, 3, 11, 40, 7, 33, 2, 8])
    places = [(0, 6), *((place, place + 1) for place in range(6, 10))]
    return torch.cat([text.compute(start, stop) for start, stop in places])


def test_how_many_rows_are_few_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = quantise(torch.randn(32, 64, generator=torch.Generator().manual_seed(5)), "int4")
    slow = torch.zeros(4_000_000)

    def many(x: torch.Tensor) -> torch.Tensor:
        return x if len(x) > 3 else slow.cos()

    def packed(x: torch.Tensor) -> torch.Tensor:
        return slow.cos() if len(x) > 3 else x

    rows = MeasuredRows(tmp_path, torch.float32)
    assert rows(weight, packed, many) == 3
    assert rows(weight, many, packed) == 3  # of this shape and dtype it is known
    assert MeasuredRows(tmp_path, torch.float32)(weight, many, packed) == 3
    assert MeasuredRows(tmp_path, torch.bfloat16)(weight, many, packed) == 0
    (tmp_path / "rows.json").write_text("{")
    assert MeasuredRows(tmp_path, torch.float32)(weight, packed, many) == 3


def test_shapes_without_a_kernel_are_computed_dense() -> None:
    weight: QuantisedWeight = quantise(torch.ones(20, 64), "int4")
    linear = QuantisedLinear(weight, None, torch.float32, lambda *_: pytest.fail("measured"))
    assert torch.allclose(linear(torch.ones(1, 64)), torch.full((1, 20), 64.0), rtol=1e-3)
