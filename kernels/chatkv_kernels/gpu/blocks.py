"""See `chatkv_kernels.blocks`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, per_shape

TILE = 4096  # words: 16 KiB, a head's keys of 64 tokens of 128 channels


def gather_blocks(pool: Tensor, table: Tensor, slab: Tensor) -> None:
    _launch(pool, table, slab, into_pool=False)


def scatter_blocks(pool: Tensor, table: Tensor, slab: Tensor) -> None:
    _launch(pool, table, slab, into_pool=True)


def _launch(pool: Tensor, table: Tensor, slab: Tensor, into_pool: bool) -> None:
    if not slab.numel():
        return
    words = pool.view(torch.int32)
    num_blocks, layers, _, heads, tokens, row = slab.view(torch.int32).shape
    pieces = num_blocks * layers * 2 * heads
    _move[(pieces, triton.cdiv(tokens * row, TILE))](
        words,
        table,
        slab.view(torch.int32),
        layers,
        heads,
        tokens * row,
        *words.stride()[:4],
        INTO_POOL=into_pool,
        TILE=min(TILE, triton.next_power_of_2(tokens * row)),
        num_warps=8,
    )


@triton.jit
def _move(
    pool,
    table,
    slab,
    layers,
    heads,
    piece_words,
    block_stride,
    layer_stride,
    kv_stride,
    head_stride,
    INTO_POOL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Part of what is contiguous on both sides: the keys or values of one head of a block."""
    piece = tl.program_id(0).to(tl.int64)
    head = piece % heads
    kv = piece // heads % 2
    layer = piece // (2 * heads) % layers
    block = tl.load(table + piece // (2 * heads * layers)).to(tl.int64)
    pool += block * block_stride + layer * layer_stride + kv * kv_stride + head * head_stride
    slab += piece * piece_words
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = word < piece_words
    if INTO_POOL:
        tl.store(pool + word, tl.load(slab + word, inside), inside)
    else:
        tl.store(slab + word, tl.load(pool + word, inside), inside)


def _example(shape: Shape) -> None:
    size = (4, 2, shape.num_kv_heads, 64, shape.head_dim)
    pool, table, slab = meta(512, *size), meta(128, dtype=torch.int32), meta(128, *size)
    gather_blocks(pool, table, slab)
    scatter_blocks(pool, table, slab)


SPECS = per_shape("blocks gather, scatter", _example)
