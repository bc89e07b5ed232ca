"""The GPU's `packed` against the store's: the same bytes, and every bit back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv_kernels.packed import pack_packed, unpack_packed
from chatkv_store import codec
from chatkv_store.payloads import Context
from pooled import Shape, encoded, on_device, pool_of, shapes

DTYPES: Any = st.sampled_from(["bfloat16", "float16"])


def check(device: torch.device, shape: Shape, dtype: Any, noise: bool, seed: int) -> None:
    """Packs what the store would, and unpacks what the store has packed."""
    pool, bits, table = pool_of(shape, dtype, seed, device, noise)
    packed = [codec.by_name("packed").encode(block, Context(dtype)) for block in bits]
    assert encoded(*pack_packed.kernel(pool, table)) == packed
    assert encoded(*pack_packed.reference(pool, table)) == packed
    payloads, offsets = on_device(packed, device)
    for unpack in (unpack_packed.kernel, unpack_packed.reference):
        out = torch.full_like(pool, float("nan"))
        unpack(payloads, offsets, out, table)
        found = out.view(torch.int16).cpu()[table.long().cpu()]
        np.testing.assert_array_equal(found.numpy().view("<u2"), bits)
        rest = [block for block in range(len(pool)) if block not in table.tolist()]
        assert out[rest].isnan().all(), "wrote outside its blocks"


CASES = given(shape=shapes(), dtype=DTYPES, noise=st.booleans(), seed=st.integers(0, 99))


@settings(max_examples=5)
@CASES
def test_is_the_stores(
    device: torch.device, shape: Shape, dtype: Any, noise: bool, seed: int
) -> None:
    check(device, shape, dtype, noise, seed)


@pytest.mark.slow
@settings(max_examples=40)
@CASES
def test_is_the_stores_often(
    device: torch.device, shape: Shape, dtype: Any, noise: bool, seed: int
) -> None:
    check(device, shape, dtype, noise, seed)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_every_word_comes_back(device: torch.device, dtype: Any) -> None:
    """Infinities, NaN payloads, denormals, both zeros: all 16-bit words, most of them escapes."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(1, 1, 2, 2, 128, 128)
    pool = words.to(device).view(getattr(torch, dtype))
    table = torch.zeros(1, dtype=torch.int32, device=device)
    payloads, offsets = pack_packed.kernel(pool, table)
    assert encoded(payloads, offsets) == [
        codec.by_name("packed").encode(words[0].numpy().view("<u2"), Context(dtype))
    ]
    out = torch.zeros_like(pool)
    unpack_packed.kernel(payloads, offsets, out, table)
    assert torch.equal(out.view(torch.int16).cpu(), words)


def test_what_cannot_be_packed_is_refused(device: torch.device) -> None:
    table = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_packed(torch.zeros(1, 1, 2, 1, 4, 12, dtype=torch.float16, device=device), table)
    with pytest.raises(ValueError, match="must be bfloat16 or float16"):
        pack_packed(torch.zeros(1, 1, 2, 1, 4, 8, device=device), table)
    across = torch.zeros(1, 1, 2, 1, 8, 4, dtype=torch.float16, device=device).transpose(-1, -2)
    with pytest.raises(ValueError, match="contiguous"):
        pack_packed(across, table)
