"""`int8`, `fp8` and `int4`: fewer bits per element, quantised once, from the original.

Keys are quantised per channel, over all tokens of the block, since a channel of a key keeps its
place and scale from token to token; so before the rotary embedding, which mixes pairs of channels
by an angle that changes with the token. Values are quantised per token, in groups of 32 channels.
The first tokens of a sequence, on which attention leans heavily, are kept whole. (That keys want
channels and values tokens: KIVI, arXiv 2402.02750; keys before RoPE: KVQuant, arXiv 2401.18079;
sinks: arXiv 2309.17453.)

A payload, little-endian, every section padded with zeros to a multiple of 8 bytes. L layers, H
heads, D head_dim; W tokens are whole, the T others quantised; G = ceil(D / 32).

    head            u8 format version, u8 codec id, u8 bytes per element,
                    u8 dtype (0 bfloat16, 1 float16, 2 float32),
                    u32 position of the block's first token, u16 W, u16 T, u16 F, u16 zero
    frequencies     f32 [F]             F is D / 2, or 0 for keys that carry no rotation
    whole           bits [L, 2, H, W, D]  as they were
    key scales      f16 [L, H, 2, D]    per channel: step and offset; fp8: [L, H, 1, D], step alone
    keys            codes [L, H, T, D]
    value scales    f16 [L, H, T, G]    per token and group: step
    values          codes [L, H, T, D]

    int8, keys      u8   offset + step * code
    int8, values    i8   step * code
    int4, keys      0..15, offset + step * code
    int4, values    0..15, step * (code - 8); a step may be negative
    fp8             e4m3 (arXiv 2209.05433, no infinities), step * code

A byte of int4 holds channel i of a row in its lower half and channel i + D / 2 in its upper one:
the two that the rotation turns together.

Keys come out as x before rotation. With the angle a = f32(position) * frequency of a pair:

    key[i]         = x[i] * cos a - x[i + D/2] * sin a
    key[i + D/2]   = x[i + D/2] * cos a + x[i] * sin a

All arithmetic is in float32; results are rounded to the dtype, ties to even. A value that holds
infinities, NaN, or more than f16 scales can say, is kept whole altogether.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from chatkv_store.layout import DType
from chatkv_store.payloads import (
    DTYPES,
    FORMAT_VERSION,
    Bits,
    Bytes,
    Context,
    Floats,
    PayloadDamaged,
    Payloads,
    check_head,
    per_block,
)

SINK_TOKENS: Final = 4  # at the start of a sequence, kept whole
GROUP_CHANNELS: Final = 32

Halves = npt.NDArray[np.float16]

_HEAD = struct.Struct("<BBBBIHHHH")


class Quantised:
    """The shape of all three; `grid` says what a code means."""

    def __init__(self, number: int, name: str, grid: _Grid) -> None:
        self.id, self.name, self.family = number, name, name
        self._grid = grid

    def encode(self, bits: Bits, context: Context | None = None) -> bytes:
        context = context or Context("float32" if bits.itemsize == 4 else "bfloat16")
        tokens = bits.shape[3]
        num_whole = min(tokens, max(0, SINK_TOKENS - context.start))
        floats = _to_floats(bits[:, :, :, num_whole:], context.dtype)
        frequencies = context.inverse_frequencies
        sections = self._quantised(floats, context.start + num_whole, frequencies)
        if not sections:
            num_whole = tokens
        frequencies = np.empty(0, "<f4") if frequencies is None else frequencies.astype("<f4")
        head = _HEAD.pack(
            FORMAT_VERSION,
            self.id,
            bits.itemsize,
            DTYPES.index(context.dtype),
            context.start,
            num_whole,
            tokens - num_whole,
            len(frequencies),
            0,
        )
        whole = bits[:, :, :, :num_whole]
        return b"".join((head, *map(_padded, (frequencies, whole, *sections))))

    def _quantised(
        self, floats: Floats, start: int, frequencies: Floats | None
    ) -> list[npt.NDArray[Any]]:
        """Scales and codes of keys and values as sections; none where that cannot be done."""
        if not floats.size:
            return []
        with np.errstate(all="ignore"):
            turn = _turn(start, floats.shape[3], frequencies)
            keys = _rotated(floats[:, 0], turn, backwards=True)
            key_scales, key_codes = self._grid.keys(keys)
            value_scales, value_codes = self._grid.values(floats[:, 1])
        for numbers in (floats, key_scales, value_scales):
            if not np.isfinite(numbers).all():
                return []
        return [key_scales, key_codes, value_scales, value_codes]

    def decode(self, payloads: Payloads, out: Bits) -> None:
        blocks = per_block(out, len(payloads))
        # All are taken apart before the first is written: the last one may be damaged.
        values = [self._decoded(payloads, i, blocks[i]) for i in range(len(payloads))]
        for block, (whole, rest) in zip(blocks, values, strict=True):
            np.copyto(block[:, :, :, : whole.shape[3]], whole)
            np.copyto(block[:, :, :, whole.shape[3] :], rest)

    def _decoded(self, payloads: Payloads, index: int, block: Bits) -> tuple[Bits, Bits]:
        """The whole tokens and the quantised ones of one payload, as bits."""
        check_head(payloads, index, bytes((FORMAT_VERSION, self.id, block.itemsize)))
        head, sections = self._sections(payloads, index, block)
        layers, _, heads, tokens, head_dim = block.shape
        frequencies = next(sections).view("<f4")
        whole = next(sections).view(block.dtype)
        whole = whole.reshape(layers, 2, heads, head.num_whole, head_dim)
        shape = (1, heads, tokens - head.num_whole, head_dim)
        rest = np.empty((layers, 2, *shape[1:]), block.dtype)
        if not shape[2]:
            return whole, rest
        key_scales = next(sections).view("<f2").reshape(layers, 1, heads, -1, head_dim)
        keys = next(sections).reshape(layers, -1)
        value_scales = next(sections).view("<f2").reshape(layers, *shape[:3], -1)
        values = next(sections).reshape(layers, -1)
        for part in (frequencies, key_scales, value_scales):
            if not np.isfinite(part).all():
                raise PayloadDamaged(index, "a scale or a frequency is no number")
        turn = _turn(head.start + head.num_whole, shape[2], frequencies)
        for layer in range(layers):  # one at a time: what is in between stays in the cache
            found = self._grid.read_keys(key_scales[layer], keys[layer], shape)
            rest[layer, 0] = _to_bits(_rotated(found, turn), head.dtype)[0]
            found = self._grid.read_values(value_scales[layer], values[layer], shape)
            rest[layer, 1] = _to_bits(found, head.dtype)[0]
        return whole, rest

    def _sections(self, payloads: Payloads, index: int, block: Bits) -> tuple[_Head, Any]:
        """The head, and each section in its turn; checked to fit the block."""
        payload = payloads[index]
        head = _Head.unpack(payload, block)
        if head is None:
            raise PayloadDamaged(index, "its head is damaged")
        layers, _, heads, tokens, head_dim = block.shape
        sizes = [
            4 * head.num_frequencies,
            2 * layers * heads * head.num_whole * head_dim * block.itemsize,
        ]
        if head.num_whole < tokens:
            rows = layers * heads * (tokens - head.num_whole)
            sizes += [
                2 * layers * heads * head_dim * self._grid.key_scales,
                rows * head_dim * self._grid.bits // 8,
                2 * rows * -(-head_dim // GROUP_CHANNELS),
                rows * head_dim * self._grid.bits // 8,
            ]
        if payload.size != _HEAD.size + sum(-(-size // 8) * 8 for size in sizes):
            raise PayloadDamaged(index, f"{payload.size} bytes do not fill the block")
        sections, at = [], _HEAD.size
        for size in sizes:
            sections.append(payload[at : at + size])
            at += -(-size // 8) * 8
        return head, iter(sections)


@dataclass(frozen=True)
class _Head:
    dtype: DType
    start: int
    num_whole: int
    num_frequencies: int

    @classmethod
    def unpack(cls, payload: Bytes, block: Bits) -> _Head | None:
        """None where it does not describe `block`."""
        if payload.size < _HEAD.size:
            return None
        _, _, itemsize, dtype, start, num_whole, num_rest, num_frequencies, zero = (
            _HEAD.unpack_from(payload.data)
        )
        is_sound = (
            dtype < len(DTYPES)
            and (DTYPES[dtype] == "float32") == (itemsize == 4)
            and num_whole + num_rest == block.shape[3]
            and num_frequencies in (0, block.shape[4] // 2)
            and zero == 0
        )
        return cls(DTYPES[dtype], start, num_whole, num_frequencies) if is_sound else None


class _Grid(Protocol):
    """Numbers that codes stand for. keys and values: float32 [layers, heads, tokens, head_dim]."""

    bits: int  # per code
    key_scales: int  # per channel

    def keys(self, keys: Floats) -> tuple[Halves, Bytes]: ...
    def values(self, values: Floats) -> tuple[Halves, Bytes]: ...
    def read_keys(self, scales: Halves, codes: Bytes, shape: tuple[int, ...]) -> Floats: ...
    def read_values(self, scales: Halves, codes: Bytes, shape: tuple[int, ...]) -> Floats: ...


class _Integers:
    """Evenly spaced numbers: 2 ** bits of them between a key channel's extremes."""

    key_scales = 2

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._half = 1 << (bits - 1)  # the largest value of a group is -half or half - 1 steps

    def keys(self, keys: Floats) -> tuple[Halves, Bytes]:
        levels = 2 * self._half - 1
        offset = keys.min(axis=2).astype("<f2")
        # From the rounded offset, so that its rounding costs no accuracy at the other end.
        step = ((keys.max(axis=2) - offset) / levels).astype("<f2")
        codes = np.rint((keys - _wide(offset)) / _divisor(_wide(step)))
        return np.stack([step, offset], 2), self._packed(np.clip(codes, 0, levels))

    def values(self, values: Floats) -> tuple[Halves, Bytes]:
        groups = _grouped(values)
        # The largest value of a group falls on -half exactly, whatever its sign: with a signed
        # step all codes are used, as in the Q4_0 format of GGUF.
        largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        if self.bits == 8:
            step = (np.abs(largest) / (self._half - 1)).astype("<f2")
        else:
            step = (largest / -self._half).astype("<f2")
        codes = np.rint(groups / _divisor(step.astype(np.float32)[..., None]))
        codes = _ungrouped(np.clip(codes, -self._half, self._half - 1), values.shape)
        return step, self._packed(codes if self.bits == 8 else codes + self._half)

    def read_keys(self, scales: Halves, codes: Bytes, shape: tuple[int, ...]) -> Floats:
        found = self._unpacked(codes, shape).astype(np.float32)
        found *= _wide(scales[:, :, 0])
        found += _wide(scales[:, :, 1])
        return found

    def read_values(self, scales: Halves, codes: Bytes, shape: tuple[int, ...]) -> Floats:
        found = self._unpacked(codes, shape)
        signed = found.view(np.int8) if self.bits == 8 else found.view(np.int8) - self._half
        return _scaled(signed.astype(np.float32), scales)

    def _packed(self, codes: Floats) -> Bytes:
        if self.bits == 8:
            return codes.astype(np.int16).astype(np.uint8)
        low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
        packed: Bytes = low | high << np.uint8(4)
        return packed

    def _unpacked(self, codes: Bytes, shape: tuple[int, ...]) -> Bytes:
        if self.bits == 8:
            return codes.reshape(shape)
        pairs = codes.reshape(*shape[:-1], -1)
        return np.concatenate([pairs & 15, pairs >> 4], axis=-1)


