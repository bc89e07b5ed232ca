"""GGUF's matrices of 4, 6 and 8 bits as they are: their codes, scales and minima, not requantised.

Formats: ggml's block_q4_0, block_q4_1, block_q4_K, block_q6_K and block_q8_0
(github.com/ggml-org/ggml, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from chatkv.model.quantise import LAYOUTS, Layout
from chatkv_kernels.linear_quantised import Weight4, Weight8, pack_int4

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# A scale that the least weight of its group is so many steps from means nothing beside it: float16
# holds neither that zero point nor, of such a weight, the steps.
_MOST_STEPS = 2**15


class Unpacked(NamedTuple):
    """weight = scale * code + least; codes [out, in], the others [out, in / group].

    `least` is None where codes have a sign."""

    codes: NDArray[Any]
    scales: Floats
    least: Floats | None = None


# What is stored of each type. The scales of a Q6_K are products: only float32 holds all their bits.
GGUF_LAYOUTS = {
    "Q4_0": LAYOUTS["int4"],
    "Q4_1": LAYOUTS["int4"],
    "Q4_K": LAYOUTS["int4"],
    "Q6_K": Layout("int8", 16, torch.float32),
    "Q8_0": Layout("int8", 32, torch.float16),
}


def packed_weight(kind: str, rows: Bytes) -> Weight4 | Weight8:
    """A matrix of a type among GGUF_LAYOUTS, of which each output is a row of bytes."""
    unpacked, layout = unpack(kind, rows), GGUF_LAYOUTS[kind]
    if unpacked.least is not None:
        return _weight4(unpacked.codes, unpacked.scales, unpacked.least, layout.group_size)
    scales = torch.from_numpy(unpacked.scales.T.copy()).to(layout.scales)
    return Weight8(torch.from_numpy(unpacked.codes), scales, layout.group_size)


def unpack(kind: str, rows: Bytes) -> Unpacked:
    """The numbers in rows of bytes, one row an output."""
    return _TYPES[kind](rows)


def _weight4(codes: Bytes, scales: Floats, least: Floats, group: int) -> Weight4:
    """The same numbers with zero points: scale * (code - zero), zero = -least / scale.

    A group whose scale is zero, or nothing beside `least`, holds `least` throughout: its scale
    becomes that, and code - zero 1.
    """
    flat = abs(scales) * _MOST_STEPS <= abs(least)
    zeros = np.where(flat, -1, -least / np.where(flat, 1, scales))
    codes = np.where(np.repeat(flat, group, 1), 0, codes)
    scales = np.where(flat, least, scales)

    def of_groups(numbers: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.T.astype(np.float16))

    packed = pack_int4(torch.from_numpy(codes))
    return Weight4(packed, of_groups(scales), of_groups(zeros), codes.shape[1], group)


def _halves(numbers: Bytes) -> Floats:
    """Pairs of bytes, [..., 2 n], as float16 [..., n]."""
    return np.ascontiguousarray(numbers).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes as [..., 2 n] codes: all lower halves, then all upper ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q4_0(rows: Bytes) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = _halves(blocks[..., :2])[..., 0]
    return Unpacked(_nibbles(blocks[..., 2:]).reshape(len(rows), -1), scales, -8 * scales)


def _q4_1(rows: Bytes) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 20)
    scales, least = np.moveaxis(_halves(blocks[..., :4]), -1, 0)
    return Unpacked(_nibbles(blocks[..., 4:]).reshape(len(rows), -1), scales, least)


def _q4_k(rows: Bytes) -> Unpacked:
    """Superblocks of 256: two float16, eight pairs of 6-bit numbers in 12 bytes, 128 of codes."""
    blocks = rows.reshape(len(rows), -1, 144)
    d, d_least = np.moveaxis(_halves(blocks[..., :4]), -1, 0)
    low, mid, high = np.moveaxis(blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4), 2, 0)
    scales = np.concatenate([low & 63, high & 15 | (low >> 6) << 4], -1)
    least = np.concatenate([mid & 63, high >> 4 | (mid >> 6) << 4], -1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Unpacked(
        codes.reshape(len(rows), -1),
        (d[..., None] * scales).reshape(len(rows), -1),
        (-d_least[..., None] * least).reshape(len(rows), -1),
    )


def _q6_k(rows: Bytes) -> Unpacked:
    """Superblocks of 256: 128 bytes of lower nibbles, 64 of the two bits above them, 16 scales of 8
    bits with a sign, a float16. Of each half of a superblock, byte l of 64 nibbles' bytes holds
    codes l and l + 64, and byte l of 32 bits' bytes those of codes l, l + 32, l + 64, l + 96."""
    blocks = rows.reshape(len(rows), -1, 210)
    halves = (len(rows), -1, 2)
    low = _nibbles(blocks[..., :128].reshape(*halves, 64))
    bits = blocks[..., 128:192].reshape(*halves, 32)
    high = np.concatenate([bits >> place & 3 for place in (0, 2, 4, 6)], -1)
    codes = (low | high << 4).astype(np.int8) - 32
    scales = blocks[..., 192:208].view(np.int8) * _halves(blocks[..., 208:])
    return Unpacked(codes.reshape(len(rows), -1), scales.reshape(len(rows), -1))


def _q8_0(rows: Bytes) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return Unpacked(codes.reshape(len(rows), -1), _halves(blocks[..., :2])[..., 0])


_TYPES: dict[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
