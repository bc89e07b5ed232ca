"""See `chatkv_kernels.rms_norm`. One program per token, which holds the whole row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chatkv_kernels.gpu.spec import Shape, meta, per_shape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, eps, out, total)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
) -> None:
    num_tokens, size = x.shape
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    width = triton.next_power_of_2(size)
    _rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        total,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        SIZE=size,
        WIDTH=width,
        num_warps=min(max(width // 512, 1), 16),  # 16 numbers of a row for each thread
    )


@triton.jit
def _rms_norm(
    x,
    residual,  # or None
    weight,
    out,
    total,  # or None
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < SIZE
    wide = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row * residual_stride + column, inside, other=0.0).to(tl.float32)
        rounded = wide.to(out.dtype.element_ty)
        tl.store(total + row * SIZE + column, rounded, inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide * scale * tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), inside)


def _example(shape: Shape) -> None:
    x, weight = meta(8, shape.hidden), meta(shape.hidden)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x, weight, 1e-5)


SPECS = per_shape("rms_norm", _example)
