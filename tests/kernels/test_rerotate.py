"""rerotate against float64, and against keys that were computed where they are moved to."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agreement import assert_agrees, dtype_on, in_float64
from chatkv_kernels.rerotate import rerotate, turn
from chatkv_kernels.rope import rope


def frequencies(head_dim: int) -> torch.Tensor:
    return 1.0 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)


@settings(max_examples=8)
@given(
    num_tokens=st.integers(1, 40),
    layers=st.integers(1, 2),
    heads=st.integers(1, 2),
    half=st.sampled_from([1, 8, 20]),
    block_tokens=st.tuples(*[st.sampled_from([16, 48])] * 2),
    one_turn=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_agrees(
    device: torch.device,
    num_tokens: int,
    layers: int,
    heads: int,
    half: int,
    block_tokens: tuple[int, int],
    one_turn: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    dtype = dtype_on(device, dtype)
    pools = [
        torch.randn(4, layers, 2, heads, tokens, 2 * half).to(device, dtype)
        for tokens in block_tokens
    ]
    slots = [torch.randperm(4 * tokens)[:num_tokens].to(device) for tokens in block_tokens]
    deltas = torch.randint(-5000, 5000, (1 if one_turn else num_tokens,))
    angles = [table.to(device) for table in turn(deltas, frequencies(2 * half))]
    source, target = pools[0][:, :, 0], pools[1][:, :, 0]
    exact, before = target.double(), pools[1].clone()
    in_float64(rerotate.reference, source, exact, *slots, *angles)
    rerotate.kernel(source, target, *slots, *angles)
    assert_agrees(target, exact)
    pools[1][:, :, 0] = before[:, :, 0]
    assert torch.equal(pools[1], before)  # values are left alone


def test_in_one_pool_tokens_may_turn_where_they_are(device: torch.device) -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 1, 1, 16, 8, device=device)
    slots = torch.arange(48, device=device)
    angles = [table.to(device) for table in turn(torch.tensor([7]), frequencies(8))]
    exact = keys.double()
    in_float64(rerotate.reference, exact, exact, slots, slots, *angles)
    rerotate.kernel(keys, keys, slots, slots, *angles)
    assert_agrees(keys, exact)


def test_a_moved_key_is_the_key_of_its_new_position(device: torch.device) -> None:
    """Also far out, where float32 has no angle exact to a thousandth."""
    torch.manual_seed(0)
    positions, delta, head_dim = torch.arange(100_000, 100_016), -98_765, 32
    raw = torch.randn(16, 1, head_dim, dtype=torch.float64)
    old, new = (
        rope(raw, *(table.double() for table in turn(where, frequencies(head_dim))))
        for where in (positions, positions + delta)
    )
    slots = torch.arange(16, device=device)
    keys = old.float().view(1, 1, 1, 16, head_dim).to(device)
    angles = [table.to(device) for table in turn(torch.tensor([delta]), frequencies(head_dim))]
    rerotate.kernel(keys, keys, slots, slots, *angles)
    assert_agrees(keys.view(16, 1, head_dim).cpu(), new)
