"""See `chatkv_kernels.quantised`.

A program takes some tokens of one slab, the keys or values of one head of a block, as two tiles: of
the channels below head_dim / 2 and of those above, which the rotation turns together and which
share the bytes of int4. The store computes in float32 and rounds each step, so these are the only
kernels that are compiled without fused multiplication and addition.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from chatkv_kernels.gpu.quantised_pack import measure, pack
from chatkv_kernels.gpu.quantised_unpack import unpack
from chatkv_kernels.gpu.spec import Shape, meta, per_shape
from chatkv_kernels.packed import FORMAT_VERSION, check_pool
from chatkv_kernels.quantised import (
    FP8,
    GROUP_CHANNELS,
    HEAD,
    INT4,
    INT8,
    SINK_TOKENS,
    Grid,
    Turn,
    payload_sizes,
)

ROWS = 32  # tokens of a program
NO_TURN = (None, None, None)


def unpack_int8(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    _launch_unpack(payloads, offsets, pool, table, turn, INT8)


def unpack_fp8(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    _launch_unpack(payloads, offsets, pool, table, turn, FP8)


def unpack_int4(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None = None
) -> None:
    _launch_unpack(payloads, offsets, pool, table, turn, INT4)


def pack_int8(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    return _launch_pack(pool, table, starts, turn, INT8)


def pack_fp8(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    return _launch_pack(pool, table, starts, turn, FP8)


def pack_int4(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None = None
) -> tuple[Tensor, Tensor]:
    return _launch_pack(pool, table, starts, turn, INT4)


def _launch_unpack(
    payloads: Tensor, offsets: Tensor, pool: Tensor, table: Tensor, turn: Turn | None, grid: Grid
) -> None:
    check_pool(pool)
    _, layers, _, heads, tokens, _ = pool.shape
    if not table.numel():
        return
    _, cos, sin = turn or NO_TURN
    unpack[(table.numel(), layers * 2 * heads, triton.cdiv(tokens, ROWS))](
        payloads,
        offsets,
        pool.view(torch.int16),
        table,
        cos,
        sin,
        layers,
        heads,
        tokens,
        *pool.stride()[:4],
        **_constants(pool, grid),
        ROWS=ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _launch_pack(
    pool: Tensor, table: Tensor, starts: Tensor, turn: Turn | None, grid: Grid
) -> tuple[Tensor, Tensor]:
    check_pool(pool)
    _, layers, _, heads, tokens, head_dim = pool.shape
    num_blocks, slabs = table.numel(), layers * 2 * heads
    groups = triton.cdiv(head_dim, GROUP_CHANNELS)
    frequencies, cos, sin = turn or NO_TURN

    halves = pool.new_empty(0, dtype=torch.float16)
    key_scales = halves.new_empty(num_blocks, slabs // 2, grid.key_scales, head_dim)
    value_scales = halves.new_empty(num_blocks, slabs // 2, tokens, groups)
    is_fine = halves.new_empty(num_blocks, slabs, dtype=torch.int32)
    offsets = halves.new_zeros(num_blocks + 1, dtype=torch.int64)
    # As large as any of them may be: whole, or with all tokens quantised.
    largest = HEAD.size + 2 * head_dim + slabs * tokens * head_dim * 2 + 24
    largest += 2 * key_scales[:1].numel() + 2 * value_scales[:1].numel()
    payloads = halves.new_empty(num_blocks * largest, dtype=torch.uint8)
    if not num_blocks:
        return payloads, offsets
    blocks = (pool.view(torch.int16), table, starts)
    where = (layers, heads, tokens, *pool.stride()[:4])
    constants = _constants(pool, grid)
    measure[(num_blocks, slabs)](
        *blocks,
        cos,
        sin,
        key_scales,
        value_scales,
        is_fine,
        *where,
        **constants,
        ROWS=triton.next_power_of_2(tokens),
        GROUPS=triton.next_power_of_2(groups),
        num_warps=8,
        enable_fp_fusion=False,
    )
    sinks = (SINK_TOKENS - starts).clamp(0, tokens)
    num_whole = torch.where(is_fine.amin(1) > 0, sinks, tokens).to(torch.int32)
    sizes = payload_sizes(num_whole.long(), pool.shape[1:], turn is not None, grid)
    offsets[1:] = sizes.cumsum(0)
    pack[(num_blocks, slabs, triton.cdiv(tokens, ROWS))](
        *blocks,
        cos,
        sin,
        frequencies,
        num_whole,
        key_scales,
        value_scales,
        payloads,
        offsets,
        *where,
        **constants,
        CODEC=grid.codec_id,
        FORMAT=FORMAT_VERSION,
        ROWS=ROWS,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return payloads, offsets


def _constants(pool: Tensor, grid: Grid) -> dict[str, int | bool]:
    head_dim = pool.shape[-1]
    return {
        "HALF": pool.dtype == torch.float16,
        "BITS": grid.bits,
        "FLOAT": grid.is_float,
        "CHANNELS": head_dim,
        "PAIRS": triton.next_power_of_2(head_dim // 2),
    }


def _example(shape: Shape) -> None:
    pool = meta(512, 4, 2, shape.num_kv_heads, 64, shape.head_dim)
    table, starts = meta(128, dtype=torch.int32), meta(128, dtype=torch.int32)
    angles = meta(131072, shape.head_dim // 2, dtype=torch.float32)
    turn = Turn(angles[0], angles, angles)
    for grid in (INT8, FP8, INT4):
        payloads, offsets = _launch_pack(pool, table, starts, turn, grid)
        _launch_unpack(payloads, offsets, pool, table, turn, grid)


# Triton 3.7 holds packing to 80 registers on sm_90 and keeps one pair on the stack; 3.9 takes 94
# and none.
SPECS = per_shape("quantised int8, fp8, int4", _example, max_stack=8)
