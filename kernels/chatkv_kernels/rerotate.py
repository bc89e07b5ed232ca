"""Moving stored keys to other positions, when what was before them has left the context.

A key that RoPE turned by p · f is turned by (p + delta) · f as soon as it is turned by delta · f
more (arXiv 2104.09864, equation 12): so the key need not be computed again. Each rounding of a key
remains in it, so the original is turned, once, by all that it has moved since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel
from chatkv_kernels.rope import rope


def turn(deltas: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin of the turn by `deltas` positions, for `rerotate`.

    deltas: [num_deltas] of any integers, below 0 towards the front; inverse_frequencies:
    [head_dim / 2] float32, those of the model's rotary tables; a factor on their cos and sin (as
    yarn has) is in the keys already. Returns two of [num_deltas, 1, head_dim] float32, exact to
    its last bit: the angles are computed in float64.
    """
    angles = torch.outer(deltas.double(), inverse_frequencies.double())
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat([cos, cos], -1)[:, None].float(),
        torch.cat([-sin, sin], -1)[:, None].float(),
    )


@has_kernel
def rerotate(
    source: Tensor,
    target: Tensor,
    source_slots: Tensor,
    target_slots: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
) -> None:
    """Copy the keys of tokens to other places, in all layers, turned by cos and signed_sin.

    source, target: [num_blocks, num_layers, num_kv_heads, block_tokens, head_dim] of one dtype,
    the keys of two pools or of the same; source_slots, target_slots: [num_tokens] int64, from where
    to where each token moves; cos, signed_sin: [num_tokens or 1, 1, head_dim] float32, see `turn`.
    In one pool a token may stay where it is, but no token may go to where another one is read.
    Computed in float32 or better and rounded once.
    """
    block_tokens = source.shape[3]
    keys = source[source_slots // block_tokens, :, :, source_slots % block_tokens]
    turned = rope(
        keys.to(torch.promote_types(keys.dtype, torch.float32)), cos[:, None], signed_sin[:, None]
    )
    block_tokens = target.shape[3]
    target[target_slots // block_tokens, :, :, target_slots % block_tokens] = turned.to(keys.dtype)
