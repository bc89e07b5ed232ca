"""See `chatkv_kernels.paged_prefill`. Bound by arithmetic: tiles as large as registers allow."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from chatkv_kernels.gpu.attend import Tiles, attend
from chatkv_kernels.gpu.spec import Shape, meta, meta_pool, per_shape
from chatkv_kernels.gpu.target import target_of


def paged_prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    max_new: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    token_bytes = triton.next_power_of_2(query.shape[2]) * query.itemsize
    tiles = _tiles(target_of(query.device).arch, token_bytes, window is not None)
    return attend(query, keys, values, block_table, starts, lengths, max_new, scale, window, tiles)


def _tiles(arch: int, token_bytes: int, windowed: bool) -> Tiles:
    """token_bytes: of one head's key. Steps of 128 tokens spill registers on both; sm_80 holds
    its queries in registers too, and has none left for a window's masks."""
    if token_bytes <= 256:
        tokens = 32 if windowed and arch < 90 else 64
        return Tiles(rows=128, tokens=tokens, warps=8, stages=3, programs=1)
    return Tiles(rows=64, tokens=32, warps=8, stages=2, programs=1)


def _example(shape: Shape) -> None:
    query = meta(2048, shape.num_heads, shape.head_dim)
    starts, lengths = meta(2, dtype=torch.int32), meta(1, dtype=torch.int32)
    table = meta(1, 512, dtype=torch.int32)
    for window in (None, 4096):
        paged_prefill(query, *meta_pool(shape), table, starts, lengths, 2048, 0.1, window)


SPECS = per_shape("paged_prefill", _example)
