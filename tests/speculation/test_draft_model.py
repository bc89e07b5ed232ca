"""Drafts of a smaller model: verified, so the answer is the large one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chatkv.client import ChatRequest, open_chat
from chatkv.engine.draft_model import check_tokens
from chatkv.engine.engine import Engine
from chatkv.engine.options import SamplingOptions
from chatkv.engine.pool import BlockPool
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.sources import speculation
from chatkv.errors import ModelError, UsageError
from chatkv.model.decoder import Decoder
from chatkv.paths import folders
from chatkv.session.turn import TurnOptions
from drafted import ALPHA, held, pvalue
from small_engine import CONFIG, make_engine, make_weights, some_ids

GREEDY = SamplingOptions(temperature=0)


def worse_engine(noise: float, num_blocks: int = 40) -> Engine:
    """The same model, but for noise in its weights."""
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in make_weights().items()
    }
    decoder = Decoder(CONFIG, weights)
    return Engine(decoder, BlockPool(CONFIG, num_blocks, torch.float32, decoder.device))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = make_engine()
    made.draft_costs.is_fixed = True
    yield made
    made.close()


def answer(
    engine: Engine, count: int, options: SamplingOptions, wanted: str, seed: int = 3
) -> tuple[list[int], int]:
    """Tokens behind `some_ids(50, 2)`, and how many drafted ones were accepted."""
    sequence, sampler = TokenSequence(some_ids(50, 2)), Sampler(options, seed)
    with engine.memory.use(sequence):
        logits = engine.prefill(sequence)
        spec = speculation(wanted, engine, sequence, sampler)  # type: ignore[arg-type]
        steps = engine.decode(sequence, logits, sampler, frozenset(), count, speculation=spec)
        return [token for token, _ in steps], spec.counts.accepted


def test_a_model_agrees_with_itself(engine: Engine) -> None:
    engine.draft_with(worse_engine(0.0))
    for options in (GREEDY, SamplingOptions(0.8), SamplingOptions(1.2, top_k=9)):
        tokens, accepted = answer(engine, 60, options, "model")
        assert len(tokens) == 60
        assert accepted > 45  # all of each draft, and each step says one more
    engine.drafts.close()  # type: ignore[union-attr]


def test_greedy_answers_are_the_large_models_own(engine: Engine) -> None:
    plain, _ = answer(engine, 80, GREEDY, "off")
    for noise in (0.05, 1.0):
        engine.draft_with(worse_engine(noise))
        tokens, accepted = answer(engine, 80, GREEDY, "model")
        assert tokens == plain
        assert accepted > 20 or noise == 1.0
        engine.drafts.close()  # type: ignore[union-attr]


@pytest.mark.slow
def test_sampled_answers_are_distributed_as_the_large_models(engine: Engine) -> None:
    """Of the second token, the first that is drafted, over many seeds."""
    engine.draft_with(worse_engine(0.3))
    options, num_seeds = SamplingOptions(1.5, top_p=1.0, top_k=3, min_p=0.0), 200
    heard: dict[tuple[int, int], int] = {}
    num_accepted = 0
    for seed in range(num_seeds):
        tokens, accepted = answer(engine, 3, options, "model", seed)
        heard[tokens[0], tokens[1]] = heard.get((tokens[0], tokens[1]), 0) + 1
        num_accepted += accepted
    assert 0 < num_accepted < num_seeds
    expected: dict[tuple[int, int], float] = {}
    sequence, sampler = TokenSequence(some_ids(50, 2)), Sampler(options, 0)
    with engine.memory.use(sequence):
        first = sampler.distribution(engine.prefill(sequence))
        for token, share in zip(
            first[0].tolist(), (first[1] / first[1].sum()).tolist(), strict=True
        ):
            sequence.become([*some_ids(50, 2), token], 50)
            second = sampler.distribution(engine.prefill(sequence))
            for next_token, part in zip(second[0].tolist(), second[1].tolist(), strict=True):
                expected[token, next_token] = share * part / float(second[1].sum()) * num_seeds
    assert set(heard) <= set(expected)
    counts = torch.tensor([float(heard.get(pair, 0)) for pair in expected])
    assert pvalue(counts, torch.tensor(list(expected.values()))) > ALPHA
    engine.drafts.close()  # type: ignore[union-attr]


def test_a_draft_model_without_memory_costs_no_answer(engine: Engine) -> None:
    plain, _ = answer(engine, 80, GREEDY, "off")
    engine.draft_with(worse_engine(0.0, num_blocks=1))
    tokens, accepted = answer(engine, 80, GREEDY, "model")
    assert tokens == plain
    assert accepted < 64 - 50  # as long as there was a block
    engine.drafts.close()  # type: ignore[union-attr]


class Tokens:
    """A tokenizer as far as it is compared."""

    def __init__(self, *tokens: bytes) -> None:
        self._tokens, self.num_ids = tokens, len(tokens)

    def bytes_of(self, id: int) -> bytes:
        return self._tokens[id]


def test_other_tokens_are_refused() -> None:
    mine = Tokens(b"a", b"b")
    check_tokens(Tokens(b"a", b"b"), mine, "small")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="has 1 tokens, and the model has 2"):
        check_tokens(Tokens(b"a"), mine, "small")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="its token 1 is b'c', and the model's is b'b'"):
        check_tokens(Tokens(b"a", b"c"), mine, "small")  # type: ignore[arg-type]


def test_turns_are_drafted_by_the_model_that_was_named(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_checkpoint("llama3"))
    plain = held(model, speculate="off")
    monkeypatch.setenv("CHATKV_DRAFT_MODEL", model)
    drafted = held(model, speculate="model")
    assert [ids for _, ids in drafted] == [ids for _, ids in plain]
    assert all(result.speculation.source == "model" for result, _ in drafted)
    assert all(result.speculation.accepted > 20 for result, _ in drafted)


def test_a_draft_model_reads_again_what_a_restart_has_lost(
    home: Path,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its KV is not stored, and its drafts are right as often as without a restart."""
    model = str(tiny_checkpoint("llama3"))
    monkeypatch.setenv("CHATKV_DRAFT_MODEL", model)
    texts = ("hello " * 30, "again", "and once more")
    whole = held(model, texts, speculate="model")
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path / "elsewhere"))
    first = held(model, texts[:2], speculate="model")
    later = held(model, texts[2:], session=first[0][0].session, speculate="model")
    assert later[0][0].tokens.loaded > 64
    assert later[0][1] == whole[2][1]
    assert later[0][0].speculation == whole[2][0].speculation


def test_a_model_that_was_not_named_is_said_before_a_turn_begins(
    home: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    with open_chat(folders(), ChatRequest(model=str(tiny_checkpoint("llama3")))) as chat:
        with pytest.raises(UsageError, match="CHATKV_DRAFT_MODEL"):
            chat.conversation.send("hello", TurnOptions(speculate="model"))
        assert chat.conversation.turns == []
