"""See `chatkv_kernels.packed`.

A program takes one slab, the keys or values of one head of a block, in groups of 8 elements: their
codes are two bytes and one, and what a thread stores of them is 16 bytes. An escape's number is the
count of escapes before it, of its slab (`first`), of groups before it, and in its group.

Where a payload goes depends on the escapes of those before it. So KV is read twice: once to find
each channel's base and to count, once to write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.packed import CODEC_ID, FORMAT_VERSION, HEAD_BYTES, check_pool
from chatkv_kernels.packed import ESCAPE as _ESCAPE
from chatkv_kernels.packed import LOWER_BASES as _LOWER_BASES

GROUPS = 256  # in a tile
ESCAPE = tl.constexpr(_ESCAPE)
LOWER_BASES = tl.constexpr(_LOWER_BASES)
HEAD = tl.constexpr(HEAD_BYTES)
FIRST_BYTES = tl.constexpr(FORMAT_VERSION | CODEC_ID << 8 | 2 << 16)


def unpack_packed(payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor) -> None:
    check_pool(pool)
    _, layers, _, heads, tokens, head_dim = pool.shape
    bits = pool.view(torch.int16)
    if table.numel():
        _unpack[(table.numel(), layers * 2 * heads)](
            payloads,
            offsets,
            bits,
            table,
            layers,
            heads,
            tokens,
            head_dim,
            *bits.stride()[:4],
            HALF=pool.dtype == torch.float16,
            GROUPS=GROUPS,
            num_warps=4,
        )


def pack_packed(pool: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    check_pool(pool)
    _, layers, _, heads, tokens, head_dim = pool.shape
    bits = pool.view(torch.int16)
    is_half = pool.dtype == torch.float16
    num_blocks, slabs = table.numel(), layers * 2 * heads
    size = slabs * tokens * head_dim
    fixed = HEAD_BYTES + slabs * (4 + head_dim) + size
    fixed += (2 if is_half else 1) * (round8(size // 4) + round8(size // 8))

    bases = bits.new_empty(num_blocks, slabs, head_dim, dtype=torch.uint8)
    counts = bits.new_empty(num_blocks, slabs, dtype=torch.int32)
    offsets = bits.new_zeros(num_blocks + 1, dtype=torch.int64)
    payloads = bits.new_empty(num_blocks * (fixed + size), dtype=torch.uint8)  # if all escape
    if not num_blocks:
        return payloads, offsets
    where = (layers, heads, tokens, head_dim, *bits.stride()[:4])
    _measure[(num_blocks, slabs)](
        bits,
        table,
        bases,
        counts,
        *where,
        HALF=is_half,
        TOKENS=triton.next_power_of_2(tokens),
        CHANNELS=triton.next_power_of_2(head_dim),
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
        HALF=is_half,
        GROUPS=GROUPS,
        num_warps=4,
    )
    return payloads, offsets


def round8(size: int) -> int:
    return -(-size // 8) * 8


@triton.jit
def up_to_8(size):
    return (size + 7) // 8 * 8


@triton.jit
def slab_of(pool, block, slab, heads, block_stride, layer_stride, kv_stride, head_stride):
    """Where the keys or values of one head of a block begin in the pool."""
    layer, kv, head = slab // (2 * heads), slab // heads % 2, slab % heads
    pool += block.to(tl.int64) * block_stride + layer.to(tl.int64) * layer_stride
    return pool + kv.to(tl.int64) * kv_stride + head.to(tl.int64) * head_stride


@triton.jit
def zero_padding(section, size):
    """The bytes behind a section up to a multiple of 8."""
    place = size + tl.arange(0, 8)
    tl.store(section + place, tl.zeros((8,), tl.uint8), place < up_to_8(size))


@triton.jit
def _sections(payload, slabs, size, head_dim, HALF: tl.constexpr):
    """Where a payload's base, low, codes, rest and escapes begin; `size` elements in all."""
    base = payload + HEAD + up_to_8(4 * slabs)
    low = base + up_to_8(slabs * head_dim)
    code_low = low + up_to_8(size)
    code_high = code_low + up_to_8(size // 4)
    rest_low = code_high + up_to_8(size // 8)
    rest_high = rest_low
    escapes = rest_low
    if HALF:
        rest_high = rest_low + up_to_8(size // 4)
        escapes = rest_high + up_to_8(size // 8)
    return base, low, code_low, code_high, rest_low, rest_high, escapes


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
    layers,
    heads,
    tokens,
    head_dim,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
):
    index, slab = tl.program_id(0), tl.program_id(1)
    slabs = layers * 2 * heads
    num_groups = tokens * head_dim // 8
    payload = payloads + tl.multiple_of(tl.load(offsets + index), 8)
    base, low, code_low, code_high, rest_low, rest_high, escapes = _sections(
        payload, slabs, slabs * num_groups * 8, head_dim, HALF
    )
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
        channel = (group * 8 % head_dim)[:, None] + place
        codes = _read3(code_low, code_high, numbered, inside)
        exponent = tl.load(base + slab * head_dim + channel, each, 0).to(tl.int32) - codes
        is_escape, rank, count = _numbered(codes, inside)
        # A damaged count must not lead out of the payload.
        found = is_escape & (seen + rank < num_escapes)
        aside = tl.load(escapes + seen + rank, found, 0).to(tl.int32)
        exponent = tl.where(is_escape, aside, exponent)
        seen += count
        byte = tl.load(low + numbered[:, None] * 8 + place, each, 0).to(tl.int32)
        if HALF:
            rest = _read3(rest_low, rest_high, numbered, inside)
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
    layers,
    heads,
    tokens,
    head_dim,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of each channel of a slab the base that leaves the fewest escapes, and how many."""
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
    channel = tl.arange(0, CHANNELS)
    token = tl.arange(0, TOKENS)[:, None]
    inside = (token < tokens) & (channel < head_dim)[None, :]
    bits = tl.load(source + token * head_dim + channel[None, :], inside, 0).to(tl.int32)
    exponents = bits >> 10 & 31 if HALF else bits >> 7 & 0xFF
    top = tl.max(exponents, 0)
    best = top
    fewest = tl.full((CHANNELS,), TOKENS + 1, tl.int32)
    for lower in tl.static_range(LOWER_BASES + 1):
        base = top - tl.minimum(top, lower)
        escapes = ((base[None, :] - exponents & 0xFF) >= ESCAPE) & inside
        num_escapes = tl.sum(escapes.to(tl.int32), 0)
        best = tl.where(num_escapes < fewest, base, best)
        fewest = tl.minimum(num_escapes, fewest)
    number = index.to(tl.int64) * tl.num_programs(1) + slab
    tl.store(bases + number * head_dim + channel, best.to(tl.uint8), channel < head_dim)
    tl.store(counts + number, tl.sum(tl.where(channel < head_dim, fewest, 0)))


@triton.jit
def _pack(
    pool,
    table,
    bases,
    ends,
    payloads,
    offsets,
    layers,
    heads,
    tokens,
    head_dim,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One slab; `ends` are the escapes up to each slab's end."""
    index, slab = tl.program_id(0), tl.program_id(1)
    slabs = layers * 2 * heads
    num_groups = tokens * head_dim // 8
    size = slabs * num_groups * 8
    payload = payloads + tl.multiple_of(tl.load(offsets + index), 8)
    base, low, code_low, code_high, rest_low, rest_high, escapes = _sections(
        payload, slabs, size, head_dim, HALF
    )
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
    bases += number * head_dim
    place = tl.arange(0, 8)[None, :]
    for start in range(0, num_groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = group < num_groups
        each = inside[:, None]
        numbered = slab * num_groups + group
        channel = (group * 8 % head_dim)[:, None] + place
        bits = tl.load(source + group[:, None] * 8 + place, each, 0).to(tl.int32) & 0xFFFF
        if HALF:
            exponent, byte = bits >> 10 & 31, bits & 0xFF
            _write3(rest_low, rest_high, numbered, inside, bits >> 13 & 4 | bits >> 8 & 3)
        else:
            exponent, byte = bits >> 7 & 0xFF, bits >> 8 & 0x80 | bits & 0x7F
        tl.store(low + numbered[:, None] * 8 + place, byte.to(tl.uint8), each)
        of_channel = tl.load(bases + channel, each, 0)
        # The base of a channel is written with its first token.
        is_first = each & (group * 8 < head_dim)[:, None]
        tl.store(base + slab * head_dim + channel, of_channel, is_first)
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


SPECS = per_shape("pack_packed, unpack_packed", _example)
