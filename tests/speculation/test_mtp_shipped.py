"""What drafts for the built-in model: which weights it is for, that its drafts change no
distribution, and that it is right as often as it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatkv.client import ChatRequest, open_chat
from chatkv.engine.options import SamplingOptions
from chatkv.engine.pool import BlockPool, Run
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.sources import speculation
from chatkv.model.catalog import find_model
from chatkv.model.identity import weights_digest
from chatkv.model.mtp_file import is_shipped_for, read_about, shipped_file
from chatkv.paths import folders
from drafted import ALPHA, pvalue

NUM_SEEDS = 160
OPTIONS = SamplingOptions(1.3, top_p=1.0, top_k=3, min_p=0.0)


def test_it_is_for_the_built_in_model_alone(
    home: Path, smollm2_gguf: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    models = folders().make().models
    assert is_shipped_for(weights_digest([smollm2_gguf], models))
    files = find_model(str(tiny_checkpoint("llama3")), folders().cache)
    assert not is_shipped_for(weights_digest(files.files, models))


def test_it_tells_how_often_it_is_right() -> None:
    about = read_about(shipped_file())
    for rates in (about.acceptance["greedy"], about.acceptance["sampled"]):
        assert len(rates) == 3
        assert all(0 < rate < 1 for rate in rates)
    assert shipped_file().stat().st_size < 5 << 20


@pytest.mark.slow
def test_drafted_tokens_come_as_often_as_plain_ones(
    home: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three tokens of an answer, over many seeds, beside what the model itself says."""
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
    with open_chat(folders(), ChatRequest(model=str(smollm2_gguf), dtype="float32")) as chat:
        parts = chat.runtime.scratch_parts()
        rendered = parts.template.render([{"role": "user", "content": "Name a colour."}], True)
        prompt = parts.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
        engine, sequence = parts.engine, TokenSequence(prompt)
        engine.draft_costs.is_fixed = True
        assert engine.predictor.modules
        heard: Counter[tuple[int, ...]] = Counter()
        accepted = 0
        with engine.memory.use(sequence):
            engine.prefill(sequence)
            for seed in range(NUM_SEEDS):
                tokens, num_accepted = first_tokens(engine, sequence, prompt, seed)
                heard[tokens] += 1
                accepted += num_accepted
            expected = paths(engine, sequence, prompt)
    assert accepted > NUM_SEEDS // 10
    assert set(heard) <= set(expected)
    # Those that are seldom expected count as one.
    often = [path for path, share in expected.items() if share * NUM_SEEDS >= 5]
    counts = [float(heard[path]) for path in often]
    shares = [expected[path] for path in often]
    counts.append(NUM_SEEDS - sum(counts))
    shares.append(1 - sum(shares))
    assert len(often) >= 5
    assert pvalue(torch.tensor(counts), torch.tensor(shares) * NUM_SEEDS) > ALPHA


@pytest.mark.slow
def test_answers_are_those_of_plain_decoding(
    home: Path, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the token, also where one beside the branch of a draft was right."""
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.4),))
    moved: list[tuple[int, int]] = []
    move = BlockPool.move

    def noted(self: BlockPool, run: Run, source: int, target: int) -> None:
        moved.append((source, target))
        move(self, run, source, target)

    monkeypatch.setattr(BlockPool, "move", noted)
    with open_chat(folders(), ChatRequest(model=str(smollm2_gguf), dtype="float32")) as chat:
        parts = chat.runtime.scratch_parts()
        rendered = parts.template.render(
            [{"role": "user", "content": "Why is the sky blue?"}], True
        )
        prompt = parts.tokenizer.encode_rendered(rendered.text, rendered.content_spans)
        parts.engine.draft_costs.is_fixed = True
        for options in (SamplingOptions(temperature=0), SamplingOptions()):
            answers = []
            for source in ("off", "mtp"):
                sequence, sampler = TokenSequence(list(prompt)), Sampler(options, 5)
                with parts.engine.memory.use(sequence):
                    spec = speculation(source, parts.engine, sequence, sampler)  # type: ignore[arg-type]
                    logits = parts.engine.prefill(sequence)
                    steps = parts.engine.decode(
                        sequence, logits, sampler, frozenset(), 50, speculation=spec
                    )
                    answers.append(([token for token, _ in steps], sampler.draws))
            assert answers[0] == answers[1]
    assert len(moved) > 3
    assert all(source > target for source, target in moved)


def first_tokens(
    engine: Any, sequence: TokenSequence, prompt: list[int], seed: int
) -> tuple[tuple[int, ...], int]:
    sequence.become(prompt, len(prompt) - 1)
    sampler = Sampler(OPTIONS, seed)
    logits = engine.prefill(sequence)
    spec = speculation("mtp", engine, sequence, sampler)
    steps = engine.decode(sequence, logits, sampler, frozenset(), 4, speculation=spec)
    return tuple(token for token, _ in steps)[:3], spec.counts.accepted


def paths(engine: Any, sequence: TokenSequence, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """How likely each beginning of three tokens is."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, share in found.items():
            sequence.become([*prompt, *path], len(prompt) - 1)
            ids, mass = Sampler(OPTIONS, 0).distribution(engine.prefill(sequence))
            for token, part in zip(ids.tolist(), (mass / mass.sum()).tolist(), strict=True):
                longer[(*path, token)] = share * part
        found = longer
    return found
