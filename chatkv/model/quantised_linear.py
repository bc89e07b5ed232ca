"""A matrix of the decoder whose weights take 8 or 4 bits.

A decode step reads every weight once per token, so fewer bytes are speed: a few rows go to a kernel
for packed weights. Prefill is bound by arithmetic: many rows go to a product that makes the weights
dense on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.model.linear import HalfLinear, Linear
from chatkv.model.quantise import KernelWeight, QuantisedWeight, Reordered
from chatkv.model.tiled_product import TiledProduct
from chatkv_kernels.linear import MAX_ROWS
from chatkv_kernels.linear_quantised import (
    Weight4,
    Weight8,
    codes_int4,
    dequantise_weight_8,
    dequantise_weight_int4,
    linear_fp8,
    linear_int4,
    linear_int8,
)

Product = Callable[[Tensor], Tensor]


class FewRows(Protocol):
    """How many rows, from one on, a matrix multiplies faster packed than dense on the way."""

    def __call__(self, weight: KernelWeight, packed: Product, many: Product) -> int: ...


def always_few(weight: KernelWeight, packed: Product, many: Product) -> int:
    """`FewRows` without measuring."""
    return 1


class QuantisedLinear:
    """y = x Wᵀ + b, as `Linear`, of x's dtype; W is of [out_features, in_features].

    few_rows: how many rows are few on a CPU. A row's result does not depend on the other ones, but
    on whether they are few.
    """

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        few_rows: FewRows,
    ) -> None:
        self.bias = bias
        if isinstance(weight, Reordered):
            self._order: Tensor | None = weight.order
            weight = weight.weight
        else:
            self._order = None
        if weight.codes.device.type != "cpu":
            self._packed: Product = partial(_device_product, weight)
            self._many: Product = partial(_dequantised_product, weight)
            self._most = MAX_ROWS
            return
        packed = cpu_product(weight, dtype)
        self._many = TiledProduct(weight, dtype)
        self._packed = packed or self._many
        self._most = few_rows(weight, packed, self._many) if packed is not None else 0

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self._order is None else x[:, self._order]
        out = self._packed(x) if len(x) <= self._most else self._many(x)
        return out if self.bias is None else out.add_(self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        return self(x).add_(residual)


class Beside:
    """Matrices that read the same input but are stored differently: their outputs one behind the
    other."""

    def __init__(self, parts: Sequence[AnyLinear]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], -1)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        return self(x).add_(residual)


AnyLinear: TypeAlias = Linear | HalfLinear | QuantisedLinear | Beside


def dequantised(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """[out, in] of `dtype`."""
    if isinstance(weight, Reordered):
        reordered = dequantised(weight.weight, dtype)
        dense = torch.empty_like(reordered)
        dense[:, weight.order.long()] = reordered
        return dense
    if isinstance(weight, Weight8):
        return dequantise_weight_8(weight, dtype)
    return dequantise_weight_int4(weight, dtype)


def cpu_product(weight: KernelWeight, dtype: torch.dtype) -> Product | None:
    """The library's kernel for packed weights on a CPU, for x [rows, in] of `dtype`; None where it
    has none: fp8, 8-bit codes in groups of 16 or of inputs that are no multiple of 16 (with AVX-512
    it reads behind the last one then), and groups where outputs are no multiple of 16 or inputs no
    whole groups.

    Of these kernels only those for bfloat16 are vector code (on AVX2 as on AVX-512; in float32 they
    take two to nine times as long as a dense product). So x and y are rounded to that, whatever
    `dtype` is: by one part in 512 of themselves at most.
    """
    if isinstance(weight, Weight8):
        if weight.codes.dtype != torch.int8:
            return None
        if not weight.group_size:
            return None if weight.codes.shape[1] % 16 else _int8_product(weight, dtype)
    fours = _int4_planes(weight) if isinstance(weight, Weight8) else _int4_product(weight)
    return None if fours is None else lambda x: fours(x.bfloat16()).to(dtype)


def _int8_product(weight: Weight8, dtype: torch.dtype) -> Product:
    codes = weight.codes
    if dtype == torch.bfloat16:
        steps = weight.scales.to(dtype)
        return lambda x: torch.ops.aten._weight_int8pack_mm(x.contiguous(), codes, steps)
    ones, scales = torch.ones(len(codes), dtype=torch.bfloat16), weight.scales

    def product(x: Tensor) -> Tensor:
        steps: Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16().contiguous(), codes, ones)
        return (steps * scales).to(dtype)

    return product


def _int4_product(weight: Weight4) -> Product | None:
    if weight.codes.shape[1] % 16 or weight.num_inputs % weight.group_size:
        return None
    codes = codes_int4(weight).to(torch.int32)
    scales = weight.scales.float()
    shifts = 0 * scales if weight.zeros is None else scales * (8 - weight.zeros.float())
    return _groups_product(codes, scales, shifts, weight.group_size)


def _int4_planes(weight: Weight8) -> Product | None:
    """Codes of 8 bits in groups, which the library has no kernel for, as twice as many of 4 bits:
    code = 16 * high + low, with high from -8 to 7."""
    codes, scales, group = weight
    if len(codes) % 16 or codes.shape[1] % group or group < 32:
        return None
    wide = codes.to(torch.int32)
    planes = torch.cat([(wide >> 4) + 8, wide & 15], 1)
    scales = torch.cat([16 * scales.float(), scales.float()])
    shifts = scales * (torch.arange(len(scales))[:, None] >= len(scales) // 2) * 8
    product = _groups_product(planes, scales, shifts, group)
    return lambda x: product(torch.cat([x, x], -1))


def _groups_product(codes: Tensor, scales: Tensor, shifts: Tensor, group: int) -> Product:
    """x [rows, in] of bfloat16 times scale * (code - 8) + shift; codes: [out, in] of int32, the
    others [in / group, out]."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack([scales, shifts], -1).bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, both)


def _dequantised_product(weight: KernelWeight, x: Tensor) -> Tensor:
    return F.linear(x, dequantised(weight, x.dtype))


def _device_product(weight: KernelWeight, x: Tensor) -> Tensor:
    if isinstance(weight, Weight4):
        return linear_int4(x, weight)
    return (linear_int8 if weight.codes.dtype == torch.int8 else linear_fp8)(x, weight)