class _E4M3:
    """Floats of a sign, four exponent and three mantissa bits; the largest is 448."""

    bits = 8
    key_scales = 1

    def keys(self, keys: Floats) -> tuple[Halves, Bytes]:
        step = (np.abs(keys).max(axis=2) / _E4M3_MAX).astype("<f2")
        return step[:, :, None], _to_e4m3(keys / _divisor(_wide(step)))

    def values(self, values: Floats) -> tuple[Halves, Bytes]:
        groups = _grouped(values)
        step = (np.abs(groups).max(axis=-1) / _E4M3_MAX).astype("<f2")
        codes = _to_e4m3(groups / _divisor(step.astype(np.float32)[..., None]))
        return step, _ungrouped(codes, values.shape)

    def read_keys(self, scales: Halves, codes: Bytes, shape: tuple[int, ...]) -> Floats:
        found = np.take(_FROM_E4M3, codes.reshape(shape))
        found *= _wide(scales[:, :, 0])
        return found

    def read_values(self, scales: Halves, codes: Bytes, shape: tuple[int, ...]) -> Floats:
        return _scaled(np.take(_FROM_E4M3, codes.reshape(shape)), scales)


_Turn = tuple[Floats, Floats] | None  # cos and sin, [tokens, head_dim / 2]


def _turn(start: int, num_tokens: int, frequencies: Floats | None) -> _Turn:
    """The rotations of the positions from `start`; None where there are none."""
    if frequencies is None or not len(frequencies):
        return None
    return rotations(start, num_tokens, frequencies)


