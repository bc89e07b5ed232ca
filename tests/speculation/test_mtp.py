"""Drafts by a model's own modules and heads: as plain torch computes them, and verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chatkv.engine.drafts import Draft, Growth
from chatkv.engine.engine import Engine
from chatkv.engine.mtp import WIDTH, ModuleKV, MtpDrafter
from chatkv.engine.options import SamplingOptions
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.sources import speculation
from chatkv.errors import ModelError
from chatkv.model.mtp import DraftHead
from chatkv.model.mtp_file import About, predictor_from, small_tensors
from drafted import ALPHA, pvalue
from small_engine import CONFIG, Turn, make_engine, make_weights, some_ids
from small_mtp import DIGEST, Reference, small_predictor, write_mtp

GREEDY = SamplingOptions(temperature=0)
WILD = SamplingOptions(4.0, top_p=1.0, top_k=0, min_p=0.0)
KINDS: list[dict[str, Any]] = [
    {"kind": "modules", "number": 1},
    {"kind": "modules", "number": 1, "vocabulary": range(5, 61, 2)},
    {"kind": "modules", "number": 3},
    {"kind": "heads", "number": 4, "vocabulary": range(40)},
]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine()
    made.draft_costs.is_fixed = True
    yield made
    made.close()


class Anyway:
    """Grows as far as there is room, so many tokens wide."""

    def __init__(self, width: int) -> None:
        self.width = width

    def take(self, kinds: Sequence[int]) -> int:
        return min(self.width, len(kinds))

    def goes_on(self) -> bool:
        return True


class Checked(MtpDrafter):
    """Every draft beside what the reference says, from the whole sequence."""

    reference: Reference
    num_checked = 0

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        draft = super().propose(ids, count, Anyway(1 + len(ids) % WIDTH))
        chain = len(draft) - len(draft.instead)
        for at, token in enumerate(draft.tokens):
            look = draft.looks[at if at < chain else draft.instead[at - chain]]
            assert token in (look.tokens[:1] if at < chain else look.tokens[1:])
        hidden = self.sequence.trail.since(0)
        for at, look in enumerate(draft.looks[: chain + 1]):
            shares = self.reference.logits(hidden, ids, draft.tokens[:at]).softmax(-1)
            expected = shares.topk(WIDTH).values
            torch.testing.assert_close(shares[look.tokens], expected, rtol=1e-3, atol=1e-6)
            type(self).num_checked += 1
        return draft


@pytest.mark.parametrize(
    "wanted", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_drafts_are_those_of_plain_torch(
    engine: Engine, tmp_path: Path, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, whatever of each draft was accepted."""
    weights = make_weights()
    _, tensors = small_predictor(tmp_path / "mtp.safetensors", engine, weights, **wanted)
    monkeypatch.setattr(Checked, "reference", Reference(CONFIG, weights, tensors), raising=False)
    monkeypatch.setattr(Checked, "num_checked", 0)
    monkeypatch.setattr("chatkv.engine.sources.MtpDrafter", Checked)
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))  # drafts whatever it expects
    monkeypatch.setattr("chatkv.engine.speculation._JUDGED_STEPS", 1e9)  # nor pauses
    accepted = 0
    for seed in range(20):  # random guesses: until some were right
        tokens, counts = answer(engine, 40, WILD, "mtp", seed)
        assert len(tokens) == 40
        accepted += counts.accepted
        if accepted > 3:
            break
    assert Checked.num_checked > 40
    assert accepted > 3


def answer(
    engine: Engine,
    count: int,
    options: SamplingOptions,
    wanted: str,
    seed: int = 3,
    prompt: int = 50,
) -> tuple[list[int], Any]:
    sequence, sampler = TokenSequence(some_ids(50, 2)), Sampler(options, seed)
    with engine.memory.use(sequence):
        logits = engine.prefill(sequence)
        spec = speculation(wanted, engine, sequence, sampler)  # type: ignore[arg-type]
        steps = engine.decode(sequence, logits, sampler, frozenset(), count, speculation=spec)
        return [token for token, _ in steps], spec.counts


