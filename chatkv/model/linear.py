"""One matrix of the decoder, laid out once for the device it runs on: `Linear` in the dtype that is
computed in, `HalfLinear` in float16 whatever that is."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


def packs_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN multiplies weights of this dtype in its own blocked layout."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


# For how many rows oneDNN lays a weight out; prefill loses nothing by either. In float32 (2 cores,
# AVX2), steps of 2, 4 and 8 rows took 43, 53 and 78 ms laid out for eight, 99, 112 and 123 ms for
# one, and one row the same; and a row alone is then computed to the bit as among others.
# Laid out for 16, 32, 64 or 512 it is as fast as for eight, for any number of rows, and the plain
# layout is slower up to 256: the products of all layers of SmolLM2 took 28 ms for 8 rows (plain
# 48), 60 for 32 (81), 87 for 48 (104), 104 for 64 (124), 191 for 128 (254), 700 for 512 (660).
_ROWS = {torch.float32: 8}


class Linear:
    """y = x Wᵀ + b, with W of [out_features, in_features].

    On a CPU the weight is stored in oneDNN's blocked layout: a decode step reads it at memory
    speed (SmolLM2, 2 cores: 7 ms a token in bf16, against 14 with the plain layout).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = weight.device.type == "cpu" and packs_on_cpu(weight.dtype)
        rows = _ROWS.get(weight.dtype, 1)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
            if self.packed
            else weight.contiguous()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y, in one pass."""
        if not self.packed:
            return residual + F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self.weight, self.bias, "add"
        )
        return out


class HalfLinear:
    """y = x Wᵀ + b, as `Linear`, of x's dtype on a CPU; W of float16 [out_features, in_features].

    FBGEMM's layout and product: weights are made float32 in registers, so only theirs are rounded,
    by one part in 2048 at most. Half of float32's bytes to read (SmolLM2's head on two AVX2 cores:
    3.8 ms a token, against 7.3), and prefill takes as long. A row alone is summed up in another
    order than among others (one padded to four rows is not, but takes 1.4 to 1.8 times as long).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float().contiguous()
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(wide, self._packed).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + y."""
        return self(x).add_(residual)


@cache
def has_half_product() -> bool:
    """Whether this CPU and build of torch multiply weights of float16 at the speed of memory."""
    try:
        product = HalfLinear(torch.ones(16, 16))
        return bool(torch.equal(product(torch.ones(1, 16)), torch.full((1, 16), 16.0)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
