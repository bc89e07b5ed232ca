"""Attention of new tokens of several sequences over KV that lies in blocks of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv_kernels.attention import prefill_attention
from chatkv_kernels.dispatch import has_kernel
from chatkv_kernels.paged_decode import in_order


@has_kernel
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
    """Each sequence's new tokens over what is before them and, causally, over themselves.

    query: [num_new, num_heads, head_dim], the new tokens of one sequence after the other: those
    of sequence i are [starts[i], starts[i + 1]); starts: [num_seqs + 1] int32; lengths: [num_seqs]
    int32, tokens of each sequence whose KV is there, the new ones' included, so these are its
    last ones; max_new: the most that one sequence has of them. keys, values, block_table, scale
    and window are as in `paged_decode`. Returns [num_new, num_heads, head_dim].
    """
    out = torch.zeros_like(query)
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        new = slice(bounds[row], bounds[row + 1])
        if new.start < new.stop:
            history = in_order(keys, block_table[row], length)
            out[new] = prefill_attention(
                query[new], history, in_order(values, block_table[row], length), scale, window
            )
    return out
