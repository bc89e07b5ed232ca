"""KV that others bring while a prefill goes on: a step may begin before all of it has come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from chatkv.engine import scheduler
from chatkv.engine.arriving import Gap, LayerMissing
from chatkv.engine.engine import Engine
from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.sequence import TokenSequence
from small_engine import CONFIG, Turn, make_engine, some_ids

IDS = some_ids(200, 3)
COMES = range(64, 128)  # whose KV others bring


@pytest.fixture(params=["consecutive", "paged"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make_engine()
    if request.param == "paged":
        made.close()
        made = Engine(made.decoder, PagedPool(CONFIG, 40, torch.float32, torch.device("cpu")))
    yield made
    made.close()


def places(engine: Engine, sequence: TokenSequence, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's KV of the pool, and where in it that of the tokens in COMES lies."""
    slots = engine.pool.slot_index(sequence.run, COMES.start, COMES.stop)
    tokens = engine.pool.blocks.shape[4]
    return engine.pool.blocks[:, layer], slots // tokens, slots % tokens


class Script:
    """An `Arriving` that gives these gaps, and what it is told."""

    def __init__(self, gaps: list[Gap]) -> None:
        self.gaps, self.asked, self.done = gaps, list[int](), list[int]()

    def next_gap(self, position: int, total: int, limit: int) -> Gap:
        self.asked.append(position)
        return self.gaps.pop(0)

    def computed(self, position: int) -> None:
        self.done.append(position)


def test_a_step_computes_the_front_and_what_follows_while_layers_come(engine: Engine) -> None:
    whole = TokenSequence(IDS)
    wanted = engine.prefill(whole)
    sequence, layers = TokenSequence(IDS), list[int]()

    def bring(layer: int) -> None:
        layers.append(layer)
        kv, block, token = places(engine, whole, layer)
        brought = kv[block, :, :, token]
        kv, block, token = places(engine, sequence, layer)
        kv[block, :, :, token] = brought

    script = Script([Gap(0, 64, (128, 200), bring)])
    found = engine.prefill(sequence, arriving=script)
    torch.testing.assert_close(found, wanted)
    assert sequence.num_cached == 200 and script.done == [200]
    assert sorted(set(layers)) == list(range(CONFIG.num_layers))


def test_a_step_leaves_its_front_where_the_layers_of_that_come_too(engine: Engine) -> None:
    """Where a pass can be cut; another one computes its front to the end."""
    whole = TokenSequence(IDS)
    wanted = engine.prefill(whole)
    sequence, asked = TokenSequence(IDS), list[int]()
    last = CONFIG.num_layers - 1

    def bring(layer: int) -> None:
        slots = [engine.pool.slot_index(one.run, 0, COMES.stop) for one in (whole, sequence)]
        tokens = engine.pool.blocks.shape[4]
        kv = engine.pool.blocks[:, layer]
        theirs, ours = slots if layer == last and asked else (s[64:] for s in slots)
        brought = kv[theirs // tokens, :, :, theirs % tokens]
        kv[ours // tokens, :, :, ours % tokens] = brought

    def goes_on(layer: int) -> int:
        asked.append(layer)
        return layer if layer == last else last

    script = Script([Gap(0, 64, (128, 200), bring, goes_on)])
    torch.testing.assert_close(engine.prefill(sequence, arriving=script), wanted)
    assert asked == ([0, last] if engine.runner.num_layers > 1 else [])


def test_where_a_layer_never_comes_prefill_goes_on_in_front_of_it(engine: Engine) -> None:
    wanted = engine.prefill(TokenSequence(IDS))

    def fail(layer: int) -> None:
        if layer:
            raise LayerMissing

    sequence, script = TokenSequence(IDS), Script([Gap(0, 64, (128, 200), fail), Gap(0, 200)])
    torch.testing.assert_close(engine.prefill(sequence, arriving=script), wanted)
    assert script.asked == [0, 0] and script.done == [200]


def test_nobody_waits_for_a_prefill_that_nobody_goes_on_with(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One outside of a turn, such as to measure: the next step came a quarter of its time later."""
    engine.prefill(TokenSequence(IDS))
    monkeypatch.setattr(scheduler, "GRACE_S", 1e6)
    turn = Turn(lambda: engine.prefill(TokenSequence(IDS[:BLOCK_TOKENS])))
    assert turn.result() is not None
