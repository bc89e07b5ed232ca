"""Every architecture against transformers, on random tiny checkpoints: the same logits whether the
tokens come at once, in chunks, one by one or beside another sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from chatkv.engine.pool import BlockPool, Run, RunSpan
from chatkv.errors import ModelError
from chatkv.model import batch
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import prepare
from chatkv.model.weights import load_weights

NUM_TOKENS = 150  # more than two blocks, and more than any of the sliding windows
FLOAT32_TOLERANCE = 1e-4

Checkpoint = Callable[..., Path]


def load(
    folder: Path, scratch: Path, dtype: str = "float32", num_blocks: int = 12
) -> tuple[Decoder, BlockPool]:
    prepared = prepare(find_model(str(folder), scratch), dtype, scratch)  # type: ignore[arg-type]
    decoder = Decoder(prepared.config, load_weights(prepared))
    return decoder, BlockPool(prepared.config, num_blocks, decoder.dtype, decoder.device)


def token_ids(seed: int = 0, count: int = NUM_TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, tiny.VOCAB_SIZE, (count,), generator=generator)


def in_pieces(
    decoder: Decoder, pool: BlockPool, ids: torch.Tensor, pieces: list[int]
) -> torch.Tensor:
    """Logits of every position, the ids fed in pieces of the given lengths."""
    run = Run()
    pool.reserve(run, len(ids))
    logits, start = [], 0
    for length in pieces:
        span = RunSpan(pool, run, start, length)
        logits.append(decoder.forward(ids[start : start + length], [span], every_position=True))
        start += length
    assert start == len(ids)
    pool.release(run)
    return torch.cat(logits)


PIECES = {
    "at once": [NUM_TOKENS],
    "chunks": [64, 1, 40, 30, 15],
    "one by one": [1] * NUM_TOKENS,
}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_logits_are_those_of_transformers(
    name: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(name)
    ids = token_ids()
    with torch.no_grad():
        expected = tiny.load_reference(folder)(ids[None]).logits[0]
    decoder, pool = load(folder, tmp_path)
    # Fresh memory may hold anything: what was never written must never be read.
    pool.kv.fill_(float("nan"))
    for way, pieces in PIECES.items():
        actual = in_pieces(decoder, pool, ids, pieces)
        difference = (actual - expected).abs().max().item()
        assert difference <= FLOAT32_TOLERANCE, f"{way}: {difference}"


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(
    name: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(name)
    ids = token_ids()
    with torch.no_grad():
        exact = tiny.load_reference(folder)(ids[None]).logits[0]
        rounded = tiny.load_reference(folder, "bfloat16")(ids[None]).logits[0].float()
    allowed = 1.5 * (rounded - exact).pow(2).mean().sqrt()
    decoder, pool = load(folder, tmp_path, "bfloat16")
    pool.kv.fill_(float("nan"))
    for way, pieces in PIECES.items():
        actual = in_pieces(decoder, pool, ids, pieces)
        error = (actual - exact).pow(2).mean().sqrt()
        assert error <= allowed, f"{way}: {error} of {allowed}"


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen3"])
def test_sequences_do_not_see_each_other(
    name: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    decoder, pool = load(tiny_checkpoint(name), tmp_path)
    first, second = token_ids(1, 70), token_ids(2, 33)
    alone = [in_pieces(decoder, pool, ids, [len(ids)])[-1] for ids in (first, second)]
    runs = Run(), Run()
    spans = []
    for run, ids in zip(runs, (first, second), strict=True):
        pool.reserve(run, len(ids))
        spans.append(RunSpan(pool, run, 0, len(ids)))
    together = decoder.forward(torch.cat([first, second]), spans)
    assert (together - torch.stack(alone)).abs().max() <= FLOAT32_TOLERANCE


@pytest.mark.parametrize(("name", "are_grouped"), [("llama3", True), ("mistral", False)])
def test_answers_of_one_step_attend_as_each_alone(
    name: str,
    are_grouped: bool,
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32 to the bit. In bfloat16 those about as long attend together, but where a window
    hides some: no padding is seen, nor anybody else, and rounding is no worse."""
    grouped: list[set[int]] = []
    attend = batch._Alike.attend

    def noted(group: batch._Alike, *tensors: Any) -> torch.Tensor:
        grouped.append(set(group.numbers))
        return attend(group, *tensors)

    monkeypatch.setattr(batch._Alike, "attend", noted)
    lengths = (3, 170, 41, 1, 64, 65, 9, 129)
    texts = [token_ids(seed, length) for seed, length in enumerate(lengths)]
    exact, also_exact = last_logits(tiny_checkpoint(name), tmp_path, "float32", texts)
    assert torch.equal(exact, also_exact) and not grouped
    alone, together = last_logits(tiny_checkpoint(name), tmp_path, "bfloat16", texts)
    allowed = 1.3 * (alone.float() - exact).pow(2).mean().sqrt()
    assert (together.float() - exact).pow(2).mean().sqrt() <= allowed
    # 170 and 129; 65, 64 and 41; then those that padding costs nothing.
    assert grouped[:3] == ([{1, 7}, {5, 4, 2}, {0, 3, 6}] if are_grouped else [])


def last_logits(
    folder: Path, scratch: Path, dtype: str, texts: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Behind each text: its last token computed alone, and in one step with the others'."""
    decoder, pool = load(folder, scratch, dtype, num_blocks=24)
    pool.kv.fill_(float("nan"))
    spans = []
    with torch.inference_mode():
        for ids in texts:
            run = Run()
            pool.reserve(run, len(ids))
            if len(ids) > 1:
                decoder.forward(ids[:-1], [RunSpan(pool, run, 0, len(ids) - 1)])
            spans.append(RunSpan(pool, run, len(ids) - 1, 1))
        last = torch.stack([ids[-1] for ids in texts])
        alone = [decoder.forward(last[i : i + 1], spans[i : i + 1]) for i in range(len(texts))]
        return torch.cat(alone), decoder.forward(last, spans)


def test_sharded_weights_are_the_same_model(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ids = token_ids()
    logits = [
        in_pieces(*load(tiny_checkpoint("qwen2", **options), tmp_path), ids, [NUM_TOKENS])
        for options in ({}, {"sharded": True})
    ]
    assert torch.equal(*logits)


def test_an_unknown_architecture_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(tiny_checkpoint("llama2"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"(?i)mamba"):
        load(folder, tmp_path)
