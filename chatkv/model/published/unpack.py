"""Codes out of 32-bit words, in the three orders in which they are published."""

from __future__ import annotations

import torch
from torch import Tensor

# In which place of a word, from the lowest bits on, AWQ puts the code of each of eight neighbours
# (github.com/casper-hansen/AutoAWQ, WQLinear_GEMM).
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def along_rows(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 -> [rows * 32 / bits, n]: a word holds neighbours of one column."""
    return along_columns(words.T, bits).T


def along_columns(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits], uint8: a word holds neighbours of one row, the
    first in its lowest bits. bits: 4 or 8."""
    codes = words.contiguous().view(torch.uint8)  # a matrix is large: never wider than that
    return codes if bits == 8 else torch.stack([codes & 15, codes >> 4], -1).flatten(1)


def awq(words: Tensor) -> Tensor:
    """[rows, n] int32 -> [rows, 8 n], as `along_columns`, in AWQ's order within a word."""
    eights = along_columns(words, 4).view(len(words), -1, 8)
    return eights[:, :, list(_AWQ_PLACES)].flatten(1)
