"""KV on its way between a contiguous slab and scattered blocks of the pool, as it is."""

from __future__ import annotations

from torch import Tensor

from chatkv_kernels.dispatch import has_kernel


@has_kernel
def gather_blocks(pool: Tensor, table: Tensor, slab: Tensor) -> None:
    """slab[i] = pool[table[i]].

    pool: [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim], rows of a head
    contiguous, other strides free: `pool[:, 4:8]` for some layers, `pool[..., :n, :]` for blocks
    of n tokens. table: int32 [n]. slab: as `pool` with n blocks, contiguous, of the same dtype
    (`staging.view(dtype)` where bytes are staged).
    """
    slab.copy_(pool[table.long()])


@has_kernel
def scatter_blocks(pool: Tensor, table: Tensor, slab: Tensor) -> None:
    """pool[table[i]] = slab[i], for tensors as `gather_blocks` takes them; no block twice."""
    pool[table.long()] = slab
