"""`packed`: lossless at a fixed rate: an element's place does not depend on the others.

The exponents of one channel hardly vary from token to token, so an exponent is stored as a 3-bit
distance below its channel's base, and the few that do not fit stand aside, whole. Sign and
mantissa are stored as they are. 11 bits per bfloat16 and the escapes: about 1.43x on real KV.

A payload, little-endian, every section padded with zeros to a multiple of 8 bytes. S slabs are the
layers * 2 * heads of the value in that order, D is head_dim, n = S * tokens * D elements in the
order [layers, 2, heads, tokens, head_dim]; sizes are rounded up.

    head        u8 format version, u8 codec id, u8 bytes per element,
                u8 dtype (0 bfloat16, 1 float16, 2 float32), u32 number of escapes
    first       u32 [S]     escapes before each slab
    base        u8 [S, D]   the exponent of code 0 in each channel
    low         u8 [n]      bfloat16, float32: sign << 7 | upper 7 bits of the mantissa
                            float16: lower 8 bits of the mantissa
    code, low   u8 [n / 4]  lower 2 bits of the codes; element i at bits 2 * (i % 4) of byte i / 4
    code, high  u8 [n / 8]  upper bit of the codes; element i at bit i % 8 of byte i / 8
    rest        bfloat16: nothing; float32: u16 [n], lower 16 bits of the mantissa
                float16: 3 bits each, sign << 2 | upper 2 bits of the mantissa, in two sections
                like the codes
    escapes     u8 exponents of the elements with code 7, in the order of the elements

Codes 0..6 mean an exponent of base - code, 7 an escape. (The exponents of float16 have 5 bits.)
Within a slab an escape's number is the count of sevens before it, which a GPU finds with one scan
over the slab.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chatkv_store.layout import DType
from chatkv_store.payloads import (
    DTYPES,
    FORMAT_VERSION,
    HEAD,
    Bits,
    Bytes,
    Context,
    PayloadDamaged,
    Payloads,
    check_head,
    per_block,
)

ESCAPE: Final = 7
_LOWER_BASES: Final = 3  # how far below the largest exponent a base is looked for
_COUNT = struct.Struct("<I")


class Packed:
    """Sign and mantissa, a 3-bit exponent code, escapes aside."""

    id = 2
    name = "packed"
    family = "lossless"

    def encode(self, bits: Bits, context: Context | None = None) -> bytes:
        dtype = _dtype_of(bits, context)
        bits = np.ascontiguousarray(bits)
        exponents, low, rest = _split(bits, dtype)
        base = _bases(exponents)
        codes = np.minimum(base[..., None, :] - exponents, ESCAPE)  # above the base it wraps around
        at = np.flatnonzero(codes == ESCAPE)
        slabs = codes.shape[0] * codes.shape[1] * codes.shape[2]
        starts = np.arange(slabs) * (codes.size // slabs)
        head = HEAD.pack(FORMAT_VERSION, self.id, bits.itemsize, DTYPES.index(dtype))
        sections = [
            np.searchsorted(at, starts).astype("<u4"),
            base,
            low,
            *_pack3(codes.ravel()),
            *rest,
            exponents.ravel()[at],
        ]
        return b"".join((head, _COUNT.pack(len(at)), *map(_padded, sections)))

    def decode(self, payloads: Payloads, out: Bits) -> None:
        blocks = per_block(out, len(payloads))
        # All are taken apart before the first is written: the last one may be damaged.
        values = [
            self._decoded(payloads, index, blocks.shape[1:], out.dtype)
            for index in range(len(payloads))
        ]
        for block, value in zip(blocks, values, strict=True):
            np.copyto(block, value)

    def _decoded(
        self, payloads: Payloads, index: int, shape: tuple[int, ...], kind: np.dtype[Any]
    ) -> Bits:
        check_head(payloads, index, bytes((FORMAT_VERSION, self.id, kind.itemsize)))
        payload = payloads[index]
        if payload.size < HEAD.size + _COUNT.size or payload[3] >= len(DTYPES):
            raise PayloadDamaged(index, "its head is damaged")
        dtype = DTYPES[payload[3]]
        (num_escapes,) = _COUNT.unpack_from(payload.data, HEAD.size)
        sections = _Sections(shape, dtype, num_escapes)
        if (dtype == "float32") != (kind.itemsize == 4) or payload.size != sections.num_bytes:
            raise PayloadDamaged(index, f"{payload.size} bytes do not fill the block")
        codes = _unpack3(sections.take(payload, "code_low"), sections.take(payload, "code_high"))
        codes = codes[: sections.num_elements]
        at = np.flatnonzero(codes == ESCAPE)
        if at.size != num_escapes:
            raise PayloadDamaged(index, f"{at.size} escapes, not {num_escapes}")
        base = sections.take(payload, "base").reshape(*shape[:3], 1, shape[4])
        exponents = (base - codes.reshape(shape)).reshape(-1)
        exponents[at] = sections.take(payload, "escapes")
        return _join(exponents, payload, sections).reshape(shape)


@dataclass(frozen=True)
class _Sections:
    """Where the sections of a payload lie."""

    shape: tuple[int, ...]  # [layers, 2, heads, tokens, head_dim]
    dtype: DType
    num_escapes: int

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape))

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Offset and bytes of each section."""
        n, slabs = self.num_elements, int(np.prod(self.shape[:3]))
        three_bits = (-(-n // 4), -(-n // 8))
        sizes = {
            "first": 4 * slabs,
            "base": slabs * self.shape[4],
            "low": n,
            "code_low": three_bits[0],
            "code_high": three_bits[1],
        }
        if self.dtype == "float16":
            sizes |= {"rest_low": three_bits[0], "rest_high": three_bits[1]}
        elif self.dtype == "float32":
            sizes["rest"] = 2 * n
        sizes["escapes"] = self.num_escapes
        places, at = {}, HEAD.size + _COUNT.size
        for name, size in sizes.items():
            places[name] = (at, size)
            at += -(-size // 8) * 8
        return places

    @property
    def num_bytes(self) -> int:
        at, size = self.places["escapes"]
        return at + -(-size // 8) * 8

    def take(self, payload: Bytes, name: str) -> Bytes:
        at, size = self.places[name]
        return payload[at : at + size]


def _dtype_of(bits: Bits, context: Context | None) -> DType:
    if bits.itemsize == 4:
        return "float32"
    return context.dtype if context is not None else "bfloat16"


def _split(bits: Bits, dtype: DType) -> tuple[Bytes, Bytes, list[npt.NDArray[Any]]]:
    """Exponents, the low plane, and what is left over as sections."""
    if dtype == "float16":
        upper = ((bits >> 13) & 4) | ((bits >> 8) & 3)
        exponents = ((bits >> 10) & 31).astype(np.uint8)
        return exponents, bits.astype(np.uint8), _pack3(upper.astype(np.uint8).ravel())
    words = bits if dtype == "bfloat16" else (bits >> 16).astype("<u2")
    low = ((words >> 8) & 0x80 | words & 0x7F).astype(np.uint8)
    rest: list[npt.NDArray[Any]] = [] if dtype == "bfloat16" else [bits.astype("<u2")]
    return (words >> 7).astype(np.uint8), low, rest


def _join(exponents: Bytes, payload: Bytes, sections: _Sections) -> Bits:
    """Undo `_split`; flat."""
    low = sections.take(payload, "low").astype("<u2")
    words: Bits = exponents.astype("<u2")
    if sections.dtype == "float16":
        rest = _unpack3(sections.take(payload, "rest_low"), sections.take(payload, "rest_high"))
        upper = rest[: sections.num_elements].astype("<u2")
        words = (upper & 4) << 13 | (words & 31) << 10 | (upper & 3) << 8 | low
        return words
    words <<= 7  # in place, here and below: fresh arrays cost more than the work
    words |= low & 0x7F
    low &= 0x80
    low <<= 8
    words |= low
    if sections.dtype == "float32":
        words = words.astype("<u4") << 16 | sections.take(payload, "rest").view("<u2")
    return words


def _bases(exponents: Bytes) -> Bytes:
    """[layers, 2, heads, head_dim]: of the largest exponent of a channel and the few below it,
    the one that leaves the fewest escapes. A lone outlier should not push the others out."""
    top = exponents.max(axis=3)
    best: Bytes = top
    fewest = np.full(top.shape, exponents.shape[3] + 1)
    for lower in range(_LOWER_BASES + 1):
        base = top - np.minimum(top, lower)
        escapes = (base[..., None, :] - exponents >= ESCAPE).sum(axis=3)
        best = np.where(escapes < fewest, base, best)
        fewest = np.minimum(fewest, escapes)
    return best


def _pack3(codes: Bytes) -> list[Bytes]:
    """Numbers 0..7 as a section of their lower two bits and one of their upper bit."""
    padded = np.zeros(-(-codes.size // 8) * 8, np.uint8)
    padded[: codes.size] = codes
    quads = padded.view("<u4") & 0x03030303
    low = (quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8)
    high = np.packbits(padded >> 2, bitorder="little")
    return [low[: -(-codes.size // 4)], high]


def _unpack3(low: Bytes, high: Bytes) -> Bytes:
    """The numbers that `_pack3` packed, and padding behind them."""
    codes: Bytes = np.take(_QUADS, low).view(np.uint8)
    codes |= np.take(_EIGHTS, high).view(np.uint8)[: codes.size]
    return codes


def _padded(section: npt.NDArray[Any]) -> bytes:
    return section.tobytes() + bytes(-section.nbytes % 8)


# What a byte of either section of `_pack3` stands for.
_BYTE = np.arange(256, dtype=np.uint8)[:, None]
_QUADS = np.ascontiguousarray(_BYTE >> np.arange(0, 8, 2, dtype=np.uint8) & 3).view("<u4").ravel()
_EIGHTS = np.ascontiguousarray((_BYTE >> np.arange(8, dtype=np.uint8) & 1) << 2).view("<u8").ravel()
