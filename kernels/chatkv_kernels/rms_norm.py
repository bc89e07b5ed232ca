"""Root-mean-square norm (arXiv 1910.07467), alone and behind a residual connection."""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel


@has_kernel
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, computed in float32 or better and rounded once.

    x: [num_tokens, size]; weight: [size]. Returns x's shape and dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


@has_kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, which is the residual stream from here on.

    x, residual: [num_tokens, size]. The norm is that of the sum as it is rounded, so the two
    agree to the bit with an addition and `rms_norm`.
    """
    total = x + residual
    return rms_norm.reference(total, weight, eps), total