def rotations(start: int, num_tokens: int, frequencies: Floats) -> tuple[Floats, Floats]:
    """cos and sin of the positions from `start`, [num_tokens, head_dim / 2]."""
    positions = np.arange(start, start + num_tokens).astype(np.float32)
    angles = positions[:, None] * frequencies.astype(np.float32)
    return np.cos(angles), np.sin(angles)


def _rotated(keys: Floats, turn: _Turn, backwards: bool = False) -> Floats:
    """`keys` [layers, heads, tokens, head_dim], turned."""
    if turn is None:
        return keys
    cos, sin = turn[0], -turn[1] if backwards else turn[1]
    half = keys.shape[3] // 2
    first, second = keys[..., :half], keys[..., half:]
    turned = np.empty_like(keys)
    np.subtract(first * cos, second * sin, out=turned[..., :half])
    np.add(second * cos, first * sin, out=turned[..., half:])
    return turned


def _wide(scales: Halves) -> Floats:
    """Scales of channels [layers, heads, head_dim], to be used with every token."""
    return scales.astype(np.float32)[:, :, None]


def _divisor(step: Floats) -> Floats:
    """A step to divide by: where all numbers of a group are equal it is zero, and so are codes."""
    return np.where(step == 0, np.float32(np.inf), step)


def _grouped(values: Floats) -> Floats:
    """[..., head_dim] as [..., groups, GROUP_CHANNELS], filled up with zeros."""
    padding = -values.shape[-1] % GROUP_CHANNELS
    if padding:
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    return values.reshape(*values.shape[:-1], -1, GROUP_CHANNELS)


