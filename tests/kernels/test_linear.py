"""Linear layers of a few rows against float64, at sizes that fill no tile; and their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agreement import assert_agrees, dtype_on, in_float64
from chatkv_kernels.gpu.linear import Tiles
from chatkv_kernels.gpu.target import A100, H200, assume
from chatkv_kernels.linear import linear
from chatkv_kernels.linear_quantised import (
    Weight8,
    dequantise_weight_8,
    dequantise_weight_int4,
    linear_fp8,
    linear_int4,
    linear_int8,
    quantise_weight_fp8,
    quantise_weight_int4,
    quantise_weight_int8,
)

DTYPE = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
ROWS = st.integers(1, 16)
OUTPUTS = st.integers(1, 140)
SEED = st.integers(0, 99)


def normal(device: torch.device, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size).to(device, dtype)


def check(
    function: Any, x: Tensor, weight: Any, with_bias: bool, with_residual: bool, num_outputs: int
) -> None:
    bias = normal(x.device, num_outputs, dtype=x.dtype) if with_bias else None
    residual = normal(x.device, len(x), num_outputs, dtype=x.dtype) if with_residual else None
    exact = in_float64(function.reference, x, weight, bias, residual)
    assert_agrees(function.kernel(x, weight, bias, residual), exact)
    assert_agrees(function.reference(x, weight, bias, residual), exact)


@settings(max_examples=5)
@given(
    rows=ROWS,
    num_outputs=OUTPUTS,
    num_inputs=st.sampled_from([8, 100, 192]),
    dtype=DTYPE,
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    seed=SEED,
)
def test_linear(
    device: torch.device,
    rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    with_bias: bool,
    with_residual: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    dtype = dtype_on(device, dtype)
    x = normal(device, rows, num_inputs + 3, dtype=dtype)[:, :num_inputs]
    weight = normal(device, num_outputs, num_inputs, dtype=dtype)
    check(linear, x, weight, with_bias, with_residual, num_outputs)


@settings(max_examples=5)
@given(
    rows=ROWS,
    num_outputs=OUTPUTS,
    num_inputs=st.sampled_from([72, 576]),
    dtype=DTYPE,
    is_float=st.booleans(),
    group_size=st.sampled_from([0, 16, 32, 128]),
    target=st.sampled_from([A100, H200]),
    with_bias=st.booleans(),
    seed=SEED,
)
def test_linear_int8_and_fp8(
    device: torch.device,
    rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    is_float: bool,
    group_size: int,
    target: Any,
    with_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = normal(device, rows, num_inputs, dtype=dtype_on(device, dtype))
    quantise = quantise_weight_fp8 if is_float else quantise_weight_int8
    weight = quantise(normal(device, num_outputs, num_inputs))
    if group_size:
        scales = normal(device, -(-num_inputs // group_size), num_outputs, dtype=torch.float16)
        weight = Weight8(weight.codes, scales / 100, group_size)
    with assume(target):
        function = linear_fp8 if is_float else linear_int8
        check(function, x, weight, with_bias, not with_bias, num_outputs)


@settings(max_examples=5)
@given(
    rows=ROWS,
    num_outputs=OUTPUTS,
    num_inputs=st.sampled_from([8, 100, 576]),
    dtype=DTYPE,
    group_size=st.sampled_from([32, 64, 128]),
    symmetric=st.booleans(),
    with_bias=st.booleans(),
    seed=SEED,
)
def test_linear_int4(
    device: torch.device,
    rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    group_size: int,
    symmetric: bool,
    with_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = normal(device, rows, num_inputs, dtype=dtype_on(device, dtype))
    weight = normal(device, num_outputs, num_inputs) + (0 if symmetric else 1)
    quantised = quantise_weight_int4(weight, group_size, symmetric)
    check(linear_int4, x, quantised, with_bias, not with_bias, num_outputs)


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """To the bit: an answer is the same in any batch."""
    torch.manual_seed(0)
    x, weight = normal(device, 16, 300, dtype=torch.float16), normal(device, 9, 300)
    for function, of in (
        (linear, weight.half()),
        (linear_int8, quantise_weight_int8(weight)),
        (linear_int4, quantise_weight_int4(weight)),
    ):
        together = function.kernel(x, of)
        assert torch.equal(function.kernel(x[[3, 15]], of), together[[3, 15]])


def test_where_inputs_are_split(device: torch.device) -> None:
    torch.manual_seed(0)
    x, weight = normal(device, 3, 2100, dtype=torch.float16), normal(device, 5, 2100)
    check(linear, x, weight.half(), True, True, 5)
    check(linear_fp8, x, quantise_weight_fp8(weight), True, True, 5)
    check(linear_int4, x, quantise_weight_int4(weight, 32), True, True, 5)


def test_inputs_are_split_where_outputs_are_few() -> None:
    tiles = Tiles(outputs=64, step_inputs=64, stages=4)
    assert [tiles.splits(*shape) for shape in ((128256, 4096), (4096, 4096), (576, 1536))] == [
        1,
        8,
        2,
    ]


@settings(max_examples=30)
@given(
    num_outputs=st.integers(1, 9),
    num_inputs=st.sampled_from([7, 64, 256, 300]),
    group_size=st.sampled_from([32, 64, 128]),
    symmetric=st.booleans(),
    scale=st.sampled_from([0.0, 1e-3, 50.0]),
    seed=SEED,
)
def test_int4_weights_are_near(
    num_outputs: int, num_inputs: int, group_size: int, symmetric: bool, scale: float, seed: int
) -> None:
    """Half a step, or a whole one at the end of a symmetric group that its largest is not at."""
    torch.manual_seed(seed)
    weight = scale * (torch.randn(num_outputs, num_inputs) + (0 if symmetric else 1))
    quantised = quantise_weight_int4(weight, group_size, symmetric)
    assert quantised.codes.shape == (-(-num_inputs // 128), num_outputs, 32)
    assert quantised.scales.shape == (-(-num_inputs // group_size), num_outputs)
    assert (quantised.zeros is None) == symmetric
    error = (dequantise_weight_int4(quantised, torch.float32) - weight).abs()
    steps = quantised.scales.float().abs().T.repeat_interleave(group_size, 1)[:, :num_inputs]
    # A scale is rounded to float16, which moves the 15th step by at most 15 / 2048 of one, or to
    # its least number.
    assert (error <= steps * (1.01 if symmetric else 0.52) + 8 * 2.0**-24).all()


def test_where_a_code_lies() -> None:
    weight = torch.full((3, 256), -8.0)
    weight[1, 128 + 5], weight[1, 128 + 64 + 5], weight[1, 128 + 96 + 5] = 3.0, 6.0, 7.0
    quantised = quantise_weight_int4(weight, 64)
    assert int(quantised.codes[1, 1, 5]) & 0xFFFF == 3 + 8 | (6 + 8) << 8 | (7 + 8) << 12
    assert quantised.codes.count_nonzero() == 1
    assert torch.equal(dequantise_weight_int4(quantised, torch.float32), weight)


@pytest.mark.parametrize("quantise", [quantise_weight_int8, quantise_weight_fp8])
def test_8_bit_weights_are_near(quantise: Any) -> None:
    torch.manual_seed(1)
    weight = torch.randn(7, 300) * torch.logspace(-6, 6, 7)[:, None]
    weight[3] = 0
    error = (dequantise_weight_8(quantise(weight), torch.float32) - weight).abs()
    largest = weight.abs().amax(1, True)
    bound = largest / 254 if quantise is quantise_weight_int8 else weight.abs() / 16 + largest / 4e5
    assert (error <= 1.001 * bound).all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        quantise_weight_int4(torch.zeros(4, 128), 16)
    with pytest.raises(ValueError, match="at most 16 rows"):
        linear.kernel(torch.zeros(17, 8, device=device), torch.zeros(4, 8, device=device))
