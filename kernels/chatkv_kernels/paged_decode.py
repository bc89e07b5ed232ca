"""Attention of one new token per sequence over KV that lies in blocks of a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv_kernels.attention import decode_attention
from chatkv_kernels.dispatch import has_kernel


@has_kernel
def paged_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Each sequence's newest token over its whole history, itself included.

    query: [num_seqs, num_heads, head_dim]; keys, values: [num_blocks, num_kv_heads, block_tokens,
    head_dim], views of one pool; block_table: [num_seqs, max_blocks] int32, the blocks of each
    sequence in their order, only those that its length needs are read; lengths: [num_seqs] int32,
    tokens whose KV is there, 0 for a row that stands for nothing; scale: above 0; window: how many
    of the last tokens are seen. Returns [num_seqs, num_heads, head_dim], zeros where length is 0.
    """
    out = torch.zeros_like(query)
    for row, length in enumerate(lengths.tolist()):
        if length:
            history = in_order(keys, block_table[row], length)
            out[row] = decode_attention(
                query[row], history, in_order(values, block_table[row], length), scale, window
            )
    return out


def in_order(blocks: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` tokens of the sequence whose blocks `table` lists.

    blocks: [num_blocks, num_kv_heads, block_tokens, head_dim]. Returns [num_kv_heads, length,
    head_dim], copied.
    """
    needed = -(-length // blocks.shape[2])
    return blocks[table[:needed].long()].transpose(0, 1).flatten(1, 2)[:, :length]