def _ungrouped(groups: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return groups.reshape(*shape[:-1], -1)[..., : shape[-1]]


def _scaled(codes: Floats, scales: Halves) -> Floats:
    """Every group of a row times its scale; in place."""
    for group in range(scales.shape[-1]):
        part = codes[..., group * GROUP_CHANNELS : (group + 1) * GROUP_CHANNELS]
        part *= scales[..., group : group + 1].astype(np.float32)
    return codes


def _to_floats(bits: Bits, dtype: DType) -> Floats:
    if dtype == "bfloat16":
        return (bits.astype("<u4") << 16).view(np.float32)
    kind = "<f2" if dtype == "float16" else "<f4"
    return np.ascontiguousarray(bits).view(kind).astype(np.float32)


def _to_bits(floats: Floats, dtype: DType) -> Bits:
    """Rounded to nearest, ties to even; what is too large becomes the largest number. Uses up
    `floats`, which are contiguous."""
    if dtype == "float32":
        return floats.view("<u4")
    if dtype == "float16":
        return np.clip(floats, -_HALF_MAX, _HALF_MAX).astype("<f2").view("<u2")
    words = floats.view("<u4")  # carried out in place: a fresh array costs more than the sum
    carry = words >> 16
    carry &= 1
    carry += 0x7FFF
    words += carry
    return words.view("<u2")[..., 1::2]


def _to_e4m3(numbers: Floats) -> Bytes:
    """Codes of the nearest numbers, ties to even; |numbers| may exceed 448 by a rounding."""
    size = np.ascontiguousarray(np.minimum(np.abs(numbers), _E4M3_MAX))
    words = size.view("<u4")
    # Round the mantissa to 3 of its 23 bits, then move the exponent's zero from 127 to 7.
    normal = ((words + 0x7FFFF + ((words >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = np.rint(size * np.float32(512)).astype("<u4")  # in units of 2 ** -9
    codes: Bytes = np.where(size < 2.0**-6, subnormal, normal).astype(np.uint8)
    codes |= np.where(np.signbit(numbers), np.uint8(128), np.uint8(0))
    return codes


def _e4m3_numbers() -> Floats:
    """What each of the 256 codes means."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


def _padded(section: npt.NDArray[Any]) -> bytes:
    return section.tobytes() + bytes(-section.nbytes % 8)


_HALF_MAX: Final = np.float32(65504)
_E4M3_MAX: Final = np.float32(448)
_FROM_E4M3 = _e4m3_numbers()

INT8 = Quantised(3, "int8", _Integers(8))
FP8 = Quantised(4, "fp8", _E4M3())
INT4 = Quantised(5, "int4", _Integers(4))
