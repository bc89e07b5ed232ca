"""The kernels of `pack_int8`, `pack_fp8` and `pack_int4` (see `quantised`): scales first, since
where a payload goes depends on whether those before it can be quantised."""

from __future__ import annotations

import triton
import triton.language as tl

from chatkv_kernels.gpu.payload import slab_of, zero_padding
from chatkv_kernels.gpu.quantised_codes import (
    E4M3_MAX,
    HEAD,
    WIDTH,
    divided,
    encoded,
    sections,
    to_floats,
)
from chatkv_kernels.quantised import SINK_TOKENS

SINKS = tl.constexpr(SINK_TOKENS)


@triton.jit
def _key_halves(
    source, token, pair, inside, cos, sin, position, CHANNELS: tl.constexpr, HALF: tl.constexpr
):
    """Both halves of keys before the rotary embedding, and of what is stored."""
    SECOND: tl.constexpr = CHANNELS // 2
    first = to_floats(tl.load(source + token * CHANNELS + pair, inside, 0), HALF)
    second = to_floats(tl.load(source + token * CHANNELS + pair + SECOND, inside, 0), HALF)
    x, y = first, second
    if cos is not None:
        angle = (position + token).to(tl.int64) * SECOND + pair
        c = tl.load(cos + angle, inside, 0)
        s = tl.load(sin + angle, inside, 0)
        x = first * c + second * s
        y = second * c - first * s
    return x, y, first, second


@triton.jit
def _key_scales(x, inside, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """Step and offset of each channel."""
    largest = tl.max(tl.where(inside, tl.abs(x) if FLOAT else x, float("-inf")), 0)
    if FLOAT:
        step = tl.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32))
        return step.to(tl.float16), step.to(tl.float16)
    offset = tl.min(tl.where(inside, x, float("inf")), 0).to(tl.float16)
    levels = tl.full(largest.shape, (1 << BITS) - 1, tl.float32)
    return tl.div_rn(largest - offset.to(tl.float32), levels).to(tl.float16), offset


@triton.jit
def _value_scales(x, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """The step of each group: of the last axis."""
    size = tl.abs(x)
    largest = tl.max(size, 2)
    if FLOAT:
        return tl.div_rn(largest, tl.full(largest.shape, E4M3_MAX, tl.float32)).to(tl.float16)
    if BITS == 8:
        return tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)).to(tl.float16)
    # With its sign: that of the first of those that are largest. Of bits, since -0 + 0 is 0.
    place = tl.arange(0, WIDTH)[None, None, :]
    first = tl.min(tl.where(size == largest[:, :, None], place, WIDTH), 2)
    bits = tl.where(place == first[:, :, None], x.to(tl.int32, bitcast=True), 0)
    return (tl.sum(bits, 2).to(tl.float32, bitcast=True) * -0.125).to(tl.float16)


@triton.jit
def _num_bad(numbers):
    """How many are infinite or not a number."""
    return tl.sum((~(tl.abs(numbers) < float("inf"))).to(tl.int32))


