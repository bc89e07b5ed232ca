"""Tokens that are drawn where the logits are, and steps launched before anybody has seen them: the
same answers as without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chatkv.engine import decode_graph
from chatkv.engine.decode_graph import DecodeGraph, Launch
from chatkv.engine.device_draws import ROWS, can_draw, draw_rows, settings_of
from chatkv.engine.engine import Engine
from chatkv.engine.options import SamplingOptions
from chatkv.engine.runner import PagedRunner
from chatkv.engine.sampling import HEAD_TOKENS, Sampler
from chatkv.engine.sequence import TokenSequence
from small_engine import Turn, make_engine, make_paged, some_ids


def logits_of(rows: int, size: int, seed: int, spread: float) -> Tensor:
    """Rounded as a model's head in 16 bits rounds them, so many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * spread).bfloat16().float()


def drawn(logits: Tensor, samplers: list[Sampler]) -> list[int]:
    tokens = logits.argmax(1)
    rows = [settings_of(sampler, sampler.draws) for sampler in samplers]
    draw_rows(logits, torch.tensor(rows, dtype=torch.float64), tokens)
    return tokens.tolist()  # type: ignore[no-any-return]


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([0.1, 0.9, 0.99]),
    top_k=st.sampled_from([0, 1, 40, HEAD_TOKENS]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    options=st.lists(OPTIONS, min_size=1, max_size=2 * ROWS + 1),
    size=st.sampled_from([3, 50, 2000]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.5, 3.0]),
)
def test_it_draws_what_the_sampler_picks(
    options: list[SamplingOptions], size: int, seed: int, spread: float
) -> None:
    logits = logits_of(len(options), size, seed, spread)
    samplers = [Sampler(one, seed + row, draws=row) for row, one in enumerate(options)]
    assert all(can_draw(sampler) for sampler in samplers)
    found = drawn(logits, samplers)
    for token, row, sampler in zip(found, logits, samplers, strict=True):
        draws, picked = sampler.draws, sampler.pick(row)
        if token >= 0:
            assert token == picked
        else:  # more tokens than are looked at
            assert len(sampler.distribution(row)[0]) > HEAD_TOKENS
        sampler.draws = 7
        sampler.accept(picked)
        assert sampler.draws - 7 == draws - options.index(sampler.options) or sampler.draws in (
            7,
            8,
        )


def test_of_equals_the_first_comes_first() -> None:
    logits = torch.zeros(3 * HEAD_TOKENS)
    logits[5::7] = 1.0
    logits[9] = -0.0
    likely, rest = torch.arange(len(logits))[logits == 1], torch.arange(len(logits))[logits == 0]
    ids, _ = Sampler(SamplingOptions(1.0, top_k=HEAD_TOKENS, top_p=1), 0).distribution(logits)
    assert ids.tolist() == [*likely, *rest][:HEAD_TOKENS]
    options = SamplingOptions(1.0, top_k=HEAD_TOKENS, top_p=1, min_p=0)
    for seed in range(20):
        assert drawn(logits[None], [Sampler(options, seed)]) == [
            Sampler(options, seed).pick(logits)
        ]


def test_what_needs_more_than_a_look_at_the_largest_is_left_to_the_sampler() -> None:
    flat = torch.zeros(1, 4 * HEAD_TOKENS)
    assert drawn(flat, [Sampler(SamplingOptions(1.0, top_p=0.9), 0)]) == [-1]
    for fields in ({"top_k": HEAD_TOKENS + 1}, {"top_p": 1.0, "min_p": 0.0}):
        assert not can_draw(Sampler(SamplingOptions(1.0, **fields), 0))  # type: ignore[arg-type]
    grammar: Any = object()
    assert not can_draw(Sampler(SamplingOptions(0.0), 0, grammar=grammar))
    assert can_draw(Sampler(SamplingOptions(0.0, top_p=1.0, min_p=0.0), 0))


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    """One that draws on the host, and one whose steps run ahead."""
    plain = make_engine()
    ahead = make_paged(plain.decoder, with_graphs=True)
    yield plain, ahead
    plain.close()
    ahead.close()


def runner_of(engine: Engine) -> PagedRunner:
    assert isinstance(engine.runner, PagedRunner)
    return engine.runner


def answer(
    engine: Engine, ids: list[int], count: int, sampler: Sampler, name: str | None = None
) -> list[tuple[int, list[float]]]:
    """Tokens, with the logits that each was drawn from."""
    sequence = TokenSequence() if name is None else engine.memory.sequence(name)
    with engine.memory.use(sequence):
        sequence.become(ids, min(sequence.common_prefix(ids), len(ids) - 1))
        logits = engine.prefill(sequence)
        steps = engine.decode(sequence, logits, sampler, frozenset(), count)
        return [(token, [round(x, 3) for x in found.tolist()]) for token, found in steps]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_the_same(engines: tuple[Engine, Engine], temperature: float) -> None:
    """Token by token, logits and draws included; nearly every step was on its way."""
    _, ahead = engines
    options = SamplingOptions(temperature)
    made = []
    for engine in engines:
        sampler = Sampler(options, 3)
        made.append((answer(engine, some_ids(50, 1), 100, sampler), sampler.draws))
    assert made[0] == made[1]
    assert runner_of(ahead).num_ahead == 98, "of 99 steps, all but the first"


