"""See `chatkv_kernels.silu_mul`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, per_shape

TILE = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    num_tokens, twice = gate_up.shape
    size = twice // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = (num_tokens, triton.cdiv(size, TILE))
    _silu_mul[grid](gate_up, out, size, gate_up.stride(0), TILE=TILE, num_warps=4)
    return out


@triton.jit
def _silu_mul(gate_up, out, size, row_stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    gate = tl.load(gate_up + row * row_stride + column, inside).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + column, inside).to(tl.float32)
    product = gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), inside)


def _example(shape: Shape) -> Tensor:
    return silu_mul(meta(8, 2 * shape.intermediate))


SPECS = per_shape("silu_mul", _example)
