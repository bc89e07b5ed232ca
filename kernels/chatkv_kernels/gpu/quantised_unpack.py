"""The kernel of `unpack_int8`, `unpack_fp8` and `unpack_int4` (see `quantised`)."""

from __future__ import annotations

import triton
import triton.language as tl

from chatkv_kernels.gpu.payload import slab_of
from chatkv_kernels.gpu.quantised_codes import WIDTH, decoded, sections, to_bits


@triton.jit
def unpack(
    payloads,
    offsets,
    pool,
    table,
    cos,
    sin,
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
):
    index, slab = tl.program_id(0), tl.program_id(1)
    SECOND: tl.constexpr = CHANNELS // 2
    GROUPS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    ROW_BYTES: tl.constexpr = CHANNELS * BITS // 8
    payload = payloads + tl.multiple_of(tl.load(offsets + index), 8)
    position = tl.load(payload.to(tl.pointer_type(tl.int32)) + 1)
    counts = payload.to(tl.pointer_type(tl.uint16))
    num_whole = tl.load(counts + 4).to(tl.int32)
    num_rest = tl.load(counts + 5).to(tl.int32)
    whole, key_scales, keys, value_scales, values, _, _ = sections(
        payload, layers * heads, num_whole, num_rest, cos is not None, BITS, FLOAT, CHANNELS
    )
    number = slab // (2 * heads) * heads + slab % heads  # of this head among those of all layers
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (token < tokens) & (pair < SECOND)
    coded = inside & (token >= num_whole)
    row = number * num_rest + token - num_whole
    is_value = slab // heads % 2
    codes = tl.where(is_value == 1, values, keys) + row * ROW_BYTES + pair
    first = tl.load(codes, coded, 0).to(tl.int32)
    if BITS == 4:
        second = first >> 4
        first = first & 15
    else:
        second = tl.load(codes + SECOND, coded, 0).to(tl.int32)
    if is_value == 1:
        scales = value_scales.to(tl.pointer_type(tl.float16)) + row * GROUPS
        x = decoded(first, True, BITS, FLOAT) * tl.load(scales + pair // WIDTH, coded, 0)
        y = decoded(second, True, BITS, FLOAT)
        y *= tl.load(scales + (SECOND + pair) // WIDTH, coded, 0)
    else:
        of_key = pair < SECOND
        of_channel = key_scales.to(tl.pointer_type(tl.float16))
        of_channel += number * (CHANNELS if FLOAT else 2 * CHANNELS) + pair
        x = decoded(first, False, BITS, FLOAT) * tl.load(of_channel, of_key, 0)
        y = decoded(second, False, BITS, FLOAT) * tl.load(of_channel + SECOND, of_key, 0)
        if not FLOAT:
            x += tl.load(of_channel + CHANNELS, of_key, 0)
            y += tl.load(of_channel + CHANNELS + SECOND, of_key, 0)
        if cos is not None:
            angle = (position + token).to(tl.int64) * SECOND + pair
            c = tl.load(cos + angle, coded, 0)
            s = tl.load(sin + angle, coded, 0)
            turned = x * c - y * s
            y = y * c + x * s
            x = turned
    kept = inside & (token < num_whole)
    whole = whole.to(tl.pointer_type(tl.int16)) + (slab * num_whole + token) * CHANNELS + pair
    out = slab_of(
        pool,
        tl.load(table + index),
        slab,
        heads,
        block_stride,
        layer_stride,
        kv_stride,
        head_stride,
    )
    out += token * CHANNELS + pair
    tl.store(out, tl.where(kept, tl.load(whole, kept, 0), to_bits(x, HALF)), inside)
    whole += SECOND
    tl.store(out + SECOND, tl.where(kept, tl.load(whole, kept, 0), to_bits(y, HALF)), inside)