def test_where_tails_count_few_steps_are_launched_for_nothing(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatkv.engine.device_draws.HEAD_TOKENS", 4)
    options, num_launches, launch = SamplingOptions(1.5), 0, DecodeGraph.launch

    def counted(self: DecodeGraph, rows: Any) -> Launch:
        nonlocal num_launches
        num_launches += 1
        return launch(self, rows)

    monkeypatch.setattr(DecodeGraph, "launch", counted)
    made = [answer(engine, some_ids(50, 1), 100, Sampler(options, 3)) for engine in engines]
    assert made[0] == made[1]
    assert 99 < num_launches < 99 + 20


def test_answers_beside_others_are_the_same(engines: tuple[Engine, Engine]) -> None:
    """Of all lengths, greedy and not: turns join and leave, and need blocks of their own."""
    plain, ahead = engines
    cases = range(9)

    def one(engine: Engine, case: int) -> list[int]:
        sampler = Sampler(SamplingOptions(case % 3 * 0.7), case)
        made = answer(engine, some_ids(10 + 9 * case, case), 20 + 11 * case % 50, sampler)
        return [token for token, _ in made]

    alone = [one(plain, case) for case in cases]
    turns = [Turn(lambda case=case: one(ahead, case)) for case in cases]  # type: ignore[misc]
    assert [turn.result() for turn in turns] == alone
    assert runner_of(ahead).num_ahead > 10


def test_a_step_for_nothing_harms_nobody(engines: tuple[Engine, Engine]) -> None:
    """A turn ends with a step behind it on its way; the next one of its session goes on from
    somewhere else, one of another session takes over what it has."""
    ids, greedy = some_ids(60, 2), SamplingOptions(0)
    found = []
    for engine in engines:
        first = [token for token, _ in answer(engine, ids, 9, Sampler(greedy, 0), "a")]
        others = [*ids, *first[:4], 5, 6]
        found.append(first)
        found.append([token for token, _ in answer(engine, others, 70, Sampler(greedy, 0), "a")])
        found.append(
            [token for token, _ in answer(engine, [*others, 9], 9, Sampler(greedy, 0), "b")]
        )
    assert found[:3] == found[3:]


def test_the_next_step_is_launched_before_anybody_looks(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    launch, tokens = DecodeGraph.launch, Launch.tokens

    def logged_launch(self: DecodeGraph, rows: Any) -> Launch:
        log.append(f"launch {rows[0].position}")
        made = launch(self, rows)
        made.position = rows[0].position  # type: ignore[attr-defined]
        return made

    def logged_tokens(self: Launch) -> list[int]:
        log.append(f"look {self.rows[0].position}")
        return tokens(self)

    monkeypatch.setattr(DecodeGraph, "launch", logged_launch)
    monkeypatch.setattr(Launch, "tokens", logged_tokens)
    answer(engines[1], some_ids(10, 1), 5, Sampler(SamplingOptions(0.5), 1))
    expected = ["launch 10"]
    for position in range(10, 14):
        expected += [f"launch {position + 1}", f"look {position}"]
    assert log == expected


def test_inputs_are_not_written_over_while_they_may_be_read(
    engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever fills inputs has waited for the launch that had them, or for one behind it."""
    waited: set[int] = set()
    order: dict[int, tuple[int, int]] = {}
    fill, launch, tokens = decode_graph._Inputs.fill, DecodeGraph.launch, Launch.tokens
    filled: list[int] = []

    def logged_fill(self: Any, rows: Any) -> None:
        before = [number for number, (_, inputs) in order.items() if inputs == id(self)]
        assert not before or max(waited, default=-1) >= max(before), "it may be on its way"
        filled.append(id(self))
        fill(self, rows)

    def logged_launch(self: DecodeGraph, rows: Any) -> Launch:
        made = launch(self, rows)
        order[len(order)] = (id(made), filled[-1])
        made.number = len(order) - 1  # type: ignore[attr-defined]
        return made

    def logged_tokens(self: Any) -> list[int]:
        waited.add(self.number)
        return tokens(self)

    ahead = engines[1]
    answer(ahead, some_ids(10, 1), 3, Sampler(SamplingOptions(0), 1))
    monkeypatch.setattr(decode_graph._Inputs, "fill", logged_fill)
    monkeypatch.setattr(DecodeGraph, "launch", logged_launch)
    monkeypatch.setattr(Launch, "tokens", logged_tokens)
    for turn in range(6):  # each leaves a launch for nothing behind
        answer(ahead, some_ids(10 + turn, turn), 2 + turn, Sampler(SamplingOptions(0), 1))
    assert len(order) > 20
