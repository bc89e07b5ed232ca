"""Answers with drafts against answers without: the same tokens, and nothing left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from chatkv.engine.draft_costs import DraftCosts
from chatkv.engine.drafts import Draft, Growth
from chatkv.engine.engine import Engine
from chatkv.engine.ngram import NgramDrafter
from chatkv.engine.options import SamplingOptions
from chatkv.engine.piece import Piece
from chatkv.engine.runner import GRAPH_SIZES, PagedRunner
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.speculation import Speculation
from small_engine import Turn, make_engine, make_paged, some_ids

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(temperature=0.8)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = make_engine()
    yield made
    made.close()


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def paged(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The same over blocks that lie anywhere, as on a GPU."""
    made = make_paged(engine.decoder, with_graphs=request.param)
    yield made
    made.close()


@dataclasses.dataclass
class Oracle:
    """Knows the answer, and errs at every `errs`-th place."""

    prompt: int
    answer: Sequence[int]
    errs: int = 5
    source: str = "oracle"
    most: int = 7
    share: float = 0.0
    adapts: bool = False

    def expected(self, kind: int) -> float:
        return 0.9

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        return 0

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        at = len(ids) - self.prompt
        places = range(at, min(at + count, len(self.answer)))
        return Draft([(self.answer[n] + (n % self.errs == 0)) % 96 for n in places])


