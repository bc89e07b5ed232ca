"""silu_mul against float64, at sizes that fill no tile."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agreement import assert_agrees, dtype_on, in_float64
from chatkv_kernels.silu_mul import silu_mul

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=20)
@given(rows=st.integers(1, 3), size=st.integers(1, 1300), dtype=DTYPES, seed=st.integers(0, 99))
def test_agrees(device: torch.device, rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = (4 * torch.randn(rows, 2 * size)).to(device, dtype_on(device, dtype))
    exact = in_float64(silu_mul.reference, gate_up)
    assert_agrees(silu_mul.kernel(gate_up), exact)
    assert_agrees(silu_mul.reference(gate_up), exact)
