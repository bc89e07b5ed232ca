"""GGUF's 4-bit matrices as they are: their codes, scales and minima, repacked and not requantised.

Formats: ggml's block_q4_0, block_q4_1 and block_q4_K (github.com/ggml-org/ggml, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from chatkv.model.quantise import GROUP
from chatkv_kernels.linear_quantised import Weight4, pack_int4

Bytes = NDArray[np.uint8]
# Codes 0..15 [out, in], and per group of 32 inputs [out, in / 32]: weight = scale * code + least.
Unpacked = tuple[Bytes, NDArray[np.float32], NDArray[np.float32]]


def unpack(tensor: Any) -> Unpacked | None:
    """A tensor of the gguf package, [out, in]; None where its type is no 4-bit one."""
    read = _TYPES.get(tensor.tensor_type.name)
    if read is None:
        return None
    rows = tensor.data.reshape(int(tensor.shape[1]), -1).view(np.uint8)
    return read(rows)


def weight4(codes: Bytes, scales: NDArray[np.float32], least: NDArray[np.float32]) -> Weight4:
    """The same numbers with zero points: scale * (code - zero), zero = -least / scale.

    A group whose scale is zero holds `least` throughout: its scale becomes that, and code - zero 1.
    """
    flat = scales == 0
    zeros = np.where(flat, -1, -least / np.where(flat, 1, scales))
    codes = np.where(np.repeat(flat, GROUP, 1), 0, codes)
    scales = np.where(flat, least, scales)

    def of_groups(numbers: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.T.astype(np.float16))

    packed = pack_int4(torch.from_numpy(codes.astype(np.int32)))
    return Weight4(packed, of_groups(scales), of_groups(zeros), codes.shape[1], GROUP)


def _halves(numbers: Bytes) -> NDArray[np.float32]:
    """Pairs of bytes, [..., 2 n], as float16 [..., n]."""
    return np.ascontiguousarray(numbers).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes as [..., 2 n] codes: all lower halves, then all upper ones."""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q4_0(rows: Bytes) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = _halves(blocks[..., :2])[..., 0]
    return _nibbles(blocks[..., 2:]).reshape(len(rows), -1), scales, -8 * scales


def _q4_1(rows: Bytes) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 20)
    scales, least = np.moveaxis(_halves(blocks[..., :4]), -1, 0)
    return _nibbles(blocks[..., 4:]).reshape(len(rows), -1), scales, least


def _q4_k(rows: Bytes) -> Unpacked:
    """Superblocks of 256: two float16, eight pairs of 6-bit numbers in 12 bytes, 128 of codes."""
    blocks = rows.reshape(len(rows), -1, 144)
    d, d_least = np.moveaxis(_halves(blocks[..., :4]), -1, 0)
    low, mid, high = np.moveaxis(blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4), 2, 0)
    scales = np.concatenate([low & 63, high & 15 | (low >> 6) << 4], -1)
    least = np.concatenate([mid & 63, high >> 4 | (mid >> 6) << 4], -1)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return (
        codes.reshape(len(rows), -1),
        (d[..., None] * scales).reshape(len(rows), -1),
        (-d_least[..., None] * least).reshape(len(rows), -1),
    )


_TYPES: dict[str, Callable[[Bytes], Unpacked]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
