"""Rotary tables of a model: inverse frequencies under each way of scaling, then cos and sin.

The kinds follow their sources: "linear" is position interpolation (arXiv 2306.15595), "llama3"
the frequency bands of Llama 3.1's reference code, "yarn" arXiv 2309.00071 section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chatkv.model.config import ModelConfig, RopeScaling


class RopeTable:
    """cos and signed sin of every position up to a limit, in the model's dtype.

    Attributes: cos, signed_sin: [max_position, 1, head_dim]; the first half of signed_sin holds
    -sin (see `chatkv_kernels.rope`). Angles are computed in float32, as checkpoints expect.
    """

    def __init__(
        self, config: ModelConfig, max_position: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inverse, magnitude = inverse_frequencies(config)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self.cos = torch.cat([cos, cos], -1)[:, None].to(device, dtype)
        self.signed_sin = torch.cat([-sin, sin], -1)[:, None].to(device, dtype)


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float32, and the factor on cos and sin."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "linear":
        return inverse / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    return _yarn(inverse, config, scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inverse
    turns = scaling.original_max_position / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def _yarn(inverse: Tensor, config: ModelConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    def dimension(turns: float) -> float:
        # The dimension whose wavelength makes this many turns within the original context.
        length = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim * math.log(length) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    keep = 1 - ramp.clamp(0, 1)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return inverse / scaling.factor * (1 - keep) + inverse * keep, magnitude
