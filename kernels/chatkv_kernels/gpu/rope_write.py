"""See `chatkv_kernels.rope_write`. A program takes a few heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, meta_pool, per_shape

HEADS = 4  # of a program: at one token, enough programs to share the bytes among multiprocessors


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
    num_new, all_heads, head_dim = heads.shape
    num_kv_heads, block_tokens = keys.shape[1:3]
    num_heads = all_heads - 2 * num_kv_heads
    assert heads.stride()[1:] == (head_dim, 1) and cos.stride() == signed_sin.stride()
    assert keys.stride() == values.stride() and keys.stride()[2:] == (head_dim, 1)
    query = torch.empty(num_new, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    _rope_write[(num_new, triton.cdiv(all_heads, HEADS))](
        heads,
        positions,
        cos,
        signed_sin,
        keys,
        values,
        slots,
        query_norm,
        key_norm,
        query,
        eps,
        heads.stride(0),
        cos.stride(0),
        *keys.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        BLOCK_TOKENS=block_tokens,
        HEADS=HEADS,
        num_warps=1,
    )
    return query


@triton.jit
def _rope_write(
    heads,
    positions,
    cos,
    signed_sin,
    keys,
    values,
    slots,
    query_norm,  # or None
    key_norm,  # or None
    query,
    eps,
    heads_stride,
    angle_stride,
    block_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # half a head, padded to a power of two
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    in_head = (column < HALF)[None, :]
    inside = (is_query | is_key | is_value)[:, None] & in_head

    source = heads + token * heads_stride + (head * HEAD_DIM)[:, None] + column[None, :]
    low = tl.load(source, inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, inside, other=0.0).to(tl.float32)
    if query_norm is not None:
        low, high = _normed(low, high, query_norm, is_query, eps, column, HALF)
    if key_norm is not None:
        low, high = _normed(low, high, key_norm, is_key, eps, column, HALF)

    angle = tl.load(positions + token).to(tl.int64) * angle_stride + column
    cos_low = tl.load(cos + angle, column < HALF, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, column < HALF, other=0.0).to(tl.float32)
    sin_low = tl.load(signed_sin + angle, column < HALF, other=0.0).to(tl.float32)
    sin_high = tl.load(signed_sin + angle + HALF, column < HALF, other=0.0).to(tl.float32)
    turned_low = low * cos_low[None, :] + high * sin_low[None, :]
    turned_high = high * cos_high[None, :] + low * sin_high[None, :]

    to = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(to, turned_low.to(query.dtype.element_ty), is_query[:, None] & in_head)
    tl.store(to + HALF, turned_high.to(query.dtype.element_ty), is_query[:, None] & in_head)

    slot = tl.load(slots + token)
    if slot >= 0:
        block = (slot // BLOCK_TOKENS).to(tl.int64) * block_stride
        place = (block + slot % BLOCK_TOKENS * HEAD_DIM + column)[None, :]
        key_to = keys + place + ((head - NUM_HEADS).to(tl.int64) * kv_head_stride)[:, None]
        tl.store(key_to, turned_low.to(keys.dtype.element_ty), is_key[:, None] & in_head)
        tl.store(key_to + HALF, turned_high.to(keys.dtype.element_ty), is_key[:, None] & in_head)
        value_head = (head - NUM_HEADS - NUM_KV_HEADS).to(tl.int64)
        value_to = values + place + (value_head * kv_head_stride)[:, None]
        tl.store(value_to, low.to(values.dtype.element_ty), is_value[:, None] & in_head)
        tl.store(value_to + HALF, high.to(values.dtype.element_ty), is_value[:, None] & in_head)


@triton.jit
def _normed(low, high, weight, chosen, eps, column, HALF: tl.constexpr):
    """The halves of each head, RMS-normed where it is one of the `chosen`."""
    mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
    scale = tl.where(chosen, tl.rsqrt(mean + eps), 1.0)[:, None]
    weight_low = tl.load(weight + column, column < HALF, other=0.0).to(tl.float32)
    weight_high = tl.load(weight + HALF + column, column < HALF, other=0.0).to(tl.float32)
    low *= scale * tl.where(chosen[:, None], weight_low[None, :], 1.0)
    high *= scale * tl.where(chosen[:, None], weight_high[None, :], 1.0)
    return low, high


def _example(shape: Shape) -> None:
    all_heads = shape.num_heads + 2 * shape.num_kv_heads
    heads = meta(8, all_heads, shape.head_dim)
    positions, slots = meta(8, dtype=torch.int32), meta(8, dtype=torch.int64)
    angles = meta(4096, 1, shape.head_dim), meta(4096, 1, shape.head_dim)
    keys, values = meta_pool(shape)
    norm = meta(shape.head_dim)
    rope_write(heads, positions, *angles, keys, values, slots)
    rope_write(heads, positions, *angles, keys, values, slots, norm, norm, 1e-6)


SPECS = per_shape("rope_write", _example)
