"""Linear layers whose weights take 8 or 4 bits, for the few rows of a decode step.

What weights become, [out_features, in_features] at first:

    int8    codes int8 [out, in], scales float32 [out]             weight = scale * code
    fp8     codes float8_e4m3fn [out, in], scales float32 [out]    weight = scale * code
            both also with scales of groups, [ceil(in / group), out] of any float dtype
    int4    codes int16 [ceil(in / 128), out, 32], scales float16 [ceil(in / group), out], and
            zeros uint8 of the size of scales, or none             weight = scale * (code - zero)

A group is 32, 64 or 128 neighbouring inputs of one output, of 8-bit codes also 16; zero is 8 where
there are no zeros. Scales and zeros may be of any float dtype where they come from elsewhere. A
run of 128 inputs takes 32 words of 16 bits: bits 4 j to 4 j + 3 of word i, from the lowest, hold
the code of input 32 j + i of the run, and anything behind the last input. So one mask and shift
finds the codes of neighbouring inputs in neighbouring words, as matrix units want them, and all
outputs of a run are one stretch of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel
from chatkv_kernels.linear import finish, wide

RUN = 128  # inputs
RUN_WORDS = 32
GROUP_SIZES = (32, 64, 128)
GROUP_SIZES_8 = (16, *GROUP_SIZES)
E4M3_MAX = 448.0


class Weight8(NamedTuple):
    """`int8` or `fp8`; group_size is 0 where an output has one scale."""

    codes: Tensor
    scales: Tensor
    group_size: int = 0


class Weight4(NamedTuple):
    """`int4`."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    num_inputs: int
    group_size: int


@has_kernel
def linear_int8(
    x: Tensor, weight: Weight8, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As `linear`, with a weight of `quantise_weight_int8`."""
    return _linear(x, dequantise_weight_8(weight, wide(x).dtype), bias, residual)


@has_kernel
def linear_fp8(
    x: Tensor, weight: Weight8, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As `linear`, with a weight of `quantise_weight_fp8`."""
    return _linear(x, dequantise_weight_8(weight, wide(x).dtype), bias, residual)


@has_kernel
def linear_int4(
    x: Tensor, weight: Weight4, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """As `linear`, with a weight of `quantise_weight_int4`."""
    return _linear(x, dequantise_weight_int4(weight, wide(x).dtype), bias, residual)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    return finish(x, F.linear(wide(x), weight), bias, residual)


def quantise_weight_int8(weight: Tensor) -> Weight8:
    """Codes from -127 to 127."""
    scales, steps = _per_output(weight, 127.0)
    return Weight8(steps.round().to(torch.int8), scales)


def quantise_weight_fp8(weight: Tensor) -> Weight8:
    """Codes are e4m3 (arXiv 2209.05433), the largest of an output 448."""
    scales, steps = _per_output(weight, E4M3_MAX)
    return Weight8(steps.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales)


def quantise_weight_int4(weight: Tensor, group_size: int = 128, symmetric: bool = True) -> Weight4:
    """Of a symmetric group the largest weight, whatever its sign, falls on code 0; else the least
    and the largest one, and zero, are in reach. Raises ValueError on other group sizes."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"an int4 group must be one of {GROUP_SIZES} inputs, not {group_size}")
    groups = F.pad(weight.float(), (0, -weight.shape[1] % group_size))
    groups = groups.view(len(weight), -1, group_size)
    if symmetric:
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scales = (largest / -8).half()
        zeros = torch.full_like(scales, 8)
    else:
        least, most = groups.amin(-1, True).clamp(max=0), groups.amax(-1, True).clamp(min=0)
        scales = ((most - least) / 15).half()
        zeros = (-least / _divisor(scales)).round().clamp(0, 15)
    codes = (groups / _divisor(scales)).round() + zeros
    return Weight4(
        pack_int4(codes.clamp(0, 15).flatten(1)),
        scales[..., 0].T.contiguous(),
        None if symmetric else zeros[..., 0].T.to(torch.uint8).contiguous(),
        weight.shape[1],
        group_size,
    )


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0..15, [out, in], as those of a Weight4."""
    padded = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % RUN))
    low, high = padded.view(codes.shape[0], -1, 2, 2, RUN_WORDS).unbind(3)
    halves = low | high << 4  # [out, runs, bytes of a word, words]
    return halves.permute(1, 0, 3, 2).contiguous().view(torch.int16).squeeze(-1)


def dequantise_weight_8(weight: Weight8, dtype: torch.dtype) -> Tensor:
    """[out, in] of `dtype`."""
    codes, scales, group_size = weight
    numbers = codes.to(torch.promote_types(dtype, torch.float32))
    if group_size:
        numbers *= scales.T.repeat_interleave(group_size, 1)[:, : codes.shape[1]]
    else:
        numbers *= scales[:, None]
    return numbers.to(dtype)


def codes_int4(weight: Weight4) -> Tensor:
    """Codes 0..15 as uint8, [out, in]."""
    places = torch.arange(0, 16, 4, dtype=torch.int16, device=weight.codes.device)[:, None]
    codes = (weight.codes.transpose(0, 1)[:, :, None] >> places).bitwise_and_(15)
    return codes.to(torch.uint8).flatten(1)[:, : weight.num_inputs]


def dequantise_weight_int4(weight: Weight4, dtype: torch.dtype) -> Tensor:
    """[out, in] of `dtype`."""

    def of_inputs(numbers: Tensor) -> Tensor:
        return numbers.T.repeat_interleave(weight.group_size, 1)[:, : weight.num_inputs]

    numbers = codes_int4(weight).to(torch.promote_types(dtype, torch.float32))
    numbers -= 8 if weight.zeros is None else of_inputs(weight.zeros)
    numbers *= of_inputs(weight.scales)
    return numbers.to(dtype)


def _per_output(weight: Tensor, largest_code: float) -> tuple[Tensor, Tensor]:
    """Scales [out], and the weight in steps of them."""
    scales = weight.float().abs().amax(1) / largest_code
    return scales, weight.float() / _divisor(scales)[:, None]


def _divisor(scales: Tensor) -> Tensor:
    """A scale to divide by: where all weights are zero it is, and so are codes."""
    return torch.where(scales == 0, torch.inf, scales.float())
