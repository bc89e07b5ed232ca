"""paged_decode and paged_prefill against float64: shapes, lengths, windows and splits at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agreement import assert_agrees, dtype_on, in_float64
from chatkv_kernels.gpu.flash import merge
from chatkv_kernels.gpu.target import Target, assume
from chatkv_kernels.paged_decode import paged_decode
from chatkv_kernels.paged_prefill import paged_prefill
from paged import Heads, make_paged

SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """new: tokens of each sequence in this pass, behind those of `before`; multiprocessors: of the
    device that the launch believes in, which decides into how many parts it cuts the keys."""

    heads: Heads
    new: tuple[int, ...]
    before: tuple[int, ...]
    block_tokens: int
    window: int | None = None
    dtype: torch.dtype = torch.float32
    multiprocessors: int = 1


def cases(longest: int, most_new: int) -> st.SearchStrategy[Case]:
    """most_new 1: decode, in which a row may be empty."""
    new = st.just(1) if most_new == 1 else st.integers(0, most_new)
    before = st.integers(-1 if most_new == 1 else 0, longest)

    def build(sequences: list[tuple[int, int]], **rest: object) -> Case:
        new, before = zip(*sequences, strict=True)
        return Case(new=new, before=before, **rest)  # type: ignore[arg-type]

    return st.builds(
        build,
        st.lists(st.tuples(new, before), min_size=1, max_size=3),
        heads=st.builds(
            lambda kv, group, dim: Heads(kv * group, kv, dim),
            st.integers(1, 3),
            st.integers(1, 8),
            st.sampled_from([16, 20, 64, 80]),
        ),
        block_tokens=st.sampled_from([16, 32, 48, 64]),
        window=st.none() | st.integers(1, 150),
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        multiprocessors=st.sampled_from([1, 12, 64]),
    )


def check_decode(device: torch.device, case: Case) -> None:
    torch.manual_seed(0)
    dtype = dtype_on(device, case.dtype)
    lengths = [before + 1 for before in case.before]
    paged = make_paged(case.heads, lengths, case.block_tokens, dtype, device)
    shape = (len(lengths), case.heads.num_heads, case.heads.head_dim)
    query = (2 * torch.randn(shape)).to(device, dtype)
    arguments = (query, paged.keys, paged.values, paged.block_table, paged.lengths, SCALE)
    exact = in_float64(paged_decode.reference, *arguments, case.window)
    with assume(Target(90, case.multiprocessors)):
        assert_agrees(paged_decode.kernel(*arguments, case.window), exact)


def check_prefill(device: torch.device, case: Case) -> None:
    torch.manual_seed(0)
    dtype = dtype_on(device, case.dtype)
    lengths = [new + before for new, before in zip(case.new, case.before, strict=True)]
    paged = make_paged(case.heads, lengths, case.block_tokens, dtype, device)
    starts = torch.tensor([0, *case.new]).cumsum(0).to(device, torch.int32)
    shape = (sum(case.new), case.heads.num_heads, case.heads.head_dim)
    query = (2 * torch.randn(shape)).to(device, dtype)
    arguments = (query, paged.keys, paged.values, paged.block_table, starts, paged.lengths)
    bound = max(case.new) + 5
    exact = in_float64(paged_prefill.reference, *arguments, bound, SCALE, case.window)
    with assume(Target(90, case.multiprocessors)):
        assert_agrees(paged_prefill.kernel(*arguments, bound, SCALE, case.window), exact)


SMOLLM2 = Heads(9, 3, 64)


@settings(max_examples=4)
@given(case=cases(longest=140, most_new=1))
@example(Case(SMOLLM2, new=(1, 1), before=(200, -1), block_tokens=64, dtype=torch.float16))
@example(Case(Heads(2, 2, 20), new=(1,), before=(191,), block_tokens=16, multiprocessors=12))
@example(Case(Heads(4, 1, 16), new=(1,), before=(180,), block_tokens=48, window=70))
def test_decode_agrees(device: torch.device, case: Case) -> None:
    check_decode(device, case)


@settings(max_examples=4)
@given(case=cases(longest=70, most_new=20))
@example(Case(SMOLLM2, new=(5, 0, 1), before=(60, 9, 0), block_tokens=64, dtype=torch.float16))
@example(Case(Heads(8, 1, 20), new=(37,), before=(100,), block_tokens=32, multiprocessors=12))
@example(Case(Heads(8, 1, 16), new=(33,), before=(90,), block_tokens=64, window=20))
def test_prefill_agrees(device: torch.device, case: Case) -> None:
    check_prefill(device, case)


def test_parts_are_merged_by_their_shares(device: torch.device) -> None:
    """More parts than one step takes, some of which saw nothing."""
    torch.manual_seed(0)
    weights = 8 * torch.randn(3, 40, device=device)
    weights[0, ::3] = weights[1, 1:] = weights[2] = float("-inf")
    parts = torch.randn(3, 40, 20, device=device)
    parts[weights == float("-inf")] = float("nan")
    shares = torch.softmax(weights.double() * math.log(2), 1).nan_to_num()[..., None]
    exact = (shares * parts.double().nan_to_num()).sum(1)
    out = torch.empty(3, 20, device=device)
    merge[(3,)](parts, weights, out, 40, HEAD_DIM=20, WIDTH=32, TILE=16, num_warps=4)
    assert_agrees(out, exact)


@pytest.mark.slow
@settings(max_examples=30)
@given(case=cases(longest=700, most_new=1))
def test_decode_agrees_at_length(device: torch.device, case: Case) -> None:
    check_decode(device, case)


@pytest.mark.slow
@settings(max_examples=12)
@given(case=cases(longest=300, most_new=100))
def test_prefill_agrees_at_length(device: torch.device, case: Case) -> None:
    check_prefill(device, case)
