"""See `chatkv_kernels.rerotate`. A program takes some tokens of one head, neighbours as a rule."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, per_shape

TOKENS = 32


def rerotate(
    source: Tensor,
    target: Tensor,
    source_slots: Tensor,
    target_slots: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
) -> None:
    _, num_layers, num_kv_heads, _, head_dim = source.shape
    (num_tokens,) = source_slots.shape
    for keys in (source, target):
        assert keys.stride()[3:] == (head_dim, 1)
    assert cos.stride() == signed_sin.stride()
    _rerotate[(triton.cdiv(num_tokens, TOKENS), num_layers, num_kv_heads)](
        source,
        target,
        source_slots,
        target_slots,
        cos,
        signed_sin,
        num_tokens,
        *source.stride()[:3],
        *target.stride()[:3],
        cos.stride(0) if cos.shape[0] > 1 else 0,
        SOURCE_TOKENS=source.shape[3],
        TARGET_TOKENS=target.shape[3],
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        TOKENS=TOKENS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _rerotate(
    source,
    target,
    source_slots,
    target_slots,
    cos,
    signed_sin,
    num_tokens,
    source_block_stride,
    source_layer_stride,
    source_head_stride,
    target_block_stride,
    target_layer_stride,
    target_head_stride,
    angle_stride,
    SOURCE_TOKENS: tl.constexpr,  # per block
    TARGET_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # half a head, padded to a power of two
    TOKENS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    layer, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (token < num_tokens)[:, None] & (column < HALF)[None, :]

    slot = tl.load(source_slots + token, token < num_tokens, other=0)
    place = slot // SOURCE_TOKENS * source_block_stride + slot % SOURCE_TOKENS * HEAD_DIM
    at = source + layer * source_layer_stride + head * source_head_stride
    at += place[:, None] + column[None, :]
    low = tl.load(at, inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, inside, other=0.0).to(tl.float32)

    angle = (token * angle_stride)[:, None] + column[None, :]
    turned_low = low * tl.load(cos + angle, inside) + high * tl.load(signed_sin + angle, inside)
    angle += HALF
    turned_high = high * tl.load(cos + angle, inside) + low * tl.load(signed_sin + angle, inside)

    slot = tl.load(target_slots + token, token < num_tokens, other=0)
    place = slot // TARGET_TOKENS * target_block_stride + slot % TARGET_TOKENS * HEAD_DIM
    at = target + layer * target_layer_stride + head * target_head_stride
    at += place[:, None] + column[None, :]
    tl.store(at, turned_low.to(target.dtype.element_ty), inside)
    tl.store(at + HALF, turned_high.to(target.dtype.element_ty), inside)


def _example(shape: Shape) -> None:
    keys = meta(512, 32, 2, shape.num_kv_heads, 64, shape.head_dim)[:, :, 0]
    slots = meta(4096, dtype=torch.int64)
    turn = meta(1, 1, shape.head_dim, dtype=torch.float32)
    rerotate(keys, keys, slots, slots, turn, turn)


SPECS = per_shape("rerotate", _example)
