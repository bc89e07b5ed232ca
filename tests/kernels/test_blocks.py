"""gather_blocks and scatter_blocks: what lies where, to the bit, and nothing beside it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv_kernels.blocks import gather_blocks, scatter_blocks
from pooled import Shape, pool_of, shapes

DTYPES: Any = st.sampled_from(["bfloat16", "float16", "float32"])


@settings(max_examples=6)
@given(shape=shapes(), dtype=DTYPES, seed=st.integers(0, 99))
def test_there_and_back(device: torch.device, shape: Shape, dtype: Any, seed: int) -> None:
    pool, _, table = pool_of(shape, dtype, seed, device)
    size = (shape.num_blocks, shape.layers, 2, shape.heads, shape.tokens, shape.head_dim)
    wanted = pool[table.long()]
    for gather in (gather_blocks.kernel, gather_blocks.reference):
        slab = torch.full(size, float("nan"), dtype=pool.dtype, device=device)
        gather(pool, table, slab)
        assert torch.equal(slab, wanted)
    for scatter in (scatter_blocks.kernel, scatter_blocks.reference):
        out = torch.full_like(pool, float("nan"))
        scatter(out, table, slab)
        assert torch.equal(out[table.long()], wanted)
        assert out.isnan().sum() == out.numel() - slab.numel(), "wrote outside its blocks"


def test_a_pool_of_other_strides(device: torch.device) -> None:
    """As the pool of a CPU has it: a head's tokens of all blocks in one stretch."""
    kv = torch.randn(2, 2, 3, 4 * 8, 16).to(device, torch.float16)
    pool = kv.view(2, 2, 3, 4, 8, 16).permute(3, 0, 1, 2, 4, 5)
    table = torch.tensor([2, 0], dtype=torch.int32, device=device)
    slab = torch.empty_like(pool[:2], memory_format=torch.contiguous_format)
    gather_blocks.kernel(pool, table, slab)
    assert torch.equal(slab, pool[table.long()])


def test_no_blocks(device: torch.device) -> None:
    pool = torch.zeros(2, 1, 2, 1, 4, 8, dtype=torch.float16, device=device)
    table = torch.empty(0, dtype=torch.int32, device=device)
    scatter_blocks.kernel(pool, table, pool[:0])
    assert not pool.any()
