"""From a layer's projections to attention: norms of heads, rotation, and the new KV in the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel
from chatkv_kernels.rms_norm import rms_norm
from chatkv_kernels.rope import rope


@has_kernel
def rope_write(
    heads: Tensor,
    positions: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values into the pool, and return the queries.

    heads: [num_new, num_heads + 2 * num_kv_heads, head_dim], queries, then keys, then values;
    positions: [num_new] int32, rows of cos and signed_sin, which are [max_position, 1, head_dim]
    as in `chatkv_kernels.rope`; keys, values: [num_blocks, num_kv_heads, block_tokens, head_dim];
    slots: [num_new] int64, where each token goes, a token below 0 goes nowhere; query_norm,
    key_norm: [head_dim], weights of an RMS norm of each head before its rotation. Everything is
    computed in float32 or better, from the norm to the rotation, and rounded once. Returns
    [num_new, num_heads, head_dim].
    """
    num_kv_heads, block_tokens = keys.shape[1:3]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    query, new_keys = wide[:, :num_heads], wide[:, num_heads : num_heads + num_kv_heads]
    new_values = wide[:, num_heads + num_kv_heads :]
    if query_norm is not None:
        query = rms_norm.reference(query, query_norm, eps)
    if key_norm is not None:
        new_keys = rms_norm.reference(new_keys, key_norm, eps)
    angles = cos[positions.long()], signed_sin[positions.long()]
    kept = slots >= 0
    block = slots[kept] // block_tokens
    place = slots[kept] % block_tokens
    keys[block, :, place] = rope(new_keys, *angles)[kept].to(keys.dtype)
    values[block, :, place] = new_values[kept].to(values.dtype)
    return rope(query, *angles).to(heads.dtype)
