"""A linear layer for the few rows of a decode step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv_kernels.dispatch import has_kernel

MAX_ROWS = 16  # of a kernel; more are a matter for the library's matrix product


@has_kernel
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """residual + x @ weight.T + bias, summed in float32 or better and rounded once.

    x: [rows, in_features], rows contiguous, as many as MAX_ROWS; weight: [out_features,
    in_features], rows contiguous; bias: [out_features]; residual: [rows, out_features],
    contiguous. Returns [rows, out_features] of x's dtype. A row's result does not depend on the
    other rows.
    """
    return finish(x, F.linear(wide(x), wide(weight)), bias, residual)


def wide(tensor: Tensor) -> Tensor:
    """In float32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def finish(x: Tensor, product: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """What follows a product, rounded to x's dtype."""
    for term in (bias, residual):
        if term is not None:
            product = product + wide(term)
    return product.to(x.dtype)
