"""The store's `int8`, `fp8` and `int4` codecs: the bytes of chatkv_store/codec_quantised.py.

Where payloads lie, and which KV can be packed, is as in `packed`. Keys are quantised per channel
before the rotary embedding, so both ways need the angles: `Turn`. Given the store's own cosines,
all results are the store's to the bit, payloads and KV; only where a channel holds zeros of both
signs may the sign of its offset, a zero, be another.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel
from chatkv_kernels.packed import FORMAT_VERSION, check_pool

SINK_TOKENS = 4  # at the start of a sequence, kept whole
GROUP_CHANNELS = 32
E4M3_MAX = 448.0
HALF_MAX = 65504.0
# Format version, codec, bytes per element, dtype; first position, whole and other tokens,
# frequencies, zero.
HEAD = struct.Struct("<BBBBIHHHH")


class Turn(NamedTuple):
    """The rotary embedding that keys carry. All float32.

    frequencies: [head_dim / 2]; cos, sin: [num_positions, head_dim / 2], of position * frequency.
    The store takes them from numpy; those of torch may differ in the last bit.
    """

    frequencies: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Grid:
    """The numbers that codes stand for."""

    codec_id: int
    bits: int  # per code
    is_float: bool = False

    @property
    def key_scales(self) -> int:
        """Per channel: a step and, of integers, an offset."""
        return 1 if self.is_float else 2

    @property
    def half(self) -> int:
        """The largest value of a group is -half or half - 1 steps."""
        return 1 << self.bits - 1


INT8, FP8, INT4 = Grid(3, 8), Grid(4, 8, is_float=True), Grid(5, 4)


def payload_sizes(num_whole: Tensor, shape: torch.Size, turned: bool, grid: Grid) -> Tensor:
    """Bytes of payloads of which so many tokens are whole, int64. shape: that of a block, [layers,
    2, num_kv_heads, tokens, head_dim]; turned: keys carry a rotation."""
    layers, _, heads, tokens, head_dim = shape
    slabs = layers * heads
    rows = slabs * (tokens - num_whole)
    codes = (rows * (head_dim * grid.bits // 8) + 7) // 8 * 8
    steps = (rows * 2 * -(-head_dim // GROUP_CHANNELS) + 7) // 8 * 8
    key_scales = torch.where(rows > 0, slabs * grid.key_scales * head_dim * 2, 0)
    head = HEAD.size + (2 * head_dim if turned else 0)
    sizes: Tensor = head + num_whole * (2 * slabs * head_dim * 2) + key_scales + steps + 2 * codes
    return sizes


@has_kernel
def unpack_int8(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    """pool[table[i]] = the KV of the payload at offsets[i]; tensors as in `unpack_packed`.

    turn: None where keys carry no rotation; else it has the payloads' frequencies and reaches the
    position of their last token.
    """
    _unpack(payloads, offsets, pool, table, turn, INT8)


@has_kernel
def unpack_fp8(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    """As `unpack_int8`."""
    _unpack(payloads, offsets, pool, table, turn, FP8)


@has_kernel
def unpack_int4(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    """As `unpack_int8`."""
    _unpack(payloads, offsets, pool, table, turn, INT4)


@has_kernel
def pack_int8(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    """The payloads of pool[table[i]], whose first token has the position starts[i], int32 [n].

    Tensors and what is returned as in `pack_packed`; turn as in `unpack_int8`.
    """
    return _pack(pool, table, starts, turn, INT8)


@has_kernel
def pack_fp8(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    """As `pack_int8`."""
    return _pack(pool, table, starts, turn, FP8)


@has_kernel
def pack_int4(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    """As `pack_int8`."""
    return _pack(pool, table, starts, turn, INT4)


def _pack(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None, grid: Grid
) -> tuple[Tensor, Tensor]:
    check_pool(pool)
    packed = [
        _packed(pool[block], start, turn, grid)
        for block, start in zip(table.tolist(), starts.tolist(), strict=True)
    ]
    sizes = torch.tensor([0] + [payload.numel() for payload in packed], device=pool.device)
    empty = torch.empty(0, dtype=torch.uint8, device=pool.device)
    return torch.cat([empty, *packed]), sizes.cumsum(0)


def _packed(block: Tensor, start: int, turn: Turn | None, grid: Grid) -> Tensor:
    """The payload of one block [layers, 2, heads, tokens, head_dim]."""
    tokens = block.shape[3]
    num_whole = min(tokens, max(0, SINK_TOKENS - start))
    floats = block[:, :, :, num_whole:].float()
    keys = _turned(floats[:, 0], start + num_whole, turn, backwards=True)
    scales, sections = _quantised(keys, floats[:, 1], grid) if floats.numel() else ([], [])
    if not all(part.isfinite().all() for part in (floats, *scales)):
        num_whole, sections = tokens, []
    head = HEAD.pack(
        FORMAT_VERSION,
        grid.codec_id,
        2,
        int(block.dtype == torch.float16),
        start,
        num_whole,
        tokens - num_whole,
        0 if turn is None else len(turn.frequencies),
        0,
    )
    frequencies = [] if turn is None else [turn.frequencies]
    parts = [*frequencies, block[:, :, :, :num_whole], *sections]
    headed = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(block.device)
    return torch.cat([headed, *map(_padded, parts)])


def _quantised(keys: Tensor, values: Tensor, grid: Grid) -> tuple[list[Tensor], list[Tensor]]:
    """Scales; and the sections of keys and values [layers, heads, tokens, head_dim], float32."""
    groups = F.pad(values, (0, -values.shape[-1] % GROUP_CHANNELS))
    groups = groups.view(*values.shape[:-1], -1, GROUP_CHANNELS)
    if grid.is_float:
        key_scales = (keys.abs().amax(2, keepdim=True) / E4M3_MAX).half()
        value_scales = (groups.abs().amax(-1, keepdim=True) / E4M3_MAX).half()
        key_codes = _to_e4m3(keys / _divisor(key_scales))
        value_codes = _to_e4m3(groups / _divisor(value_scales))
    else:
        offset = keys.amin(2, keepdim=True).half()
        step = ((keys.amax(2, keepdim=True) - offset.float()) / (2 * grid.half - 1)).half()
        key_scales = torch.cat([step, offset], 2)
        key_codes = ((keys - offset.float()) / _divisor(step)).round()
        key_codes = key_codes.clamp(0, 2 * grid.half - 1).nan_to_num().to(torch.uint8)
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        divisor = -grid.half if grid.bits == 4 else grid.half - 1
        value_scales = ((largest if grid.bits == 4 else largest.abs()) / divisor).half()
        value_codes = (groups / _divisor(value_scales)).round().clamp(-grid.half, grid.half - 1)
        value_codes = value_codes.nan_to_num().to(torch.int8)
        value_codes = value_codes + grid.half if grid.bits == 4 else value_codes
    value_codes = value_codes.view(torch.uint8).flatten(-2)[..., : values.shape[-1]]
    if grid.bits == 4:
        key_codes, value_codes = _nibbles(key_codes), _nibbles(value_codes)
    scales = [key_scales, value_scales]
    return scales, [key_scales, key_codes, value_scales, value_codes]


def _unpack(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None, grid: Grid
) -> None:
    check_pool(pool)
    for offset, block in zip(offsets.tolist(), table.tolist(), strict=True):
        _unpack_one(payloads[offset:], pool[block], turn, grid)


def _unpack_one(payload: Tensor, out: Tensor, turn: Turn | None, grid: Grid) -> None:
    layers, _, heads, _, head_dim = out.shape
    head = bytes(payload[: HEAD.size].tolist())
    _, _, _, _, start, num_whole, num_rest, num_frequencies, _ = HEAD.unpack(head)
    at = HEAD.size + 4 * num_frequencies

    def section(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal at
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        taken = payload[at : at + num_bytes].clone()  # at an address that suits every dtype
        at += -(-num_bytes // 8) * 8
        return taken.view(dtype).view(shape)

    out[:, :, :, :num_whole] = section(out.dtype, layers, 2, heads, num_whole, head_dim)
    if not num_rest:
        return
    rows = (layers, heads, num_rest)
    code_bytes = head_dim * grid.bits // 8
    key_scales = section(torch.float16, layers, heads, grid.key_scales, head_dim).float()
    keys = _numbers(section(torch.uint8, *rows, code_bytes), grid, signed=False)
    value_scales = section(torch.float16, *rows, -(-head_dim // GROUP_CHANNELS)).float()
    values = _numbers(section(torch.uint8, *rows, code_bytes), grid, signed=True)
    keys = keys * key_scales[:, :, :1]
    if not grid.is_float:
        keys = keys + key_scales[:, :, 1:]
    values = values * value_scales.repeat_interleave(GROUP_CHANNELS, -1)[..., :head_dim]
    keys = _turned(keys, start + num_whole, turn)
    for kv, numbers in enumerate((keys, values)):
        if out.dtype == torch.float16:
            numbers = numbers.clamp(-HALF_MAX, HALF_MAX)
        out[:, kv, :, num_whole:] = numbers.to(out.dtype)


def _numbers(codes: Tensor, grid: Grid, signed: bool) -> Tensor:
    """What codes stand for, in steps; float32."""
    if grid.is_float:
        return codes.view(torch.float8_e4m3fn).float()
    if grid.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], -1)
        return codes.float() - grid.half if signed else codes.float()
    return (codes.view(torch.int8) if signed else codes).float()


def _turned(keys: Tensor, start: int, turn: Turn | None, backwards: bool = False) -> Tensor:
    """Keys [layers, heads, tokens, head_dim] from position `start` on, rotated."""
    if turn is None:
        return keys
    positions = slice(start, start + keys.shape[2])
    cos, sin = turn.cos[positions], turn.sin[positions]
    sin = -sin if backwards else sin
    first, second = keys.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _divisor(step: Tensor) -> Tensor:
    """A step to divide by: where all numbers of a group are equal it is zero, and so are codes."""
    return torch.where(step == 0, torch.inf, step.float())


def _to_e4m3(numbers: Tensor) -> Tensor:
    """Codes of the nearest numbers; |numbers| may exceed 448 by a rounding."""
    limited = numbers.clamp(-E4M3_MAX, E4M3_MAX)
    return limited.to(torch.float8_e4m3fn).view(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Channels i and i + head_dim / 2 as one byte."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _padded(section: Tensor) -> Tensor:
    section = section.contiguous().flatten().view(torch.uint8)
    return F.pad(section, (0, -section.numel() % 8))
