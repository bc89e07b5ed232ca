"""See `chatkv_kernels.linear_quantised`. The programs of `linear`: weights become numbers of x's
dtype in registers, exactly; scales are applied to float32 sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.linear import Tiles, from_e4m3, launch, multiply, store
from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.gpu.target import target_of
from chatkv_kernels.linear_quantised import (
    GROUP_SIZES,
    GROUP_SIZES_8,
    RUN,
    RUN_WORDS,
    Weight4,
    Weight8,
)

TILES8 = Tiles(outputs=128, step_inputs=128, stages=3)
TILES16 = Tiles(outputs=64, step_inputs=128, stages=3)  # of groups of 16: more would spill
TILES4 = Tiles(outputs=128, step_inputs=RUN, stages=5)
WORDS = tl.constexpr(RUN_WORDS)


def linear_int8(
    x: Tensor, weight: Weight8, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    return _linear8(x, weight, bias, residual, FLOAT=False, NATIVE=False)


def linear_fp8(
    x: Tensor, weight: Weight8, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    weight = weight._replace(codes=weight.codes.view(torch.uint8))
    native = target_of(x.device).arch >= 89
    return _linear8(x, weight, bias, residual, FLOAT=True, NATIVE=native)


def _linear8(
    x: Tensor, weight: Weight8, bias: Tensor | None, residual: Tensor | None, **constants: bool
) -> Tensor:
    codes, scales, group = weight
    tensors = (codes, codes.stride(0))
    if not group:
        return launch(multiply, x, len(codes), tensors, TILES8, scales, bias, residual, **constants)
    grouped = (*tensors, scales, len(scales))
    tiles = TILES8 if group > 16 else TILES16
    return launch(
        _grouped8, x, len(codes), grouped, tiles, None, bias, residual, GROUP=group, **constants
    )


def linear_int4(
    x: Tensor, weight: Weight4, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    codes, scales, zeros, _, group_size = weight
    tensors = (codes, scales, zeros, len(scales))
    constants = {"GROUP": group_size, "BFLOAT": x.dtype == torch.bfloat16}
    return launch(_linear4, x, codes.shape[1], tensors, TILES4, None, bias, residual, **constants)


@triton.jit
def _grouped8(
    x,
    x_stride,
    codes,
    codes_stride,
    group_scales,
    num_groups,
    out,
    scales,
    bias,
    residual,
    rows,
    num_outputs,
    num_inputs,
    steps,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """As `multiply`; a step is a product for each of its groups."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)[None, :]
    last = tl.minimum(output, num_outputs - 1)
    of_output = codes + last.to(tl.int64)[:, None] * codes_stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    first = tl.program_id(1) * steps * INPUTS
    for start in range(first, tl.minimum(first + steps * INPUTS, num_inputs), INPUTS):
        for part in tl.static_range(INPUTS // GROUP):
            place = start + part * GROUP + tl.arange(0, GROUP)
            inside = place < num_inputs
            words = tl.load(of_output + place[None, :], inside[None, :], 0)
            inputs = tl.load(x + row * x_stride + place[:, None], inside[:, None] & (row < rows), 0)
            numbers = from_e4m3(words, inputs, NATIVE) if FLOAT else words.to(inputs.dtype)
            product = tl.dot(numbers, inputs, input_precision="ieee")
            # Behind the last input there may be no group, and x is zero.
            group = tl.minimum(start // GROUP + part, num_groups - 1)
            steps_of = tl.load(group_scales + group * num_outputs + last)
            sums += product * steps_of.to(tl.float32)[:, None]
    if FLOAT and not NATIVE:
        sums *= 256.0
    store(sums, output, out, scales, bias, residual, rows, num_outputs, ROWS)


@triton.jit
def _counted(codes, BFLOAT: tl.constexpr):
    """Small integers as numbers, from 128 or 1024 on: as the last bits of a mantissa."""
    bits = codes.to(tl.int16) | (0x4300 if BFLOAT else 0x6400)
    return bits.to(tl.bfloat16 if BFLOAT else tl.float16, bitcast=True)


@triton.jit
def _linear4(
    x,
    x_stride,
    codes,
    group_scales,
    zeros,
    num_groups,
    out,
    scales,
    bias,
    residual,
    rows,
    num_outputs,
    num_inputs,
    steps,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BFLOAT: tl.constexpr,
):
    """A step is a run of four products, each with the codes at one place of all its words."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)[None, :]
    word = tl.arange(0, WORDS)
    last = tl.minimum(output, num_outputs - 1)
    first = tl.program_id(1) * steps
    of_run = codes + first.to(tl.int64) * num_outputs * WORDS
    of_run += last[:, None] * WORDS + word[None, :]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for run in range(first, tl.minimum(first + steps, tl.cdiv(num_inputs, INPUTS))):
        words = tl.load(of_run)
        of_run += num_outputs * WORDS
        product = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for quarter in tl.static_range(INPUTS // WORDS):
            place = run * INPUTS + quarter * WORDS + word[:, None]
            inside = (place < num_inputs) & (row < rows)
            inputs = tl.load(x + row * x_stride + place, inside, 0)
            # Behind the last input there may be no group, and x is zero.
            group = (run * INPUTS + quarter * WORDS) // GROUP
            at = tl.minimum(group, num_groups - 1) * num_outputs + last
            numbers = _counted(words >> 4 * quarter & 15, BFLOAT)
            if zeros is None:
                numbers -= 136.0 if BFLOAT else 1032.0
            else:
                numbers -= _counted(tl.load(zeros + at), BFLOAT)[:, None]
            numbers = numbers.to(inputs.dtype)
            product = tl.dot(numbers, inputs, product, input_precision="ieee")
            if (quarter + 1) * WORDS % GROUP == 0:
                sums += product * tl.load(group_scales + at).to(tl.float32)[:, None]
                product = tl.zeros((OUTPUTS, ROWS), tl.float32)
    store(sums, output, out, scales, bias, residual, rows, num_outputs, ROWS)


def _example(shape: Shape) -> None:
    num_outputs, num_inputs = 2 * shape.intermediate, shape.hidden
    x, scales = meta(16, num_inputs), meta(num_outputs, dtype=torch.float32)
    linear_int8(x, Weight8(meta(num_outputs, num_inputs, dtype=torch.int8), scales))
    linear_fp8(x, Weight8(meta(num_outputs, num_inputs, dtype=torch.float8_e4m3fn), scales))
    for group_size in GROUP_SIZES_8:
        steps = meta(triton.cdiv(num_inputs, group_size), num_outputs, dtype=torch.float32)
        for function, dtype in ((linear_int8, torch.int8), (linear_fp8, torch.float8_e4m3fn)):
            numbers = meta(num_outputs, num_inputs, dtype=dtype)
            function(x, Weight8(numbers, steps, group_size))
    codes = meta(triton.cdiv(num_inputs, RUN), num_outputs, RUN_WORDS, dtype=torch.int16)
    for group_size in GROUP_SIZES:
        groups = (triton.cdiv(num_inputs, group_size), num_outputs)
        steps = meta(*groups, dtype=torch.float16)
        for zeros in (None, meta(*groups, dtype=torch.uint8)):
            linear_int4(x, Weight4(codes, steps, zeros, num_inputs, group_size))


SPECS = per_shape("linear_quantised", _example)
