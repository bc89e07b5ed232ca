"""Random sequences whose KV is scattered over a pool, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass
class Paged:
    """keys, values: [num_blocks, num_kv_heads, block_tokens, head_dim], views of the last layer of
    a pool; block_table: [num_seqs, max_blocks]; lengths: [num_seqs]. Blocks that no sequence uses,
    and the rest of each last one, are NaN; what the table says beyond a length is out of range."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    lengths: Tensor


def make_paged(
    heads: Heads, lengths: list[int], block_tokens: int, dtype: torch.dtype, device: torch.device
) -> Paged:
    needed = [-(-length // block_tokens) for length in lengths]
    order = torch.randperm(sum(needed) + 2).tolist()
    table = torch.full((len(lengths), max(needed) + 1), 2**31 - 1, dtype=torch.int32)
    pool = torch.full(
        (len(order), 2, 2, heads.num_kv_heads, block_tokens, heads.head_dim), float("nan")
    )
    for row, length in enumerate(lengths):
        for index in range(needed[row]):
            block = order.pop()
            table[row, index] = block
            filled = min(block_tokens, length - index * block_tokens)
            pool[block, :, :, :, :filled] = torch.randn(
                2, 2, heads.num_kv_heads, filled, heads.head_dim
            )
    pool = pool.to(device, dtype)
    return Paged(
        pool[:, 1, 0],
        pool[:, 1, 1],
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
