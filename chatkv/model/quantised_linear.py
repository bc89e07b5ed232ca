"""A matrix of the decoder whose weights take 8 or 4 bits.

A decode step reads every weight once per token, so fewer bytes are speed; prefill is bound by
arithmetic and wants them whole. So a few rows go to a kernel for packed weights, and more to the
dense product, where there is room to keep that too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.model.linear import Linear
from chatkv.model.quantise import QuantisedWeight
from chatkv_kernels.linear import MAX_ROWS
from chatkv_kernels.linear_quantised import (
    Weight4,
    Weight8,
    dequantise_weight_8,
    dequantise_weight_int4,
    linear_fp8,
    linear_int4,
    linear_int8,
)

Product = Callable[[Tensor], Tensor]


class FewRows(Protocol):
    """How many rows, from one on, a matrix multiplies faster packed than dense."""

    def __call__(self, weight: QuantisedWeight, packed: Product, dense: Product) -> int: ...


def always_few(weight: QuantisedWeight, packed: Product, dense: Product) -> int:
    """`FewRows` without measuring."""
    return 1


class QuantisedLinear:
    """y = x Wᵀ + b, as `Linear`, of x's dtype; W is of [out_features, in_features].

    keeps_dense: whether W lies in memory in `dtype` too; few_rows: how many rows are few on a CPU
    then. A row's result does not depend on the other ones, but on whether they are few.
    """

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        keeps_dense: bool,
        few_rows: FewRows,
    ) -> None:
        self.bias = bias
        on_cpu = weight.codes.device.type == "cpu"
        packed = cpu_product(weight, dtype) if on_cpu else partial(_device_product, weight)
        if keeps_dense:
            self._dense: Product = Linear(dequantised(weight, dtype))
        elif on_cpu and packed is not None:
            self._dense = packed  # twice as slow as a dense product of many rows, making one 10x
        else:
            self._dense = partial(_dequantised_product, weight)
        self._packed = packed or self._dense
        if not on_cpu:
            self._most = MAX_ROWS
        elif packed is None or not keeps_dense:
            self._most = 0
        else:
            self._most = few_rows(weight, packed, self._dense)

    def __call__(self, x: Tensor) -> Tensor:
        out = self._packed(x) if len(x) <= self._most else self._dense(x)
        return out if self.bias is None else out.add_(self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        return self(x).add_(residual)


def dequantised(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] of `dtype`."""
    if isinstance(weight, Weight8):
        return dequantise_weight_8(weight, dtype)
    return dequantise_weight_int4(weight, dtype)


def cpu_product(weight: QuantisedWeight, dtype: torch.dtype) -> Product | None:
    """The library's kernel for packed weights on a CPU, for x [rows, in] of `dtype`; None where it
    has none: fp8, and int4 of outputs that are no multiple of 16."""
    if isinstance(weight, Weight8):
        if weight.codes.dtype != torch.int8:
            return None
        codes, steps = weight.codes, weight.scales.to(dtype)
        return lambda x: torch.ops.aten._weight_int8pack_mm(x.contiguous(), codes, steps)
    return _int4_product(weight, dtype)


def _int4_product(weight: Weight4, dtype: torch.dtype) -> Product | None:
    """The kernel computes scale * (code - 8) + shift."""
    num_out, group = weight.codes.shape[1], weight.group_size
    if num_out % 16 or weight.num_inputs % group or weight.zeros is None:
        return None
    one = weight._replace(scales=torch.ones_like(weight.scales), zeros=None)
    codes = dequantise_weight_int4(one, torch.float32).to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = weight.scales.float()
    shifts = scales * (8 - weight.zeros.float())
    both = torch.stack([scales, shifts], -1).to(dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, both)


def _dequantised_product(weight: QuantisedWeight, x: Tensor) -> Tensor:
    return F.linear(x, dequantised(weight, x.dtype))


def _device_product(weight: QuantisedWeight, x: Tensor) -> Tensor:
    if isinstance(weight, Weight4):
        return linear_int4(x, weight)
    return (linear_int8 if weight.codes.dtype == torch.int8 else linear_fp8)(x, weight)
