"""What quantised weights cost a model: perplexity, KL and agreement on a text, against full ones.

Kept beside the models in one JSON file, {weights digest: the fields of WeightsQuality}; it is
cache and may be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from chatkv.errors import UsageError
from chatkv.model.decoder import Decoder
from chatkv.paths import write_note
from chatkv.session.predictions import CHUNK_TOKENS, Difference, TextOnModel

FILE_NAME = "weights_quality.json"


@dataclass(frozen=True)
class WeightsQuality:
    """How one kind of weights did on one text. All means are over `num_tokens` predictions."""

    model: str
    dtype: str
    weights: str
    perplexity: float
    full_perplexity: float
    kl: float  # KL(full || these) of the next token's distribution, in nats
    top1_agreement: float  # how often both find the same token likeliest
    num_tokens: int

    @property
    def perplexity_change(self) -> float:
        """0.01: one percent higher."""
        return self.perplexity / self.full_perplexity - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity_change": self.perplexity_change}


def differences(
    full: Decoder,
    others: Sequence[Decoder],
    ids: Sequence[int],
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Difference]:
    """Of each other decoder's predictions of `ids` from those of the full one, summed over
    len(ids) - 1 tokens. Raises UsageError where the text is too short or does not fit."""
    if len(ids) < 2:
        raise UsageError("the text is too short to measure anything: give a longer one with --text")
    if len(ids) > full.max_position:
        raise UsageError(f"the text has {len(ids)} tokens, the model reads {full.max_position}")
    exact = TextOnModel(full, ids)
    texts = [TextOnModel(other, ids) for other in others]
    found = [Difference() for _ in others]
    for start in range(0, len(ids) - 1, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, len(ids) - 1)
        targets = torch.tensor(ids[start + 1 : stop + 1], device=full.device)
        wanted = exact.compute(start, stop).log_softmax(-1)
        for difference, text in zip(found, texts, strict=True):
            difference.add(wanted, text.compute(start, stop).log_softmax(-1), targets)
        on_progress("measuring", stop, len(ids) - 1)
    return found


def remember(models: Path, digest: bytes, quality: WeightsQuality) -> None:
    known = known_qualities(models)
    known[digest.hex()] = asdict(quality)
    write_note(models / FILE_NAME, json.dumps(known, indent=1))


def known_qualities(models: Path) -> dict[str, dict[str, Any]]:
    """By weights digest (hex); empty where nothing was measured."""
    try:
        known = json.loads((models / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
