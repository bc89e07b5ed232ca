"""See `chatkv_kernels.linear`. A decode step reads every weight once: what counts is how much of
the weights is on its way at any time.

A program multiplies a tile of outputs, over a part of the inputs, with all rows at once, filled up
to 16 for the matrix units: so any number of rows takes the same time and sums in the same order,
and a row's result does not depend on its company. Where there are few outputs the inputs are split
among more programs, whose float32 sums are added up, always in the same order, by a second kernel.
All of that follows from the shape of the weight alone: it is the same in every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.linear import MAX_ROWS

PROGRAMS = 512  # about as many as are in flight at a time on the GPUs of today
MIN_STEPS = 8  # of a program: fewer and its pipeline never fills
COMBINED = 256  # outputs of a program that adds up splits


@dataclass(frozen=True)
class Tiles:
    """How a weight is cut: a step is what a program multiplies at once."""

    outputs: int
    step_inputs: int
    stages: int  # steps that are on their way to a program

    def splits(self, num_outputs: int, num_inputs: int) -> int:
        """How many programs share the inputs of one tile of outputs."""
        tiles = triton.cdiv(num_outputs, self.outputs)
        steps = triton.cdiv(num_inputs, self.step_inputs)
        splits = 1
        while 2 * splits * tiles <= PROGRAMS and steps >= 2 * splits * MIN_STEPS:
            splits *= 2
        return splits


TILES = Tiles(outputs=64, step_inputs=64, stages=4)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    tensors = (weight, weight.stride(0))
    constants = {"FLOAT": False, "NATIVE": False}
    return launch(multiply, x, len(weight), tensors, TILES, None, bias, residual, **constants)


def launch(
    kernel: Any,
    x: Tensor,
    num_outputs: int,
    weight: tuple[Any, ...],
    tiles: Tiles,
    scales: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    **constants: Any,
) -> Tensor:
    """Run `kernel` on all splits, and add these up. `scales` are of outputs."""
    rows, num_inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows, not {rows}")
    out = x.new_empty(rows, num_outputs)
    if not rows:
        return out
    splits = tiles.splits(num_outputs, num_inputs)
    steps = triton.cdiv(triton.cdiv(num_inputs, tiles.step_inputs), splits)
    sums = x.new_empty(splits, rows, num_outputs, dtype=torch.float32) if splits > 1 else None
    finish = (None, None, None) if splits > 1 else (scales, bias, residual)
    kernel[(triton.cdiv(num_outputs, tiles.outputs), splits)](
        x,
        x.stride(0),
        *weight,
        out if sums is None else sums,
        *finish,
        rows,
        num_outputs,
        num_inputs,
        steps,
        OUTPUTS=tiles.outputs,
        INPUTS=tiles.step_inputs,
        ROWS=MAX_ROWS,
        num_warps=4,
        num_stages=tiles.stages,
        **constants,
    )
    if sums is not None:
        _combine[(triton.cdiv(num_outputs, COMBINED), rows)](
            sums,
            out,
            scales,
            bias,
            residual,
            num_outputs,
            SPLITS=splits,
            TILE=COMBINED,
            num_warps=4,
        )
    return out


@triton.jit
def finished(sums, output, row, inside, num_outputs, scales, bias, residual):
    """What follows a product; `inside` is of the tile of `output` and `row`, which broadcast."""
    if scales is not None:
        sums *= tl.load(scales + output, output < num_outputs, 0)
    if bias is not None:
        sums += tl.load(bias + output, output < num_outputs, 0).to(tl.float32)
    if residual is not None:
        sums += tl.load(residual + row * num_outputs + output, inside, 0).to(tl.float32)
    return sums


@triton.jit
def store(sums, output, out, scales, bias, residual, rows, num_outputs, ROWS: tl.constexpr):
    """Where inputs are split, `out` is of sums [splits, rows, outputs], else the result."""
    row = tl.arange(0, ROWS)[None, :]
    output = output[:, None]
    inside = (output < num_outputs) & (row < rows)
    sums = finished(sums, output, row, inside, num_outputs, scales, bias, residual)
    target = out + (tl.program_id(1) * rows + row) * num_outputs + output
    tl.store(target, sums.to(out.dtype.element_ty), inside)


@triton.jit
def from_e4m3(codes, like, NATIVE: tl.constexpr):
    """The numbers of codes in the dtype of `like`; without hardware for it, 256 times too small."""
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    # The bits of e4m3 as those of a float16 of the same digits, whose exponent is biased by 8 more.
    words = codes.to(tl.int16)
    words = (words & 0x7F) << 7 | (words & 0x80) << 8
    return words.to(tl.float16, bitcast=True).to(like.dtype)


@triton.jit
def multiply(
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
    """Weights are numbers of x's dtype, or codes that stand for some: int8, or with FLOAT e4m3."""
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
        numbers = from_e4m3(codes, inputs, NATIVE) if FLOAT else codes.to(inputs.dtype)
        sums = tl.dot(numbers, inputs, sums, input_precision="ieee")
    if FLOAT and not NATIVE:
        sums *= 256.0
    store(sums, output, out, scales, bias, residual, rows, num_outputs, ROWS)


@triton.jit
def _combine(
    sums, out, scales, bias, residual, num_outputs, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1)
    inside = output < num_outputs
    place = row * num_outputs + output
    total = tl.zeros((TILE,), tl.float32)
    for split in tl.static_range(SPLITS):
        offset = split * tl.num_programs(1) * num_outputs
        total += tl.load(sums + offset + place, inside, 0)
    total = finished(total, output, row, inside, num_outputs, scales, bias, residual)
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def _example(shape: Shape) -> None:
    x, wide = meta(16, shape.hidden), meta(16, shape.intermediate)
    linear(x, meta(2 * shape.intermediate, shape.hidden))
    linear(x, meta(shape.hidden, shape.hidden), residual=x)
    linear(wide, meta(shape.hidden, shape.intermediate), meta(shape.hidden), x)


SPECS = per_shape("linear", _example)
