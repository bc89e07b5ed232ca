"""rope_write against float64: what it returns, what it writes, and that it writes nothing else."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agreement import assert_agrees, dtype_on, in_float64
from chatkv_kernels.rope_write import rope_write


@settings(max_examples=6)
@given(
    num_new=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    half=st.sampled_from([1, 8, 20, 32]),
    block_tokens=st.sampled_from([16, 48, 64]),
    norms=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    kept=st.integers(0, 3),
)
@example(1, 3, 3, 32, 64, False, torch.float16, 1)
def test_agrees(
    device: torch.device,
    num_new: int,
    kv_heads: int,
    group: int,
    half: int,
    block_tokens: int,
    norms: bool,
    dtype: torch.dtype,
    kept: int,
) -> None:
    torch.manual_seed(0)
    dtype, head_dim, num_heads = dtype_on(device, dtype), 2 * half, kv_heads * group
    heads = torch.randn(num_new, num_heads + 2 * kv_heads, head_dim).to(device, dtype)
    positions = torch.randint(0, 50, (num_new,), dtype=torch.int32, device=device)
    angles = torch.randn(50, 1, half)
    cos = torch.cat([angles.cos()] * 2, -1).to(device, dtype)
    signed_sin = torch.cat([-angles.sin(), angles.sin()], -1).to(device, dtype)
    pool = torch.randn(3, 2, 2, kv_heads, block_tokens, head_dim).to(device, dtype)
    slots = torch.randperm(3 * block_tokens)[:num_new].to(device)
    slots[kept:] = -1
    norm = (torch.rand(2, head_dim).to(device, dtype) + 0.5).unbind() if norms else (None, None)

    exact_pool = pool.double()
    views = exact_pool[:, 1, 0], exact_pool[:, 1, 1]
    arguments = (slots, *norm, 1e-5)
    exact = in_float64(rope_write.reference, heads, positions, cos, signed_sin, *views, *arguments)
    for run in (rope_write.kernel, rope_write.reference):
        written = pool.clone()
        query = run(
            heads, positions, cos, signed_sin, written[:, 1, 0], written[:, 1, 1], *arguments
        )
        assert_agrees(query, exact)
        assert_agrees(written, exact_pool)
        untouched = exact_pool == pool.double()
        assert torch.equal(written[untouched], pool[untouched])
