"""See `chatkv_kernels.paged_decode`. Bound by memory: as many bytes under way as fit."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from chatkv_kernels.gpu.attend import Tiles, attend
from chatkv_kernels.gpu.spec import Shape, meta, meta_pool, per_shape
from chatkv_kernels.gpu.target import target_of


def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    token_bytes = triton.next_power_of_2(query.shape[2]) * query.itemsize
    tiles = _tiles(target_of(query.device).arch, group, token_bytes)
    return attend(query, keys, values, block_table, None, lengths, 1, scale, window, tiles)


def _tiles(arch: int, group: int, token_bytes: int) -> Tiles:
    """token_bytes: of one head's key. Two programs share a multiprocessor, so that one loads
    while the other computes, and each has as many steps under way as shared memory then holds."""
    rows = max(16, triton.next_power_of_2(group))  # a matrix instruction has no fewer
    if token_bytes <= 256:
        return Tiles(rows, tokens=64, warps=4, stages=4 if arch >= 90 else 3, programs=2)
    return Tiles(rows, tokens=64 if token_bytes <= 512 else 32, warps=4, stages=2, programs=1)


def _example(shape: Shape) -> None:
    query = meta(1, shape.num_heads, shape.head_dim)
    lengths = meta(1, dtype=torch.int32)
    table = meta(1, 512, dtype=torch.int32)
    for window in (None, 4096):
        paged_decode(query, *meta_pool(shape), table, lengths, 0.1, window)


SPECS = per_shape("paged_decode", _example)
