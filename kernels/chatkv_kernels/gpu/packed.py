"""See `chatkv_kernels.packed`.

A program takes one slab, the keys or values of one head of a block, in groups of 8 elements: their
codes are two bytes and one, and what a thread stores of them is 16 bytes. An escape's number is the
count of escapes before it, of its slab (`first`), of groups before it, and in its group.

Where a payload goes depends on the escapes of those before it. So KV is read twice: once to find
each channel's base and to count, once to write.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.payload import slab_of, zero_padding
from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.packed import CODEC_ID, FORMAT_VERSION, HEAD_BYTES, check_pool
from chatkv_kernels.packed import ESCAPE as _ESCAPE

GROUPS = 256  # in a tile
ESCAPE = tl.constexpr(_ESCAPE)
FIRST_BYTES = tl.constexpr(FORMAT_VERSION | CODEC_ID << 8 | 2 << 16)


def unpack_packed(payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor) -> None:
    check_pool(pool)
    _, layers, _, heads, tokens, head_dim = pool.shape
    bits = pool.view(torch.int16)
    is_half = pool.dtype == torch.float16
    if table.numel():
        _unpack[(table.numel(), layers * 2 * heads)](
            payloads,
            offsets,
            bits,
            table,
            heads,
            tokens,
            *bits.stride()[:4],
            *_sections(layers * 2 * heads, tokens * head_dim, head_dim, is_half),
            HALF=is_half,
            CHANNELS=head_dim,
            GROUPS=GROUPS,
            num_warps=4,
        )


def pack_packed(pool: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    check_pool(pool)
    _, layers, _, heads, tokens, head_dim = pool.shape
    bits = pool.view(torch.int16)
    is_half = pool.dtype == torch.float16
    num_blocks, slabs = table.numel(), layers * 2 * heads
    sections = _sections(slabs, tokens * head_dim, head_dim, is_half)
    fixed = 8 * sections[-1]

    bases = bits.new_empty(num_blocks, slabs, head_dim, dtype=torch.uint8)
    counts = bits.new_empty(num_blocks, slabs, dtype=torch.int32)
    offsets = bits.new_zeros(num_blocks + 1, dtype=torch.int64)
    # As large as they are if every element escapes.
    payloads = bits.new_empty(num_blocks * (fixed + slabs * tokens * head_dim), dtype=torch.uint8)
    if not num_blocks:
        return payloads, offsets
    where = (heads, tokens, *bits.stride()[:4])
    _measure[(num_blocks, slabs)](
        bits,
        table,
        bases,
        counts,
        *where,
        HALF=is_half,
        CHANNELS=head_dim,
        ROWS=triton.next_power_of_2(tokens),
        COLUMNS=triton.next_power_of_2(head_dim),
        num_warps=8,
    )
    ends = counts.cumsum(1, dtype=torch.int32)
    offsets[1:] = (fixed + (ends[:, -1].long() + 7) // 8 * 8).cumsum(0)
    _pack[(num_blocks, slabs)](
        bits,
        table,
        bases,
        ends,
        payloads,
        offsets,
        *where,
        *sections,
        HALF=is_half,
        CHANNELS=head_dim,
        GROUPS=GROUPS,
        num_warps=4,
    )
    return payloads, offsets


def _sections(slabs: int, slab_size: int, head_dim: int, is_half: bool) -> list[int]:
    """Where a payload's base, low, code, rest and escapes begin, in units of 8 bytes."""
    size = slabs * slab_size
    three_bits = (size // 4, size // 8)
    sizes = [4 * slabs, slabs * head_dim, size, *three_bits, *(three_bits if is_half else (0, 0))]
    return list(accumulate((-(-size // 8) for size in sizes), initial=HEAD_BYTES // 8))[1:]


@triton.jit
def _read3(low, high, group, inside):
    """Three bits of each of 8 elements: [groups, 8]."""
    place = tl.arange(0, 8)[None, :]
    pairs = tl.load(low.to(tl.pointer_type(tl.uint16)) + group, inside, 0).to(tl.int32)
    tops = tl.load(high + group, inside, 0).to(tl.int32)
    return pairs[:, None] >> 2 * place & 3 | (tops[:, None] >> place & 1) << 2


@triton.jit
def _write3(low, high, group, inside, numbers):
    place = tl.arange(0, 8)[None, :]
    pairs = tl.sum((numbers & 3) << 2 * place, 1)
    tl.store(low.to(tl.pointer_type(tl.uint16)) + group, pairs.to(tl.uint16), inside)
    tl.store(high + group, tl.sum(numbers >> 2 << place, 1).to(tl.uint8), inside)


@triton.jit
def _numbered(codes, inside):
    """For every element the escapes before it; and how many there are in all."""
    is_escape = ((codes == ESCAPE) & inside[:, None]).to(tl.int32)
    of_group = tl.sum(is_escape, 1)
    before = tl.cumsum(of_group, 0) - of_group
    rank = before[:, None] + tl.cumsum(is_escape, 1) - is_escape
    return is_escape != 0, rank, tl.sum(of_group)


@triton.jit
def _unpack(
    payloads,
    offsets,
    pool,
    table,
    heads,
    tokens,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    base_at,
    low_at,
    code_low_at,
    code_high_at,
    rest_low_at,
    rest_high_at,
    escapes_at,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    index, slab = tl.program_id(0), tl.program_id(1)
    num_groups = tokens * CHANNELS // 8
    payload = payloads + tl.multiple_of(tl.load(offsets + index), 8)
    escapes = payload + 8 * escapes_at
    counts = payload.to(tl.pointer_type(tl.int32))
    num_escapes = tl.load(counts + 1)
    seen = tl.load(counts + 2 + slab)
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
    place = tl.arange(0, 8)[None, :]
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = group < num_groups
        each = inside[:, None]
        numbered = slab * num_groups + group
        channel = (group * 8 % CHANNELS)[:, None] + place
        codes = _read3(payload + 8 * code_low_at, payload + 8 * code_high_at, numbered, inside)
        exponent = (
            tl.load(payload + 8 * base_at + slab * CHANNELS + channel, each, 0).to(tl.int32) - codes
        )
        is_escape, rank, count = _numbered(codes, inside)
        # A damaged count must not lead out of the payload.
        found = is_escape & (seen + rank < num_escapes)
        aside = tl.load(escapes + seen + rank, found, 0).to(tl.int32)
        exponent = tl.where(is_escape, aside, exponent)
        seen += count
        byte = tl.load(payload + 8 * low_at + numbered[:, None] * 8 + place, each, 0).to(tl.int32)
        if HALF:
            rest = _read3(payload + 8 * rest_low_at, payload + 8 * rest_high_at, numbered, inside)
            bits = (rest & 4) << 13 | (exponent & 31) << 10 | (rest & 3) << 8 | byte
        else:
            bits = (byte & 0x80) << 8 | (exponent & 0xFF) << 7 | byte & 0x7F
        tl.store(out + group[:, None] * 8 + place, bits.to(tl.int16), each)


@triton.jit
def _measure(
    pool,
    table,
    bases,
    counts,
    heads,
    tokens,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Of each channel of a slab the base that leaves the fewest escapes, and how many.

    With the base `lower` below the largest exponent, those that are less than `lower` or more than
    `lower` + 6 below the largest one escape. Byte `lower` of an integer counts them: one sum
    for the four of them.
    """
    index, slab = tl.program_id(0), tl.program_id(1)
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
    channel = tl.arange(0, COLUMNS)
    token = tl.arange(0, ROWS)[:, None]
    inside = (token < tokens) & (channel < CHANNELS)[None, :]
    bits = tl.load(source + token * CHANNELS + channel[None, :], inside, 0).to(tl.int32)
    exponents = bits >> 10 & 31 if HALF else bits >> 7 & 0xFF
    top = tl.max(exponents, 0)
    distance = top[None, :] - exponents
    above = 0x01010100 << 8 * tl.minimum(distance, 3)
    # In two steps: a shift by 32 is not defined.
    shift = 4 * (10 - tl.minimum(tl.maximum(distance, 6), 10))
    below = 0x01010101 >> shift >> shift
    counted = tl.sum(tl.where(inside, above | below, 0), 0)
    best, fewest = top, counted & 0xFF
    for lower in tl.static_range(1, 4):
        num_escapes = counted >> 8 * lower & 0xFF
        best = tl.where(num_escapes < fewest, top - lower, best)
        fewest = tl.minimum(num_escapes, fewest)
    number = index.to(tl.int64) * tl.num_programs(1) + slab
    tl.store(bases + number * CHANNELS + channel, best.to(tl.uint8), channel < CHANNELS)
    tl.store(counts + number, tl.sum(tl.where(channel < CHANNELS, fewest, 0)))


@triton.jit
def _pack(
    pool,
    table,
    bases,
    ends,
    payloads,
    offsets,
    heads,
    tokens,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    base_at,
    low_at,
    code_low_at,
    code_high_at,
    rest_low_at,
    rest_high_at,
    escapes_at,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One slab; `ends` are the escapes up to each slab's end."""
    index, slab = tl.program_id(0), tl.program_id(1)
    slabs = tl.num_programs(1)
    num_groups = tokens * CHANNELS // 8
    payload = payloads + tl.multiple_of(tl.load(offsets + index), 8)
    code_low, code_high = payload + 8 * code_low_at, payload + 8 * code_high_at
    rest_low, rest_high = payload + 8 * rest_low_at, payload + 8 * rest_high_at
    escapes = payload + 8 * escapes_at
    size = slabs * num_groups * 8
    number = index.to(tl.int64) * slabs + slab
    seen = tl.load(ends + number - 1, slab > 0, 0)
    num_escapes = tl.load(ends + number - slab + slabs - 1)
    head = payload.to(tl.pointer_type(tl.int32))
    tl.store(head + 2 + slab, seen)
    if slab == 0:
        tl.store(head, FIRST_BYTES | (1 << 24 if HALF else 0))
        tl.store(head + 1, num_escapes)
        zero_padding(code_low, size // 4)
        zero_padding(code_high, size // 8)
        if HALF:
            zero_padding(rest_low, size // 4)
            zero_padding(rest_high, size // 8)
        zero_padding(escapes, num_escapes)
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
    bases += number * CHANNELS
    place = tl.arange(0, 8)[None, :]
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = group < num_groups
        each = inside[:, None]
        numbered = slab * num_groups + group
        channel = (group * 8 % CHANNELS)[:, None] + place
        bits = tl.load(source + group[:, None] * 8 + place, each, 0).to(tl.int32) & 0xFFFF
        if HALF:
            exponent, byte = bits >> 10 & 31, bits & 0xFF
            _write3(rest_low, rest_high, numbered, inside, bits >> 13 & 4 | bits >> 8 & 3)
        else:
            exponent, byte = bits >> 7 & 0xFF, bits >> 8 & 0x80 | bits & 0x7F
        tl.store(payload + 8 * low_at + numbered[:, None] * 8 + place, byte.to(tl.uint8), each)
        of_channel = tl.load(bases + channel, each, 0)
        # The base of a channel is written with its first token.
        is_first = each & (group * 8 < CHANNELS)[:, None]
        tl.store(payload + 8 * base_at + slab * CHANNELS + channel, of_channel, is_first)
        codes = tl.minimum(of_channel.to(tl.int32) - exponent & 0xFF, ESCAPE)
        _write3(code_low, code_high, numbered, inside, codes)
        is_escape, rank, count = _numbered(codes, inside)
        tl.store(escapes + seen + rank, exponent.to(tl.uint8), is_escape)
        seen += count


def _example(shape: Shape) -> None:
    pool = meta(512, 4, 2, shape.num_kv_heads, 64, shape.head_dim)
    table = meta(128, dtype=torch.int32)
    payloads, offsets = pack_packed(pool, table)
    unpack_packed(payloads, offsets, pool, table)


SPECS = per_shape("packed", _example)