@triton.jit
def measure(
    pool,
    table,
    starts,
    cos,
    sin,
    key_scales,
    value_scales,
    is_fine,
    layers,
    heads,
    tokens,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The scales of one slab, and whether it can be quantised: no infinities, no NaN."""
    index, slab = tl.program_id(0), tl.program_id(1)
    SECOND: tl.constexpr = CHANNELS // 2
    position = tl.load(starts + index)
    source = slab_of(
        pool,
        tl.load(table + index),
        slab,
        heads,
        block_stride,
        layer_stride,
        kv_stride,
        head_stride,
    )
    number = (index * layers + slab // (2 * heads)).to(tl.int64) * heads + slab % heads
    num_whole = -position + SINKS
    token = tl.arange(0, ROWS)[:, None]
    is_quantised = (token >= num_whole) & (token < tokens)
    num_bad = 0
    if slab // heads % 2 == 1:
        NUM_GROUPS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
        group = tl.arange(0, GROUPS)[None, :]
        channel = group[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
        of_group = is_quantised[:, :, None] & (channel < CHANNELS)
        bits = tl.load(source + token[:, :, None] * CHANNELS + channel, of_group, 0)
        values = to_floats(bits, HALF)
        steps = _value_scales(values, BITS, FLOAT)
        target = value_scales + (number * tokens + token) * NUM_GROUPS + group
        tl.store(target, steps, is_quantised & (group < NUM_GROUPS))
        num_bad = _num_bad(values) + _num_bad(steps.to(tl.float32))
    else:
        pair = tl.arange(0, PAIRS)
        of_pair = is_quantised & (pair < SECOND)[None, :]
        x, y, first, second = _key_halves(
            source, token, pair[None, :], of_pair, cos, sin, position, CHANNELS, HALF
        )
        step_x, offset_x = _key_scales(x, of_pair, BITS, FLOAT)
        step_y, offset_y = _key_scales(y, of_pair, BITS, FLOAT)
        written = pair < tl.where(num_whole < tokens, SECOND, 0)
        scales = key_scales + number * (CHANNELS if FLOAT else 2 * CHANNELS) + pair
        tl.store(scales, step_x, written)
        tl.store(scales + SECOND, step_y, written)
        if not FLOAT:
            tl.store(scales + CHANNELS, offset_x, written)
            tl.store(scales + CHANNELS + SECOND, offset_y, written)
        # Of padding, and where all tokens are whole, there is no least and no largest number.
        size = tl.abs(step_x.to(tl.float32)) + tl.abs(step_y.to(tl.float32))
        size += tl.abs(offset_x.to(tl.float32)) + tl.abs(offset_y.to(tl.float32))
        num_bad = _num_bad(first) + _num_bad(second) + _num_bad(tl.where(written, size, 0.0))
    tl.store(is_fine + index * tl.num_programs(1) + slab, (num_bad == 0).to(tl.int32))


@triton.jit
def pack(
    pool,
    table,
    starts,
    cos,
    sin,
    frequencies,
    num_wholes,
    key_scales,
    value_scales,
    payloads,
    offsets,
    layers,
    heads,
    tokens,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HALF: tl.constexpr,
    BITS: tl.constexpr,
    FLOAT: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    CODEC: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    index, slab = tl.program_id(0), tl.program_id(1)
    SECOND: tl.constexpr = CHANNELS // 2
    NUM_GROUPS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    KEY_SCALES: tl.constexpr = CHANNELS if FLOAT else 2 * CHANNELS
    position = tl.load(starts + index)
    num_whole = tl.load(num_wholes + index)
    num_rest = tokens - num_whole
    payload = payloads + tl.multiple_of(tl.load(offsets + index), 8)
    whole, key_steps, keys, value_steps, values, code_bytes, step_bytes = sections(
        payload, layers * heads, num_whole, num_rest, cos is not None, BITS, FLOAT, CHANNELS
    )
    if (slab == 0) & (tl.program_id(2) == 0):
        head = payload.to(tl.pointer_type(tl.int32))
        tl.store(head, FORMAT | CODEC << 8 | 2 << 16 | (1 << 24 if HALF else 0))
        tl.store(head + 1, position)
        tl.store(head + 2, num_whole | num_rest << 16)
        tl.store(head + 3, SECOND if cos is not None else 0)
        if cos is not None:
            of_pair = tl.arange(0, PAIRS)
            frequency = tl.load(frequencies + of_pair, of_pair < SECOND, 0)
            target = (payload + HEAD).to(tl.pointer_type(tl.float32)) + of_pair
            tl.store(target, frequency, of_pair < SECOND)
        if num_rest > 0:
            zero_padding(keys, code_bytes)
            zero_padding(value_steps, step_bytes)
            zero_padding(values, code_bytes)

    source = slab_of(
        pool,
        tl.load(table + index),
        slab,
        heads,
        block_stride,
        layer_stride,
        kv_stride,
        head_stride,
    )
    number = slab // (2 * heads) * heads + slab % heads  # of this head among those of all layers
    of_all = index.to(tl.int64) * (layers * heads) + number
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (token < tokens) & (pair < SECOND)
    coded = inside & (token >= num_whole)
    row = number * num_rest + token - num_whole
    is_value = slab // heads % 2

    kept = inside & (token < num_whole)
    bits = source + token * CHANNELS + pair
    target = whole.to(tl.pointer_type(tl.int16)) + (slab * num_whole + token) * CHANNELS + pair
    tl.store(target, tl.load(bits, kept, 0), kept)
    tl.store(target + SECOND, tl.load(bits + SECOND, kept, 0), kept)

    if is_value == 1:
        x = to_floats(tl.load(bits, coded, 0), HALF)
        y = to_floats(tl.load(bits + SECOND, coded, 0), HALF)
        scales = value_scales + (of_all * tokens + token) * NUM_GROUPS
        x = divided(x, tl.load(scales + pair // WIDTH, coded, 0).to(tl.float32))
        y = divided(y, tl.load(scales + (SECOND + pair) // WIDTH, coded, 0).to(tl.float32))
        first, second = encoded(x, True, BITS, FLOAT), encoded(y, True, BITS, FLOAT)
        group = tl.arange(0, GROUPS)[None, :]
        is_group = (token >= num_whole) & (token < tokens) & (group < NUM_GROUPS)
        steps_of_row = value_steps.to(tl.pointer_type(tl.float16)) + row * NUM_GROUPS + group
        tl.store(steps_of_row, tl.load(scales + group, is_group, 0), is_group)
    else:
        x, y, _, _ = _key_halves(source, token, pair, coded, cos, sin, position, CHANNELS, HALF)
        of_channel = key_scales + of_all * KEY_SCALES + pair
        of_key = pair < SECOND
        step_x = tl.load(of_channel, of_key, 0)
        step_y = tl.load(of_channel + SECOND, of_key, 0)
        # Scales are written by the program of the first tokens, where any token is quantised.
        writes = tl.where(tl.program_id(2) == 0, tl.minimum(num_rest, 1), 0)
        written = pair < SECOND * writes
        steps = key_steps.to(tl.pointer_type(tl.float16)) + number * KEY_SCALES + pair
        tl.store(steps, step_x, written)
        tl.store(steps + SECOND, step_y, written)
        if not FLOAT:
            offset_x = tl.load(of_channel + CHANNELS, of_key, 0)
            offset_y = tl.load(of_channel + CHANNELS + SECOND, of_key, 0)
            tl.store(steps + CHANNELS, offset_x, written)
            tl.store(steps + CHANNELS + SECOND, offset_y, written)
            x -= offset_x.to(tl.float32)
            y -= offset_y.to(tl.float32)
        first = encoded(divided(x, step_x.to(tl.float32)), False, BITS, FLOAT)
        second = encoded(divided(y, step_y.to(tl.float32)), False, BITS, FLOAT)

    codes = tl.where(is_value == 1, values, keys) + row * (CHANNELS * BITS // 8) + pair
    if BITS == 4:
        tl.store(codes, (first | second << 4).to(tl.uint8), coded)
    else:
        tl.store(codes, first.to(tl.uint8), coded)
        tl.store(codes + SECOND, second.to(tl.uint8), coded)
