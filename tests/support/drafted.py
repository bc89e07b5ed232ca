"""Turns with drafts, and the test that compares how often tokens come."""

from __future__ import annotations

from typing import Any

import torch

from chatkv.client import ChatRequest, open_chat
from chatkv.engine.options import SamplingOptions, Speculate
from chatkv.paths import folders
from chatkv.session.turn import TurnOptions, TurnResult

# A test that compares frequencies fails once in so many seeds, if all is right; seeds are fixed.
ALPHA = 1e-3


def pvalue(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's chi-square test: how often right frequencies would look worse than these."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


Held = list[tuple[TurnResult, list[int]]]
TEXTS = ("hello " * 8, "again", "and again")


def held(
    model: str,
    texts: tuple[str, ...] = TEXTS,
    session: str | None = None,
    speculate: Speculate = "auto",
    temperature: float = 0.0,
    max_tokens: int = 64,
    dtype: Any = "float32",
    **options: Any,
) -> Held:
    """Turns in a runtime of their own: each result with the reply's ids."""
    request = ChatRequest(model=model, dtype=dtype, resume=session, seed=3)
    chosen = TurnOptions(
        SamplingOptions(temperature), max_tokens, speculate=speculate, restore="reload", **options
    )
    results = []
    with open_chat(folders(), request) as chat:
        for text in texts:
            result = chat.conversation.send(text, chosen)
            results.append((result, list(chat.conversation.turns[-1].reply_ids)))
    return results
