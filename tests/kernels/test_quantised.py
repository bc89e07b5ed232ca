"""The GPU's `int8`, `fp8` and `int4` against the store's: the same bytes and the same KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatkv_kernels import quantised
from chatkv_kernels.quantised import Turn
from chatkv_store import codec
from chatkv_store.payloads import Context
from kv_samples import Bits
from pooled import Shape, encoded, on_device, pool_of, shapes

# Noise overflows, as the interpreter says.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def turn_of(head_dim: int, end: int, device: torch.device) -> Turn:
    """As the store computes it."""
    frequencies = (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    angles = np.arange(end).astype(np.float32)[:, None] * frequencies
    return Turn(
        *(torch.from_numpy(a).to(device) for a in (frequencies, np.cos(angles), np.sin(angles)))
    )


def contexts(shape: Shape, dtype: Any, start: int, turn: Turn | None) -> list[Context]:
    frequencies = None if turn is None else turn.frequencies.cpu().numpy()
    starts = range(start, start + shape.num_blocks * shape.tokens, shape.tokens)
    return [Context(dtype, at, frequencies) for at in starts]


def by_store(name: str, bits: list[Bits], where: list[Context]) -> list[bytes]:
    coder = codec.by_name(name)
    return [coder.encode(block, context) for block, context in zip(bits, where, strict=True)]


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    dtype: Any
    start: int
    turned: bool
    noise: bool  # some of it is infinite or not a number, and so kept whole
    seed: int


CASES: Any = st.builds(
    Case,
    name=st.sampled_from(["int8", "fp8", "int4"]),
    shape=shapes(),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    start=st.sampled_from([0, 2, 3, 64, 5000]),
    turned=st.booleans(),
    noise=st.booleans(),
    seed=st.integers(0, 99),
)


def check(device: torch.device, case: Case) -> None:
    """Packs what the store would, and unpacks to what the store unpacks."""
    shape = case.shape
    pool, bits, table = pool_of(shape, case.dtype, case.seed, device, case.noise)
    end = case.start + shape.num_blocks * shape.tokens
    turn = turn_of(shape.head_dim, end, device) if case.turned else None
    where = contexts(shape, case.dtype, case.start, turn)
    starts = torch.tensor([context.start for context in where], dtype=torch.int32, device=device)
    packed = by_store(case.name, bits, where)
    pack = getattr(quantised, f"pack_{case.name}")
    assert encoded(*pack.kernel(pool, table, starts, turn)) == packed
    assert encoded(*pack.reference(pool, table, starts, turn)) == packed

    wanted = np.empty_like(np.stack(bits))
    for payload, block in zip(packed, wanted, strict=True):
        codec.by_name(case.name).decode(codec.staged([payload]), block)
    payloads, offsets = on_device(packed, device)
    unpack = getattr(quantised, f"unpack_{case.name}")
    for run in (unpack.kernel, unpack.reference):
        out = torch.full_like(pool, float("nan"))
        run(payloads, offsets, out, table, turn)
        found = out.view(torch.int16).cpu()[table.long().cpu()].numpy().view("<u2")
        np.testing.assert_array_equal(found, wanted)
        rest = [block for block in range(len(pool)) if block not in table.tolist()]
        assert out[rest].isnan().all(), "wrote outside its blocks"


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_is_the_stores(device: torch.device, name: str) -> None:
    """With sinks, a rotation, more tokens than a program takes and two blocks; and noise,
    of which some is no number, so that it is kept whole."""
    shape = Shape(num_blocks=2, layers=1, heads=1, tokens=40, head_dim=40)
    check(device, Case(name, shape, "bfloat16", 2, turned=True, noise=False, seed=1))
    check(device, Case(name, shape, "float16", 0, turned=False, noise=True, seed=2))


@settings(max_examples=3)
@given(case=CASES)
def test_is_the_stores_anywhere(device: torch.device, case: Case) -> None:
    check(device, case)


@pytest.mark.slow
@settings(max_examples=40)
@given(case=CASES)
def test_is_the_stores_often(device: torch.device, case: Case) -> None:
    check(device, case)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_what_is_equal_or_zero(device: torch.device, name: str) -> None:
    """Steps that are zero, and groups whose largest numbers differ in sign."""
    pool = torch.zeros(1, 1, 2, 1, 3, 8, dtype=torch.bfloat16, device=device)
    pool[..., 1, :4], pool[..., 2, :] = 2.0, torch.tensor([-3.0, 3.0]).repeat(4)
    pool[..., 0, 3] = 7.0
    table, starts = torch.tensor([[0], [9]], dtype=torch.int32, device=device)
    bits = pool.view(torch.int16).cpu().numpy().view("<u2")
    wanted = by_store(name, [bits[0]], [Context("bfloat16", 9)])
    pack = getattr(quantised, f"pack_{name}")
    assert encoded(*pack.kernel(pool, table, starts)) == wanted
    assert encoded(*pack.reference(pool, table, starts)) == wanted
