"""The last step of a restore from both ends: both meet in front of a layer, close to where it pays
most, and the loader writes nothing that prefill computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.restore.claims import Claims
from chatkv.restore.last_step import LastStep, Layers
from chatkv.restore.pace import RunPace
from chatkv.restore.pool_loads import PoolLoads
from chatkv_store import BlockStore
from chatkv_store.chain import StoredBlock
from chatkv_store.tables import value_key
from kv_samples import GROUPED, SPACE, kv_bits, save

TOKENS = 3 * 64


def last_step(num_groups: int, width: int) -> LastStep:
    header: Any = None
    blocks = [StoredBlock(b"", 0, BLOCK_TOKENS, header)]
    groups = [range(width * n, width * (n + 1)) for n in range(num_groups)]
    return LastStep(Claims(blocks, 0), 0, 1, groups)


def meet(step: LastStep, num_layers: int, load_s: float, compute_s: float) -> tuple[int, float]:
    """Let both ends go on at these rates, of a group and of a layer: the layer they meet in front
    of, and when the later one is there."""
    layer, prefill_at, loaded_at = 0, 0.0, 0.0
    loads = True
    while True:
        if loads and loaded_at <= prefill_at:
            claimed = step.claim(load_s, compute_s, most=1)
            if claimed is not None:
                loaded_at += load_s
                step.brought()
            loads = claimed is not None
            continue
        if layer == num_layers or step.goes_on(layer) == layer:
            return layer, max(prefill_at, loaded_at)
        layer, prefill_at = layer + 1, prefill_at + compute_s


@given(st.integers(1, 12), st.integers(1, 5), st.floats(0.01, 10), st.floats(0.01, 10))
def test_both_ends_meet_where_it_takes_least(
    num_groups: int, width: int, load_s: float, compute_s: float
) -> None:
    num_layers = num_groups * width

    def takes_s(layer: int) -> float:
        return max(layer * compute_s, -((layer - num_layers) // width) * load_s)

    layer, seconds = meet(last_step(num_groups, width), num_layers, load_s, compute_s)
    best_s = min(map(takes_s, range(num_layers + 1)))
    # A layer that is begun is computed, and a value that is begun is loaded.
    assert seconds <= best_s + 1.5 * compute_s + min(load_s, width * compute_s)
    assert 0 <= layer <= num_layers


def test_many_layers_are_claimed_together_while_there_is_much_to_do() -> None:
    step = last_step(16, 2)
    assert step.claim(0.001, 1.0, most=100) == Layers(range(12, 16), 24)
    step.brought()
    assert step.claim(0.001, 1.0, most=100) == Layers(range(9, 12), 18)
    step.brought()
    assert step.claim(8.0, 1.0, most=1) == Layers(range(8, 9), 16), "prefill would be in layer 7"
    step.brought()
    assert step.claim(20.0, 1.0, most=1) is None, "prefill will sooner have been through"
    assert step.goes_on(0) == 1 and not step.has_left


def test_what_fails_is_prefills_unless_it_counts_on_it() -> None:
    step, loading = last_step(4, 2), RunPace(1.0, 4)
    assert step.claim(0.1, 1.0, most=1) == Layers(range(3, 4), 6)
    step.brought()
    assert step.claim(0.1, 1.0, most=1) == Layers(range(2, 3), 4)
    assert step.failed()
    assert step.claim(0.1, 1.0, most=1) is None
    assert [step.goes_on(layer) for layer in range(6)] == [1, 2, 3, 4, 5, 6]
    assert step.goes_on(6) == 6 and step.share == 6 / 8
    assert step.has_come(6, loading)
    step = last_step(4, 2)
    assert step.claim(0.1, 1.0, most=1) is not None
    for layer in range(6):
        step.goes_on(layer)
    assert step.goes_on(6) == 6 and not step.has_come(6, loading)
    assert not step.failed(), "the step has left its front for what will not come"


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_layers_that_are_prefills_are_not_touched(
    tmp_path: Path, first: int, is_damaged: bool
) -> None:
    bits, reports = kv_bits(GROUPED, TOKENS, seed=3), list[int]()
    with BlockStore(tmp_path) as store:
        save(store, GROUPED, range(TOKENS), bits)
        blocks = store.match(SPACE, range(TOKENS), GROUPED).blocks
        if is_damaged:
            key = value_key(blocks[1].key, 1)
            store.env.write(lambda txn: txn.delete(key, db=store.db["values"]))
        pool, dropped = np.full_like(bits, 7), list[StoredBlock]()
        load = PoolLoads(store, GROUPED, pool, lambda _: None, dropped.append)
        layers = Layers(range(first // 2, 2), first)
        sound, _, damage = load(blocks, layers, reports.append, lambda: False)
    assert (pool[:first] == 7).all()
    good = 64 * sound
    np.testing.assert_array_equal(pool[first:, :, :, :good], bits[first:, :, :, :good])
    if is_damaged:
        assert sound == 1 and damage is not None and dropped == [blocks[1]] and 4 not in reports
    else:
        assert (sound, damage, dropped) == (3, None, []) and reports[-1] == 4
