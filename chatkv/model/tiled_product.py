"""A product of many rows with quantised weights, made dense on the way, one tile after the other.

A chunk of prefill uses each weight for hundreds of rows, so making it dense costs little beside
that (2 to 5% of 512 rows on two AVX2 cores), and a tile stays in a core's cache: nothing dense is
kept, and prefill is as fast as with dense weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chatkv.model.linear import packs_on_cpu
from chatkv.model.quantise import KernelWeight
from chatkv_kernels.linear_quantised import Weight4, Weight8, codes_int4

# Outputs of a tile at most. With fewer, more time goes to calls (64: 1.5x as long), with more, a
# tile leaves the cache. Where inputs are many, fewer outputs fill it: of 4,096 inputs, 256 are as
# fast as 512, and take half the memory.
_MOST_OUTPUTS, _MOST_NUMBERS = 512, 1 << 20


def tile_outputs(num_inputs: int) -> int:
    """Outputs of a tile of a matrix."""
    return min(_MOST_OUTPUTS, max(_MOST_NUMBERS // num_inputs // 64 * 64, 64))


class _Tile4(NamedTuple):
    """Outputs [n] of an int4 matrix, input by input: codes uint8 [groups, group / 2, n], of which
    the lower halves are a group's first inputs; scales and zeros [groups, 1, n]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor


class TiledProduct:
    """x Wᵀ for x [rows, in] of `dtype`, on a CPU."""

    def __init__(self, weight: KernelWeight, dtype: torch.dtype) -> None:
        # Without instructions for it, products in 16 bits take four times as long.
        self._wide = dtype if packs_on_cpu(dtype) else torch.float32
        self._weight8 = weight if isinstance(weight, Weight8) else None
        self._tiles = _tiles(weight) if isinstance(weight, Weight4) else []
        if isinstance(weight, Weight4):
            self._num_inputs, self._num_outputs = weight.num_inputs, weight.codes.shape[1]
        else:
            self._num_outputs, self._num_inputs = weight.codes.shape

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self._wide)
        out = wide.new_empty(len(x), self._num_outputs)
        if self._weight8 is None:
            self._multiply4(wide, out)
        else:
            _multiply8(wide, self._weight8, out)
        return out.to(x.dtype)

    def _multiply4(self, x: Tensor, out: Tensor) -> None:
        groups, half, width = self._tiles[0].codes.shape
        room = torch.empty(groups * 2 * half * width)
        halves = torch.empty(groups * half * width, dtype=torch.uint8)
        for index, tile in enumerate(self._tiles):
            width = tile.codes.shape[2]
            dense = room[: groups * 2 * half * width].view(groups, 2, half, width)
            codes = halves[: groups * half * width].view(groups, half, width)
            dense[:, 0] = torch.bitwise_and(tile.codes, 15, out=codes)
            dense[:, 1] = torch.bitwise_right_shift(tile.codes, 4, out=codes)
            scales = tile.scales.float()
            numbers = dense.view(groups, 2 * half, width)
            torch.addcmul(scales * -tile.zeros.float(), numbers, scales, out=numbers)
            matrix = numbers.view(-1, width)[: self._num_inputs].to(x.dtype)
            first = index * tile_outputs(self._num_inputs)
            torch.mm(x, matrix, out=out[:, first : first + width])


def _multiply8(x: Tensor, weight: Weight8, out: Tensor) -> None:
    group, num_inputs = weight.group_size, x.shape[1]
    tile = tile_outputs(num_inputs)
    room = x.new_empty(min(tile, len(weight.codes)), num_inputs)
    for first in range(0, len(weight.codes), tile):
        codes = weight.codes[first : first + tile]
        matrix = room[: len(codes)].copy_(codes)  # a code is exact in every dtype
        if group:
            scales = weight.scales[:, first : first + tile].T.to(x.dtype)
            matrix *= scales.repeat_interleave(group, 1)[:, :num_inputs]
        torch.mm(x, matrix.T, out=out[:, first : first + len(codes)])
    if not group:
        out.mul_(weight.scales.to(x.dtype))


def _tiles(weight: Weight4) -> list[_Tile4]:
    codes = codes_int4(weight)
    num_outputs, group = len(codes), weight.group_size
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % group))
    low, high = codes.view(num_outputs, -1, 2, group // 2).unbind(2)
    pairs = low.bitwise_or_(high.bitwise_left_shift_(4)).permute(1, 2, 0)
    scales = weight.scales[:, None]
    zeros = torch.full_like(scales, 8) if weight.zeros is None else weight.zeros[:, None]
    groups, tile = pairs.shape[0], tile_outputs(weight.num_inputs)

    def of_tile(numbers: Tensor, first: int) -> Tensor:
        return numbers[:groups, :, first : first + tile].contiguous()

    return [
        _Tile4(of_tile(pairs, first), of_tile(scales, first), of_tile(zeros, first))
        for first in range(0, num_outputs, tile)
    ]
