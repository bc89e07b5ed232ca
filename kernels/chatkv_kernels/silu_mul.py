"""The gate of a SwiGLU MLP (arXiv 2002.05202): silu(gate) times up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel


@has_kernel
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 or better and rounded once.

    gate_up: [num_tokens, 2 * size], the gates first. Returns [num_tokens, size] of its dtype.
    """
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)
