"""Attention over a sequence's KV, as plain torch: the CPU path and the reference of the kernels.

All functions see one sequence's keys and values as [num_kv_heads, num_tokens, head_dim] views
(contiguous where the pool's blocks are consecutive) and queries of the tokens at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries per tile of the bf16 path. 64 keeps a tile's scores (3 heads x 64 x 4096 in bf16) inside
# a laptop's L2+L3; 256 was up to 1.8x slower at 4k tokens of history, 32 lost to launch overhead.
QUERY_TILE = 64


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """One new token over everything before it and itself.

    query: [num_heads, head_dim]; keys, values: [num_kv_heads, num_tokens, head_dim], the new
    token's own included. Returns [num_heads, head_dim].
    """
    if window is not None and keys.shape[1] > window:
        keys, values = keys[:, -window:], values[:, -window:]
    num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    # The heads of a group read the same keys: as rows of one query matrix they share one pass
    # over memory (4.5x faster than enable_gqa in bf16 at 6k tokens).
    grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
    return out.view(num_heads, head_dim)


def prefill_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """A chunk of new tokens over the history before it and, causally, over itself.

    queries: [num_new, num_heads, head_dim]; keys, values: [num_kv_heads, num_tokens, head_dim]
    with the chunk's own at the end, so query i sees num_tokens - num_new + i + 1 of them (the
    last `window` of these where a window is given). Returns [num_new, num_heads, head_dim].
    """
    if queries.dtype == torch.float32 or queries.device.type != "cpu":
        return _prefill_whole(queries, keys, values, scale, window)
    return _prefill_tiled(queries, keys, values, scale, window)


def _causal_mask(
    num_new: int, num_tokens: int, first: int, window: int | None, like: Tensor
) -> Tensor:
    """Additive mask [num_new, num_tokens]: query i stands at position first + i of the keys."""
    key = torch.arange(num_tokens, device=like.device)
    position = torch.arange(first, first + num_new, device=like.device)[:, None]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    return torch.zeros(num_new, num_tokens, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, float("-inf")
    )


@lru_cache(maxsize=2 * QUERY_TILE)
def _tile_mask(rows: int, dtype: torch.dtype) -> Tensor:
    """What a tile's queries see of its own keys, on the CPU: [rows, rows], the same everywhere."""
    return _causal_mask(rows, rows, 0, None, torch.empty(0, dtype=dtype))


def draft_places(num_new: int, instead: Sequence[int]) -> list[int]:
    """How far behind the first of `num_new` tokens each stands: a token, the draft behind it, and
    then one for each of `instead`, that could come instead of the draft's token of that index."""
    return [*range(num_new - len(instead)), *(index + 1 for index in instead)]


def draft_mask(
    num_new: int,
    num_tokens: int,
    instead: Sequence[int],
    group: int,
    window: int | None,
    like: Tensor,
) -> Tensor:
    """Who sees whom, for `short_attention`: additive, [num_new * group, num_tokens], or of the last
    tokens only where a window hides the others. Tokens are those of `draft_places`: each sees what
    is in front of its place, and itself."""
    seen = num_tokens if window is None else min(num_tokens, window + num_new - 1)
    places = torch.tensor(draft_places(num_new, instead), device=like.device)[:, None]
    index = torch.arange(num_new, device=like.device)
    chain = num_new - len(instead)
    hidden = torch.zeros(num_new, seen, dtype=torch.bool, device=like.device)
    is_before = (index < chain) & (index < places)
    hidden[:, seen - num_new :] = ~(is_before | (index == index[:, None]))
    if window is not None:
        history = torch.arange(num_new - seen, 0, device=like.device)
        hidden |= torch.cat([history, places[:, 0]]) <= places - window
    mask = torch.zeros(num_new, seen, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf")).repeat_interleave(group, 0)


def short_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor
) -> Tensor:
    """What `prefill_attention` computes, in the way of `decode_attention`: for a few new tokens,
    such as one of an answer and a draft, whose `draft_mask` is the same in all layers. The heads of
    a group, those of all new tokens, are rows of one query matrix and share one pass over memory
    (of 1,000 tokens in bf16, five new ones took twice as long as one has, and four times as long by
    `prefill_attention`)."""
    num_new, num_heads, head_dim = queries.shape
    num_kv_heads, group = keys.shape[0], num_heads // keys.shape[0]
    seen = mask.shape[1]
    if seen < keys.shape[1]:
        keys, values = keys[:, -seen:], values[:, -seen:]
    by_group = queries.view(num_new, num_kv_heads, group, head_dim).transpose(0, 1)
    rows = by_group.reshape(1, num_kv_heads, num_new * group, head_dim)
    out = F.scaled_dot_product_attention(rows, keys[None], values[None], mask, scale=scale)
    by_token = out.view(num_kv_heads, num_new, group, head_dim).transpose(0, 1)
    return by_token.reshape(num_new, num_heads, head_dim)