class Bush(Oracle):
    """The same, with other tokens beside its branch, some of which are right where that errs."""

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        chain = list(super().propose(ids, (count + 1) // 2).tokens)
        beside, instead = list[int](), list[int]()
        for index, token in list(enumerate(chain))[: count - len(chain)]:
            right = self.answer[len(ids) - self.prompt + index]
            beside.append((token + 2) % 96 if right == token or right % 3 == 0 else right)
            instead.append(index)
        order = sorted(range(len(beside)), key=lambda n: (n % 2, -n))  # any will do
        return Draft([*chain, *(beside[n] for n in order)], [instead[n] for n in order])


@dataclasses.dataclass
class Made:
    tokens: list[int]
    logits: list[torch.Tensor]
    sequence: TokenSequence
    draws: int


def answer(
    engine: Engine,
    ids: Sequence[int],
    count: int,
    options: SamplingOptions = GREEDY,
    speculation: Speculation | None = None,
    stop_ids: frozenset[int] = frozenset(),
    draws: int = 0,
) -> Made:
    sequence, sampler = TokenSequence(list(ids)), Sampler(options, 5, draws)
    made = Made([], [], sequence, 0)
    with engine.memory.use(sequence):
        logits = engine.prefill(sequence)
        for token, seen in engine.decode(
            sequence, logits, sampler, stop_ids, count, speculation=speculation
        ):
            made.tokens.append(token)
            made.logits.append(seen)
            assert sequence.num_cached == len(sequence.ids) - 1
    made.draws = sampler.draws
    return made


def drafting(drafter: object) -> Speculation:
    return Speculation(drafter, DraftCosts(is_fixed=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [5, 60, 100])
@pytest.mark.parametrize("kind", [Oracle, Bush])
def test_guesses_change_no_token(
    engine: Engine, options: SamplingOptions, length: int, kind: type[Oracle]
) -> None:
    """Across block borders, and with drafts that are partly wrong."""
    ids = some_ids(length, length)
    plain = answer(engine, ids, 90, options)
    spec = drafting(kind(length, plain.tokens))
    guessed = answer(engine, ids, 90, options, spec)
    assert guessed.tokens == plain.tokens
    assert guessed.draws == plain.draws
    assert spec.counts.accepted > (40 if kind is Oracle else 35)
    assert spec.counts.drafted > spec.counts.accepted
    assert spec.counts.steps == 90 - 1 - spec.counts.accepted
    for one, other in zip(guessed.logits, plain.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_looked_up_drafts_change_no_token(engine: Engine) -> None:
    """A random model soon repeats itself, which is what is looked up."""
    ids = some_ids(40, 1)
    plain = answer(engine, ids, 200)
    spec = drafting(NgramDrafter())
    assert answer(engine, ids, 200, speculation=spec).tokens == plain.tokens
    assert spec.counts.accepted > 50


def test_an_answer_ends_inside_an_accepted_run(engine: Engine) -> None:
    ids = some_ids(30, 3)
    plain = answer(engine, ids, 60, SAMPLED)
    for at in (0, 1, 3, 6, 10, 11, 12):
        stop = plain.tokens[at]
        if stop in plain.tokens[:at]:
            continue
        for drafter in (Oracle(30, plain.tokens, errs=50), Bush(30, plain.tokens, errs=2)):
            made = answer(engine, ids, 60, SAMPLED, drafting(drafter), frozenset({stop}))
            assert made.tokens == plain.tokens[: at + 1]
            assert made.draws == at + 1
    for most in (1, 2, 3, 8, 9, 10):
        spec = drafting(Oracle(30, plain.tokens, errs=50))
        made = answer(engine, ids, most, SAMPLED, spec)
        assert made.tokens == plain.tokens[:most]
        assert spec.counts.drafted <= max(0, most - 2) or most <= 2


def test_an_answer_goes_on_with_the_same_numbers(engine: Engine) -> None:
    """Cut anywhere, also where drafts had been accepted beyond: the rest is as uncut."""
    ids = some_ids(30, 4)
    whole = answer(engine, ids, 40, SAMPLED).tokens
    for cut in (1, 5, 6, 7, 20):
        first = answer(engine, ids, cut, SAMPLED, drafting(Bush(30, whole, errs=2)))
        rest = answer(
            engine,
            [*ids, *first.tokens],
            40 - cut,
            SAMPLED,
            drafting(Oracle(30, whole, errs=50)),
            draws=first.draws,
        )
        assert first.tokens + rest.tokens == whole


def test_kv_of_refused_tokens_is_never_that_of_the_sequence(engine: Engine) -> None:
    """What a next turn attends to is as if nothing had been drafted, wherever the answer ends."""
    ids, more = some_ids(50, 6), some_ids(9, 7)
    for count in (13, 14, 15, 16, 17):
        seen = []
        tokens = answer(engine, ids, count).tokens
        for drafter in (None, Oracle(50, tokens, errs=3), Bush(50, tokens, errs=2)):
            spec = None if drafter is None else drafting(drafter)
            seen.append(answer_and_ask(engine, ids, count, spec, more))
        torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen[0], seen[2], rtol=1e-4, atol=1e-4)


def answer_and_ask(
    engine: Engine, ids: Sequence[int], count: int, spec: Speculation | None, more: Sequence[int]
) -> torch.Tensor:
    """Logits behind an answer and what is said next."""
    sequence, sampler = TokenSequence(list(ids)), Sampler(GREEDY, 0)
    with engine.memory.use(sequence):
        logits = engine.prefill(sequence)
        steps = engine.decode(sequence, logits, sampler, frozenset(), count, speculation=spec)
        assert len(list(steps)) == count
        sequence.ids += more
        return engine.prefill(sequence)


def test_drafts_stop_where_the_context_does() -> None:
    small = make_engine(num_blocks=2)
    ids = some_ids(100, 1)
    plain = answer(small, ids, 500).tokens
    spec = drafting(Oracle(100, plain, errs=50))
    assert answer(small, ids, 500, speculation=spec).tokens == plain
    assert len(plain) == 28
    small.close()


def test_answers_of_different_drafts_share_their_steps(engine: Engine) -> None:
    prompts = [some_ids(20 + 11 * n, n) for n in range(4)]
    alone = [answer(engine, ids, 70).tokens for ids in prompts]

    def turn(number: int) -> Callable[[], list[int]]:
        ids = prompts[number]
        drafters = [
            None,
            Oracle(len(ids), alone[number], 4),
            NgramDrafter(),
            Bush(len(ids), alone[number], 3),
        ]
        drafter = drafters[number]
        spec = None if drafter is None else drafting(drafter)
        return lambda: answer(engine, ids, 70, speculation=spec).tokens

    before = engine.scheduler.num_steps
    turns = [Turn(turn(number)) for number in range(4)]
    assert [one.result() for one in turns] == alone
    assert engine.scheduler.num_steps - before < 4 * 70


# --- over the blocks of a GPU ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [5, 60, 100])
def test_guesses_change_no_token_on_a_device(
    engine: Engine, paged: Engine, options: SamplingOptions, length: int
) -> None:
    """Where steps are recorded, a drafted token is a row of them."""
    ids = some_ids(length, length)
    plain = answer(engine, ids, 90, options)
    spec = drafting(Oracle(length, plain.tokens))
    assert answer(paged, ids, 90, options, spec).tokens == plain.tokens
    assert spec.counts.accepted > 40
    assert paged.pool.free_blocks == paged.pool.num_blocks


def test_steps_with_drafts_are_recorded_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with drafts of different lengths, beside some without, whose steps go ahead; and
    what does not fit into the largest recording runs without one."""
    made = make_paged(engine.decoder, with_graphs=True)
    assert isinstance(made.runner, PagedRunner)
    seen: list[tuple[int, int]] = []  # pieces and rows of a step
    forward, num_eager = made.runner.forward, 0

    def noted(pieces: Sequence[Piece]) -> Sequence[torch.Tensor]:
        seen.append((len(pieces), sum(piece.length for piece in pieces)))
        return forward(pieces)

    def eager(pieces: Sequence[Piece]) -> torch.Tensor:
        nonlocal num_eager
        num_eager += all(piece.is_decode for piece in pieces)
        return through(pieces)

    through = made.runner._pass
    monkeypatch.setattr(made.runner, "forward", noted)
    monkeypatch.setattr(made.runner, "_pass", eager)
    prompts = [some_ids(20 + 11 * n, n) for n in range(4)]
    alone = [answer(engine, ids, 70).tokens for ids in prompts]
    errs = (None, 4, 50, None)

    def turn(number: int) -> Callable[[], list[int]]:
        ids, every = prompts[number], errs[number]
        spec = drafting(Oracle(len(ids), alone[number], every)) if every else None
        return lambda: answer(made, ids, 70, speculation=spec).tokens

    turns = [Turn(turn(number)) for number in range(4)]
    assert [one.result() for one in turns] == alone
    assert any(1 < num_pieces < num_rows for num_pieces, num_rows in seen) and not num_eager
    largest, ids = GRAPH_SIZES[-1], some_ids(9, 9)
    sequence = TokenSequence(ids)
    with made.memory.use(sequence):
        made.prefill(sequence)
        made.pool.reserve(sequence.run, 9 + largest)
        for num_drafted, in_vain in ((largest - 1, 0), (largest, 1)):
            draft = some_ids(num_drafted, 1)
            logits = made.scheduler.run(Piece(sequence, 8, 9, is_decode=True, draft=draft))
            assert logits.shape[0] == 1 + num_drafted and num_eager == in_vain
    made.close()
