"""See `chatkv_kernels.linear_quantised`. The programs of `linear`, whose weights become numbers of
x's dtype in registers, exactly; scales are applied to float32 sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.linear import Tiles, launch, store
from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.gpu.target import target_of
from chatkv_kernels.linear_quantised import GROUP_SIZES, RUN, Weight4, Weight8

TILES8 = Tiles(outputs=128, step_inputs=128, stages=3)
TILES4 = Tiles(outputs=128, step_inputs=RUN, stages=6)
RUN_BYTES = tl.constexpr(RUN // 2)


def linear_int8(
    x: Tensor, weight: Weight8, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    codes, scales = weight
    tensors = (codes, codes.stride(0))
    constants = {"FLOAT": False, "NATIVE": False}
    return launch(_linear8, x, len(codes), tensors, TILES8, scales, bias, residual, **constants)


def linear_fp8(
    x: Tensor, weight: Weight8, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    codes, scales = weight
    tensors = (codes.view(torch.uint8), codes.stride(0))
    constants = {"FLOAT": True, "NATIVE": target_of(x.device).arch >= 89}
    return launch(_linear8, x, len(codes), tensors, TILES8, scales, bias, residual, **constants)


def linear_int4(
    x: Tensor, weight: Weight4, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    runs, num_outputs, _ = weight.codes.shape
    constants = {"GROUP": runs * RUN // len(weight.scales)}
    return launch(_linear4, x, num_outputs, weight, TILES4, None, bias, residual, **constants)


@triton.jit
def _from_e4m3(codes, like, NATIVE: tl.constexpr):
    """The numbers of codes in the dtype of `like`; without hardware for it, 256 times too small."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    # The bits of e4m3 as those of a float16 of the same digits, whose exponent is biased by 8 more.
    words = codes.to(tl.int16)
    words = (words & 0x7F) << 7 | (words & 0x80) << 8
    return words.to(tl.float16, bitcast=True).to(like.dtype)


@triton.jit
def _linear8(
    x,
    x_stride,
    weight,
    weight_stride,
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
    FLOAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)[None, :]
    # Outputs past the end read the last one: nothing is written of them.
    of_output = weight + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * weight_stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    first = tl.program_id(1) * steps * INPUTS
    for start in range(first, tl.minimum(first + steps * INPUTS, num_inputs), INPUTS):
        place = start + tl.arange(0, INPUTS)
        inside = place < num_inputs
        codes = tl.load(of_output + place[None, :], inside[None, :], 0)
        inputs = tl.load(x + row * x_stride + place[:, None], inside[:, None] & (row < rows), 0)
        numbers = _from_e4m3(codes, inputs, NATIVE) if FLOAT else codes.to(inputs.dtype)
        sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
    if FLOAT and not NATIVE:
        sums *= 256.0
    store(sums, output, out, scales, bias, residual, rows, num_outputs, ROWS)


@triton.jit
def _linear4(
    x,
    x_stride,
    codes,
    group_scales,
    zeros,
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
):
    """A step is a run: the lower halves of its bytes are one product, the upper ones another."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)[None, :]
    byte = tl.arange(0, RUN_BYTES)
    last = tl.minimum(output, num_outputs - 1)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    first = tl.program_id(1) * steps
    of_run = codes + first.to(tl.int64) * num_outputs * RUN_BYTES
    of_run += last[:, None] * RUN_BYTES + byte[None, :]
    for run in range(first, tl.minimum(first + steps, num_inputs // INPUTS)):
        pairs = tl.load(of_run)
        of_run += num_outputs * RUN_BYTES
        inputs = x + row * x_stride + run * INPUTS + byte[:, None]
        lower_inputs = tl.load(inputs, row < rows, 0)
        upper_inputs = tl.load(inputs + RUN_BYTES, row < rows, 0)
        group = run * INPUTS // GROUP
        place = group * num_outputs + last
        zero = 8 if zeros is None else tl.load(zeros + place).to(tl.int8)[:, None]
        lower = ((pairs & 15).to(tl.int8) - zero).to(inputs.dtype.element_ty)
        step = tl.load(group_scales + place).to(tl.float32)[:, None]
        if GROUP < INPUTS:
            sums += tl.dot(lower, lower_inputs, input_precision="ieee") * step
            zero = 8 if zeros is None else tl.load(zeros + place + num_outputs).to(tl.int8)[:, None]
            step = tl.load(group_scales + place + num_outputs).to(tl.float32)[:, None]
            upper = ((pairs >> 4).to(tl.int8) - zero).to(inputs.dtype.element_ty)
            sums += tl.dot(upper, upper_inputs, input_precision="ieee") * step
        else:
            upper = ((pairs >> 4).to(tl.int8) - zero).to(inputs.dtype.element_ty)
            product = tl.dot(lower, lower_inputs, input_precision="ieee")
            product = tl.dot(upper, upper_inputs, product, input_precision="ieee")
            sums += product * step
    store(sums, output, out, scales, bias, residual, rows, num_outputs, ROWS)


def _example(shape: Shape) -> None:
    num_outputs, num_inputs = 2 * shape.intermediate, shape.hidden
    x, scales = meta(16, num_inputs), meta(num_outputs, dtype=torch.float32)
    linear_int8(x, Weight8(meta(num_outputs, num_inputs, dtype=torch.int8), scales))
    linear_fp8(x, Weight8(meta(num_outputs, num_inputs, dtype=torch.float8_e4m3fn), scales))
    codes = meta(num_inputs // RUN, num_outputs, RUN // 2, dtype=torch.uint8)
    for group_size in GROUP_SIZES:
        groups = (num_inputs // group_size, num_outputs)
        steps = meta(*groups, dtype=torch.float16)
        linear_int4(x, Weight4(codes, steps, None))
        linear_int4(x, Weight4(codes, steps, meta(*groups, dtype=torch.uint8)))


SPECS = per_shape("linear_quantised", _example)