@pytest.mark.parametrize("wanted", KINDS)
def test_greedy_answers_are_the_models_own(
    engine: Engine, tmp_path: Path, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
    plain, _ = answer(engine, 120, GREEDY, "off")
    small_predictor(tmp_path / "mtp.safetensors", engine, make_weights(), **wanted, window=16)
    for source in ("mtp", "auto"):
        tokens, counts = answer(engine, 120, GREEDY, source)
        assert tokens == plain
        assert counts.drafted > 0


def test_a_module_looks_back_on_a_window(engine: Engine, tmp_path: Path) -> None:
    predictor, _ = small_predictor(tmp_path / "mtp.safetensors", engine, make_weights())
    module, window = predictor.modules[0], 16
    generator = torch.Generator().manual_seed(1)
    hidden, embedded = torch.randn(2, 120, CONFIG.hidden_size, generator=generator)
    kv, seen = ModuleKV(module, window, torch.float32), []
    while kv.stop < 100:
        count = 1 + kv.stop % 3
        at = slice(kv.stop, kv.stop + count)
        kv.make_room(count)
        out = kv.pass_over(kv.stop, hidden[at], embedded[at])
        kv.stop += count
        kv.pass_over(kv.stop, hidden[:6], embedded[:6])  # a draft, which leaves nothing behind
        alone = ModuleKV(module, window, torch.float32)
        alone.begin_at(kv.begin)
        behind = slice(kv.begin, kv.stop)
        expected = alone.pass_over(kv.begin, hidden[behind], embedded[behind])
        torch.testing.assert_close(out, expected[-count:], rtol=1e-4, atol=1e-5)
        seen.append(kv.stop - kv.begin)
    assert min(seen[20:]) >= window
    assert max(seen) <= 2 * window


def test_matrices_of_few_bits_guess_nearly_the_same(engine: Engine, tmp_path: Path) -> None:
    file, weights = tmp_path / "mtp.safetensors", make_weights()
    write_mtp(file, CONFIG, vocabulary=range(0, 60, 3))
    made = [
        predictor_from(file, engine.decoder, weights, DIGEST, is_small=is_small)
        for is_small in (False, True)
    ]
    generator = torch.Generator().manual_seed(1)
    for num_rows in (1, 3, 20):
        hidden, embedded = torch.randn(2, num_rows, CONFIG.hidden_size, generator=generator)
        outs = [
            ModuleKV(one.modules[0], 32, torch.float32).pass_over(0, hidden, embedded)
            for one in made
        ]
        logits = [DraftHead(one.head)(outs[0]) for one in made]
        for dense, small in (outs, logits):
            assert 0 < (dense - small).norm() < 0.05 * dense.norm()


def test_a_file_of_few_bits_is_what_is_made_of_a_dense_one(engine: Engine, tmp_path: Path) -> None:
    dense, small, weights = tmp_path / "dense.st", tmp_path / "small.st", make_weights()
    metadata = About("modules", DIGEST.hex()).to_metadata()
    rounded = {name: one.bfloat16() for name, one in write_mtp(dense, CONFIG).items()}
    tensors = small_tensors(rounded)
    save_file(rounded, dense, metadata)
    save_file(tensors, small, metadata)
    hidden, embedded = torch.randn(2, 3, CONFIG.hidden_size, generator=torch.manual_seed(1))
    outs = []
    for file in (dense, small):
        made = predictor_from(file, engine.decoder, weights, DIGEST)
        outs.append(ModuleKV(made.modules[0], 32, torch.float32).pass_over(0, hidden, embedded))
    assert torch.equal(*outs)
    lost = next(name for name in tensors if name.endswith("gate_proj.weight.scales"))
    save_file({name: one for name, one in tensors.items() if name != lost}, small, metadata)
    with pytest.raises(ModelError, match=r"lacks the tensor \S*gate_proj\.weight"):
        predictor_from(small, engine.decoder, weights, DIGEST)


@pytest.mark.slow
def test_sampled_answers_are_distributed_as_the_models(engine: Engine, tmp_path: Path) -> None:
    """Of the second and third token, over many seeds."""
    options, num_seeds = SamplingOptions(1.5, top_p=1.0, top_k=3, min_p=0.0), 300
    small_predictor(tmp_path / "mtp.safetensors", engine, make_weights(), number=1)
    heard: dict[tuple[int, ...], int] = {}
    accepted = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
        for seed in range(num_seeds):
            tokens, counts = answer(engine, 4, options, "mtp", seed)
            heard[tuple(tokens[:3])] = heard.get(tuple(tokens[:3]), 0) + 1
            accepted += counts.accepted
    assert accepted > 0
    expected = {key: share * num_seeds for key, share in paths(engine, options, 3).items()}
    assert set(heard) <= set(expected)
    counts_of = torch.tensor([float(heard.get(path, 0)) for path in expected])
    assert pvalue(counts_of, torch.tensor(list(expected.values()))) > ALPHA


def paths(engine: Engine, options: SamplingOptions, length: int) -> dict[tuple[int, ...], float]:
    """How likely each beginning of so many tokens is."""
    sequence, sampler = TokenSequence(some_ids(50, 2)), Sampler(options, 0)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    with engine.memory.use(sequence):
        for _ in range(length):
            longer = {}
            for path, share in found.items():
                sequence.become([*some_ids(50, 2), *path], min(49, sequence.num_cached))
                ids, mass = sampler.distribution(engine.prefill(sequence))
                for token, part in zip(ids.tolist(), (mass / mass.sum()).tolist(), strict=True):
                    longer[(*path, token)] = share * part
            found = longer
    return found


def test_answers_of_one_step_draft_as_many_as_each_wants(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chatkv.engine.mtp._KINDS", ((0.0, 0.9),))
    small_predictor(tmp_path / "mtp.safetensors", engine, make_weights(), number=2)
    wanted = [("off", 40), ("mtp", 60), ("auto", 50), ("mtp", 30), ("ngram", 45)]
    alone = [answer(engine, count, GREEDY, source)[0] for source, count in wanted]
    widths: set[tuple[int, ...]] = set()
    forward = engine.scheduler.forward

    def noting(pieces: Sequence[Any]) -> Sequence[torch.Tensor]:
        widths.add(tuple(sorted(len(piece.draft) for piece in pieces if piece.is_decode)))
        return forward(pieces)

    engine.scheduler.forward = noting
    turns = [
        Turn(lambda source=source, count=count: answer(engine, count, GREEDY, source)[0])
        for source, count in wanted
    ]
    assert [turn.result() for turn in turns] == alone
    assert any(len(set(width)) > 2 for width in widths)