def _prefill_whole(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    num_new, num_tokens = queries.shape[0], keys.shape[1]
    query = queries.transpose(0, 1)[None]
    if num_new == num_tokens and (window is None or window >= num_tokens):
        out = F.scaled_dot_product_attention(
            query, keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        mask = _causal_mask(num_new, num_tokens, num_tokens - num_new, window, queries)
        out = F.scaled_dot_product_attention(
            query, keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def _prefill_tiled(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """The same in tiles of queries through batched matmuls, which in bf16 run on the dot-product
    units of the CPU where the library's fused attention does not (2.2-2.5x faster at 2k-4k).

    Scores would be rounded to bf16 before the softmax. Softmax ignores a shift per row, so each
    row is shifted by (about) its largest score *inside* the matmul, whose accumulator is fp32:
    what is rounded is then the distance to the maximum, smallest where the weight is largest.
    """
    num_new, num_heads, head_dim = queries.shape
    num_kv_heads, num_tokens, _ = keys.shape
    group = num_heads // num_kv_heads
    history = num_tokens - num_new
    out = torch.empty(num_new, num_heads, head_dim, dtype=queries.dtype)
    scaled = queries.view(num_new, num_kv_heads, group, head_dim).permute(1, 2, 0, 3) * scale
    for start in range(0, num_new, QUERY_TILE):
        stop = min(start + QUERY_TILE, num_new)
        first = max(0, history + start + 1 - window) if window is not None else 0
        tile_keys = keys[:, first : history + stop]
        tile_values = values[:, first : history + stop]
        seen, rows = history + stop - first, stop - start
        query = scaled[:, :, start:stop].reshape(num_kv_heads, group * rows, head_dim)
        shift = _row_shift(query, tile_keys, group, rows)
        scores = torch.baddbmm(
            shift.expand(-1, -1, seen), query, tile_keys.transpose(1, 2), beta=-1.0
        )
        if window is None:  # everything in front of the tile is seen
            border, mask = seen - rows, _tile_mask(rows, scores.dtype)
        else:
            border, mask = 0, _causal_mask(rows, seen, seen - rows, window, scores)
        scores.view(num_kv_heads, group, rows, seen)[..., border:] += mask
        weighted = torch.bmm(torch.softmax(scores, -1), tile_values)
        out[start:stop].view(rows, num_kv_heads, group, head_dim).copy_(
            weighted.view(num_kv_heads, group, rows, head_dim).permute(2, 0, 1, 3)
        )
    return out


def _row_shift(query: Tensor, keys: Tensor, group: int, rows: int) -> Tensor:
    """A cheap guess of each row's largest score: the first key (where most heads look) or the
    token's own. [num_kv_heads, group * rows, 1], any value is right, a good one is exact."""
    num_kv_heads, _, head_dim = query.shape
    sink = torch.bmm(query, keys[:, :1].transpose(1, 2))
    own = (query.view(num_kv_heads, group, rows, head_dim) * keys[:, None, -rows:]).sum(-1)
    return torch.maximum(sink, own.view(num_kv_heads, group * rows, 1))
