"""Rotary position embedding, half-split layout (arXiv 2104.09864, as HF checkpoints store it)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate each head by its token's angle.

    heads: [num_tokens, num_heads, head_dim]; cos, signed_sin: [num_tokens, 1, head_dim], where
    signed_sin carries -sin in its first half, so that the rotation is one roll and one fused
    multiply-add. Returns a new tensor of heads' shape and dtype.
    """
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * cos, heads.roll(half, -1), signed_sin)
