"""See `chatkv_kernels.quantised`.

A program takes some tokens of one slab, the keys or values of one head of a block, as two tiles: of
the channels below head_dim / 2 and of those above, which the rotation turns together and which
share the bytes of int4. The store computes in float32 and rounds each step, so these are the only
kernels that are compiled without fused multiplication and addition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.payload import slab_of, zero_padding
from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.packed import FORMAT_VERSION, check_pool
from chatkv_kernels.quantised import FP8, GROUP_CHANNELS, INT4, INT8, SINK_TOKENS, Grid, Turn

ROWS = 32  # tokens of a program
HEAD = tl.constexpr(16)  # bytes
WIDTH = tl.constexpr(GROUP_CHANNELS)
SINKS = tl.constexpr(SINK_TOKENS)
E4M3_MAX = tl.constexpr(448.0)
HALF_MAX = tl.constexpr(65504.0)
TO_INTEGER = tl.constexpr(1.5 * 2**23)  # added to a small number it leaves no fraction


def unpack_int8(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    _launch_unpack(payloads, offsets, pool, table, turn, INT8)


def unpack_fp8(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    _launch_unpack(payloads, offsets, pool, table, turn, FP8)


def unpack_int4(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    _launch_unpack(payloads, offsets, pool, table, turn, INT4)


def pack_int8(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    return _launch_pack(pool, table, starts, turn, INT8)


def pack_fp8(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    return _launch_pack(pool, table, starts, turn, FP8)


def pack_int4(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    return _launch_pack(pool, table, starts, turn, INT4)


def _launch_unpack(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None, grid: Grid
) -> None:
    check_pool(pool)
    _, layers, _, heads, tokens, _ = pool.shape
    if not table.numel():
        return
    _, cos, sin = turn or (None, None, None)
    _unpack[(table.numel(), layers * 2 * heads, triton.cdiv(tokens, ROWS))](
        payloads,
        offsets,
        pool.view(torch.int16),
        table,
        cos,
        sin,
        layers,
        heads,
        tokens,
        *pool.stride()[:4],
        **_constants(pool, grid),
        ROWS=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _launch_pack(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None, grid: Grid
) -> tuple[Tensor, Tensor]:
    check_pool(pool)
    _, layers, _, heads, tokens, head_dim = pool.shape
    num_blocks, slabs = table.numel(), layers * 2 * heads
    groups = triton.cdiv(head_dim, GROUP_CHANNELS)
    frequencies, cos, sin = turn or (None, None, None)

    halves = pool.new_empty(0, dtype=torch.float16)
    key_scales = halves.new_empty(num_blocks, slabs // 2, grid.key_scales, head_dim)
    value_scales = halves.new_empty(num_blocks, slabs // 2, tokens, groups)
    is_fine = halves.new_empty(num_blocks, slabs, dtype=torch.int32)
    offsets = halves.new_zeros(num_blocks + 1, dtype=torch.int64)
    # As large as any of them may be: whole, or with all tokens quantised.
    head = HEAD.value + (0 if turn is None else 2 * head_dim)
    whole = slabs * tokens * head_dim * 2
    scaled = 2 * key_scales[:1].numel() + 2 * value_scales[:1].numel()
    payloads = halves.new_empty(num_blocks * (head + whole + scaled + 24), dtype=torch.uint8)
    if not num_blocks:
        return payloads, offsets
    blocks = (pool.view(torch.int16), table, starts)
    where = (layers, heads, tokens, *pool.stride()[:4])
    constants = _constants(pool, grid)
    _measure[(num_blocks, slabs)](
        *blocks,
        cos,
        sin,
        key_scales,
        value_scales,
        is_fine,
        *where,
        **constants,
        ROWS=triton.next_power_of_2(tokens),
        GROUPS=triton.next_power_of_2(groups),
        num_warps=8,
        enable_fp_fusion=False,
    )
    sinks = (SINK_TOKENS - starts).clamp(0, tokens)
    num_whole = torch.where(is_fine.amin(1) > 0, sinks, tokens).to(torch.int32)
    offsets[1:] = _sizes(num_whole.long(), pool.shape, head, grid).cumsum(0)
    _pack[(num_blocks, slabs, triton.cdiv(tokens, ROWS))](
        *blocks,
        cos,
        sin,
        frequencies,
        num_whole,
        key_scales,
        value_scales,
        payloads,
        offsets,
        *where,
        **constants,
        CODEC=grid.codec_id,
        FORMAT=FORMAT_VERSION,
        ROWS=ROWS,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return payloads, offsets


def _constants(pool: Tensor, grid: Grid) -> dict[str, int | bool]:
    head_dim = pool.shape[-1]
    return {
        "HALF": pool.dtype == torch.float16,
        "BITS": grid.bits,
        "FLOAT": grid.is_float,
        "CHANNELS": head_dim,
        "PAIRS": triton.next_power_of_2(head_dim // 2),
    }


def _sizes(num_whole: Tensor, shape: torch.Size, head: int, grid: Grid) -> Tensor:
    """Bytes of payloads with so many whole tokens."""
    _, layers, _, heads, tokens, head_dim = shape
    slabs = layers * heads
    rows = slabs * (tokens - num_whole)
    codes = (rows * (head_dim * grid.bits // 8) + 7) // 8 * 8
    steps = (rows * 2 * triton.cdiv(head_dim, GROUP_CHANNELS) + 7) // 8 * 8
    key_scales = torch.where(rows > 0, slabs * grid.key_scales * head_dim * 2, 0)
    sizes: Tensor = head + num_whole * (2 * slabs * head_dim * 2) + key_scales + steps + 2 * codes
    return sizes


@triton.jit
def _to_floats(bits, HALF: tl.constexpr):
    if HALF:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bits(floats, HALF: tl.constexpr):
    """Rounded to nearest, ties to even; what is too large for float16 becomes its largest."""
    if HALF:
        limited = tl.minimum(tl.maximum(floats, -HALF_MAX), HALF_MAX)
        return limited.to(tl.float16).to(tl.int16, bitcast=True)
    words = floats.to(tl.int32, bitcast=True)
    return (words + 0x7FFF + (words >> 16 & 1) >> 16).to(tl.int16)


@triton.jit
def _divided(numbers, step):
    """In steps; where all numbers of a group are equal the step is zero, and so are these."""
    return tl.div_rn(numbers, tl.where(step == 0, float("inf"), step))


@triton.jit
def _numbers(codes, SIGNED: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """What codes stand for, in steps."""
    if FLOAT:
        # The bits of e4m3 as those of a float32 of the same digits, 2 ** 120 times too small.
        words = (codes & 0x7F) << 20 | (codes & 0x80) << 24
        return words.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    if SIGNED:
        codes = (codes ^ 1 << BITS - 1) - (1 << BITS - 1) if BITS == 8 else codes - 8
    return codes.to(tl.float32)


@triton.jit
def _coded(steps, SIGNED: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
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
def _sections(
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


@triton.jit
def _unpack(
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
    whole, key_scales, keys, value_scales, values, _, _ = _sections(
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
        x = _numbers(first, True, BITS, FLOAT) * tl.load(scales + pair // WIDTH, coded, 0)
        y = _numbers(second, True, BITS, FLOAT)
        y *= tl.load(scales + (SECOND + pair) // WIDTH, coded, 0)
    else:
        of_key = pair < SECOND
        of_channel = key_scales.to(tl.pointer_type(tl.float16))
        of_channel += number * (CHANNELS if FLOAT else 2 * CHANNELS) + pair
        x = _numbers(first, False, BITS, FLOAT) * tl.load(of_channel, of_key, 0)
        y = _numbers(second, False, BITS, FLOAT) * tl.load(of_channel + SECOND, of_key, 0)
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
    tl.store(out, tl.where(kept, tl.load(whole, kept, 0), _to_bits(x, HALF)), inside)
    whole += SECOND
    tl.store(out + SECOND, tl.where(kept, tl.load(whole, kept, 0), _to_bits(y, HALF)), inside)


@triton.jit
def _key_halves(
    source, token, pair, inside, cos, sin, position, CHANNELS: tl.constexpr, HALF: tl.constexpr
):
    """Both halves of keys before the rotary embedding, and of what is stored."""
    SECOND: tl.constexpr = CHANNELS // 2
    first = _to_floats(tl.load(source + token * CHANNELS + pair, inside, 0), HALF)
    second = _to_floats(tl.load(source + token * CHANNELS + pair + SECOND, inside, 0), HALF)
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
def _measure(
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
        values = _to_floats(bits, HALF)
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
def _pack(
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
    whole, key_steps, keys, value_steps, values, code_bytes, step_bytes = _sections(
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
        x = _to_floats(tl.load(bits, coded, 0), HALF)
        y = _to_floats(tl.load(bits + SECOND, coded, 0), HALF)
        scales = value_scales + (of_all * tokens + token) * NUM_GROUPS
        x = _divided(x, tl.load(scales + pair // WIDTH, coded, 0).to(tl.float32))
        y = _divided(y, tl.load(scales + (SECOND + pair) // WIDTH, coded, 0).to(tl.float32))
        first, second = _coded(x, True, BITS, FLOAT), _coded(y, True, BITS, FLOAT)
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
        first = _coded(_divided(x, step_x.to(tl.float32)), False, BITS, FLOAT)
        second = _coded(_divided(y, step_y.to(tl.float32)), False, BITS, FLOAT)

    codes = tl.where(is_value == 1, values, keys) + row * (CHANNELS * BITS // 8) + pair
    if BITS == 4:
        tl.store(codes, (first | second << 4).to(tl.uint8), coded)
    else:
        tl.store(codes, first.to(tl.uint8), coded)
        tl.store(codes + SECOND, second.to(tl.uint8), coded)


def _example(shape: Shape) -> None:
    pool = meta(512, 4, 2, shape.num_kv_heads, 64, shape.head_dim)
    table, starts = meta(128, dtype=torch.int32), meta(128, dtype=torch.int32)
    angles = meta(131072, shape.head_dim // 2, dtype=torch.float32)
    turn = Turn(angles[0], angles, angles)
    for pack, unpack in (
        (pack_int8, unpack_int8),
        (pack_fp8, unpack_fp8),
        (pack_int4, unpack_int4),
    ):
        payloads, offsets = pack(pool, table, starts, turn)
        unpack(payloads, offsets, pool, table, turn)


SPECS = per_shape("quantised int8, fp8, int4", _example)
