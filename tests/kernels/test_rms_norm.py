"""rms_norm and add_rms_norm against float64, on rows of any length that are cut from wider ones."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agreement import assert_agrees, dtype_on, in_float64
from chatkv_kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-5
ROWS = st.integers(1, 3)
SIZE = st.integers(1, 700)
DTYPE = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def rows(device: torch.device, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(num_rows, size + 5)).to(device, dtype)[:, 2 : size + 2]


@settings(max_examples=12)
@given(num_rows=ROWS, size=SIZE, dtype=DTYPE)
def test_rms_norm(device: torch.device, num_rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dtype = dtype_on(device, dtype)
    x, weight = rows(device, num_rows, size, dtype), torch.randn(size).to(device, dtype)
    exact = in_float64(rms_norm.reference, x, weight, EPS)
    assert_agrees(rms_norm.kernel(x, weight, EPS), exact)
    assert_agrees(rms_norm.reference(x, weight, EPS), exact)


@settings(max_examples=12)
@given(num_rows=ROWS, size=SIZE, dtype=DTYPE)
def test_add_rms_norm(device: torch.device, num_rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dtype = dtype_on(device, dtype)
    x, residual = (rows(device, num_rows, size, dtype) for _ in range(2))
    weight = torch.randn(size).to(device, dtype)
    normed, total = add_rms_norm.kernel(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_agrees(normed, in_float64(rms_norm.reference, total, weight, EPS))
    assert torch.equal(add_rms_norm.reference(x, residual, weight, EPS)[1], total)


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    x = torch.zeros(2, 33, device=device)
    assert not rms_norm.kernel(x, torch.ones(33, device=device), EPS).any()
