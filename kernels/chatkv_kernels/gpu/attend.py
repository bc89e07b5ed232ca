"""How `flash` is launched: one call for decode and prefill, which differ in their tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from chatkv_kernels.gpu.flash import flash, merge
from chatkv_kernels.gpu.target import target_of


@dataclass(frozen=True)
class Tiles:
    """rows of queries (times the heads of a group) against `tokens` of KV a step; programs: how
    many of them a multiprocessor holds at once."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    starts: Tensor | None,
    lengths: Tensor,
    max_new: int,
    scale: float,
    window: int | None,
    tiles: Tiles,
) -> Tensor:
    """See `paged_prefill`; without `starts`, every sequence has one query (`paged_decode`)."""
    num_new, num_heads, head_dim = query.shape
    assert keys.stride() == values.stride() and keys.stride()[2:] == (head_dim, 1)
    assert query.stride(2) == 1
    _, num_kv_heads, block_tokens, _ = keys.shape
    num_seqs, max_blocks = block_table.shape
    group = num_heads // num_kv_heads
    num_tiles = triton.cdiv(max_new, tiles.rows // group)
    num_splits = splits(
        num_tiles * num_kv_heads * num_seqs,
        tiles.programs * target_of(query.device).multiprocessors,
        triton.cdiv(max_blocks * block_tokens, tiles.tokens),
    )
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = weights = None
    if num_splits > 1:
        parts = out.new_empty(num_new, num_heads, num_splits, head_dim, dtype=torch.float32)
        weights = out.new_empty(num_new, num_heads, num_splits, dtype=torch.float32)
    width = triton.next_power_of_2(head_dim)
    flash[(num_tiles * num_splits, num_kv_heads, num_seqs)](
        query,
        keys,
        values,
        block_table,
        starts,
        lengths,
        out,
        parts,
        weights,
        scale * math.log2(math.e),
        window or 0,
        num_splits,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        *keys.stride()[:2],
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_TOKENS=block_tokens,
        ROWS=tiles.rows,
        TILE=tiles.tokens,
        WINDOWED=window is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if num_splits > 1:
        merge[(num_new * num_heads,)](
            parts, weights, out, num_splits, HEAD_DIM=head_dim, WIDTH=width, TILE=16, num_warps=4
        )
    return out


def splits(programs: int, places: int, steps: int) -> int:
    """Into how many parts to cut the keys, so that `programs` fill the device's `places`.

    A part has at least two of the longest sequence's `steps`: a shorter one takes less time than
    starting it and merging its result.
    """
    return max(1, min(places // max(1, programs), steps // 2))
