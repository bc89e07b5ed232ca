"""Attention of an answer's token and its draft, against that of a prefilled chunk."""

from __future__ import annotations

import pytest
import torch

from chatkv_kernels.attention import (
    decode_attention,
    draft_mask,
    draft_places,
    prefill_attention,
    short_attention,
)

# As for the kernels: sums of a few hundred terms, rounded once.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 64, 1000])
@pytest.mark.parametrize(("num_new", "num_tokens"), [(1, 1), (2, 2), (3, 70), (8, 8), (17, 333)])
def test_it_is_that_of_a_chunk(
    dtype: torch.dtype, window: int | None, num_new: int, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    queries = torch.randn(num_new, 6, 16, generator=generator).to(dtype)
    # As in the pool: a view, behind which other memory follows, of nobody.
    keys, values = torch.full((2, 2, num_tokens + 9, 16), float("nan"), dtype=dtype)
    for half in (keys, values):
        half[:, :num_tokens] = torch.randn(2, num_tokens, 16, generator=generator).to(dtype)
    history = keys[:, :num_tokens], values[:, :num_tokens]
    mask = draft_mask(num_new, num_tokens, (), 3, window, queries)
    out = short_attention(queries, *history, 0.25, mask)
    expected = prefill_attention(queries.float(), *(half.float() for half in history), 0.25, window)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    last = decode_attention(queries[-1], *history, 0.25, window)
    torch.testing.assert_close(out[-1], last, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 40])
@pytest.mark.parametrize("instead", [(0,), (0, 0, 1), (2, 0, 1, 1)])
def test_a_token_beside_the_branch_sees_what_is_in_front_of_its_place(
    window: int | None, instead: tuple[int, ...]
) -> None:
    """As if the branch ended there, with that token at its end."""
    history, chain = 30, 4  # the new token, and a draft of three
    num_new = chain + len(instead)
    generator = torch.Generator().manual_seed(7)
    queries = torch.randn(num_new, 6, 16, generator=generator)
    keys, values = torch.randn(2, 2, history + num_new, 16, generator=generator)
    mask = draft_mask(num_new, history + num_new, instead, 3, window, queries)
    out = short_attention(queries, keys, values, 0.25, mask)
    for row, place in enumerate(draft_places(num_new, instead)):
        path = [*range(history + place), history + row]
        expected = decode_attention(queries[row], keys[:, path], values[:, path], 0.25, window)
        torch.testing.assert_close(out[row], expected, rtol=1e-5, atol=1e-5)
