"""Codes out of 32-bit words, in the three orders in which they are published."""

from __future__ import annotations

import torch
from torch import Tensor

# Which of its eight outputs each place of a word holds, from the lowest bits on
# (github.com/casper-hansen/AutoAWQ, WQLinear_GEMM).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def along_rows(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 -> [rows * 32 / bits, n]: a word holds neighbours of one column."""
    return along_columns(words.T, bits).T


def along_columns(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits], int32: a word holds neighbours of one row, the
    first in its lowest bits."""
    places = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[:, :, None] >> places) & (1 << bits) - 1
    return codes.flatten(1)


def awq(words: Tensor) -> Tensor:
    """[rows, n] int32 -> [rows, 8 n], as `along_columns`, in AWQ's order within a word."""
    places = torch.empty(8, dtype=torch.int32)
    places[list(_AWQ_ORDER)] = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words[:, :, None] >> places) & 15).flatten(1)
