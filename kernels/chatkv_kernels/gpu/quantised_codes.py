"""Codes, the numbers they stand for, and where a payload of `int8`, `fp8` or `int4` has them."""

from __future__ import annotations

import triton
import triton.language as tl

from chatkv_kernels.quantised import E4M3_MAX as _E4M3_MAX
from chatkv_kernels.quantised import GROUP_CHANNELS
from chatkv_kernels.quantised import HALF_MAX as _HALF_MAX
from chatkv_kernels.quantised import HEAD as _HEAD

HEAD = tl.constexpr(_HEAD.size)
WIDTH = tl.constexpr(GROUP_CHANNELS)
E4M3_MAX = tl.constexpr(_E4M3_MAX)
HALF_MAX = tl.constexpr(_HALF_MAX)
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # added to a small number it leaves no fraction


@triton.jit
def to_floats(bits, HALF: tl.constexpr):
    if HALF:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_bits(floats, HALF: tl.constexpr):
    """Rounded to nearest, ties to even; what is too large for float16 becomes its largest."""
    if HALF:
        limited = tl.minimum(tl.maximum(floats, -HALF_MAX), HALF_MAX)
        return limited.to(tl.float16).to(tl.int16, bitcast=True)
    words = floats.to(tl.int32, bitcast=True)
    return (words + 0x7FFF + (words >> 16 & 1) >> 16).to(tl.int16)


@triton.jit
def divided(numbers, step):
    """In steps; where all numbers of a group are equal the step is zero, and so are these."""
    return tl.div_rn(numbers, tl.where(step == 0, float("inf"), step))


@triton.jit
def decoded(codes, SIGNED: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """What codes stand for, in steps."""
    if FLOAT:
        # The bits of e4m3 as those of a float32 of the same digits, 2 ** 120 times too small.
        words = (codes & 0x7F) << 20 | (codes & 0x80) << 24
        return words.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    if SIGNED:
        codes = (codes ^ 1 << BITS - 1) - (1 << BITS - 1) if BITS == 8 else codes - 8
    return codes.to(tl.float32)


@triton.jit
def encoded(steps, SIGNED: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """The codes of the nearest numbers, ties to even."""
    if FLOAT:
        size = tl.minimum(tl.abs(steps), E4M3_MAX)
        words = size.to(tl.int32, bitcast=True)
        # The mantissa rounded to 3 of its 23 bits, the exponent's zero moved from 127 to 7.
        normal = (words + 0x7FFFF + (words >> 20 & 1) >> 20) - (120 << 3)
        subnormal = (size * 512.0 + TO_INTEGER - TO_INTEGER).to(tl.int32)
        sign = steps.to(tl.int32, bitcast=True) >> 24 & 0x80
        return tl.where(size < 0.015625, subnormal, normal) | sign
    LOWEST: tl.constexpr = -(1 << BITS - 1) if SIGNED else 0
    limited = tl.minimum(tl.maximum(steps, LOWEST), LOWEST + (1 << BITS) - 1)
    codes = (limited + TO_INTEGER - TO_INTEGER).to(tl.int32)
    if SIGNED and BITS == 4:
        codes += 8
    return codes & 0xFF


@triton.jit
def sections(
    payload, count, num_whole, num_rest, TURNED: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Where whole tokens, key scales, keys, value scales and values begin; and bytes of the last
    three. `count` is layers * heads."""
    GROUPS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    whole = payload + HEAD + (2 * CHANNELS if TURNED else 0)
    key_scales = whole + 4 * CHANNELS * (count * num_whole)
    keys = key_scales + (2 if FLOAT else 4) * CHANNELS * count
    code_bytes = CHANNELS * BITS // 8 * (count * num_rest)
    step_bytes = 2 * GROUPS * (count * num_rest)
    value_scales = keys + (code_bytes + 7) // 8 * 8
    values = value_scales + (step_bytes + 7) // 8 * 8
    return whole, key_scales, keys, value_scales, values, code_bytes, step_bytes
