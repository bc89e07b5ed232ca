"""How near a kernel must come to its reference, which is computed in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A result is rounded once (half an epsilon) after float32 arithmetic, whose own error is far
# smaller than that of 16-bit numbers, and some epsilons of float32.
ROUNDING = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float16 for bfloat16 on a CPU: Triton's interpreter neither rounds to bfloat16
    as a GPU does nor multiplies matrices of it."""
    return torch.float16 if (dtype, device.type) == (torch.bfloat16, "cpu") else dtype


def in_float64(reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`reference` on copies of the arguments whose floating-point tensors are float64."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return value

    return reference(*map(widen, args), **{name: widen(kwargs[name]) for name in kwargs})


def assert_agrees(actual: Tensor, exact: Tensor, tolerance: float = 1.0) -> None:
    """Every element within rounding of `exact` (float64): times `tolerance`, relative to itself
    or, where terms cancel, to the largest."""
    assert actual.shape == exact.shape
    assert torch.isfinite(actual).all()
    bound = tolerance * ROUNDING[actual.dtype]
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(actual.double(), exact, rtol=bound, atol=bound * scale / 4)
