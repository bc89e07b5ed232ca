"""Tokens drawn where their logits are: those that `Sampler.pick` picks, several answers at once.

No number is looked at on the way, so nobody waits for the device. What that rules out is left to
the sampler itself: a grammar, and distributions whose tail counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chatkv.engine.sampling import HEAD_TOKENS, Sampler

# Answers at once: a vocabulary in float64 is large.
ROWS = 8
# Bytes that drawing takes for each of their logits: the scaled ones, what comes of these, keys.
BYTES_PER_LOGIT = 48
NUM_SETTINGS = 5


def can_draw(sampler: Sampler) -> bool:
    """Whether this sampler's tokens may be drawn here."""
    options = sampler.options
    if sampler.grammar is not None:
        return False
    has_cut = options.top_k <= HEAD_TOKENS if options.top_k else options.top_p < 1 or options.min_p
    return not options.temperature or bool(has_cut)


def settings_of(sampler: Sampler, draws: int) -> list[float]:
    """What the token of the draw of that number depends on, beside its logits."""
    options, number = sampler.options, sampler.number_to_pick(draws)
    return [options.temperature, options.top_k, options.top_p, options.min_p, number]


def draw_rows(logits: Tensor, settings: Tensor, tokens: Tensor) -> None:
    """Put the tokens of rows with a temperature into `tokens`, -1 where the tail would count.

    logits: [n, vocab_size] float32; settings: [n, NUM_SETTINGS] float64; tokens: [n] int64, at
    first the greedy ones. All on one device.
    """
    for start in range(0, len(logits), ROWS):
        part = slice(start, start + ROWS)
        drawn = _drawn(logits[part], settings[part])
        tokens[part] = torch.where(settings[part, 0] == 0, tokens[part], drawn)


def _drawn(logits: Tensor, settings: Tensor) -> Tensor:
    """As `Sampler.distribution` and `drafts.draw`, row by row."""
    temperature, top_k, top_p, min_p, number = settings.T.unsqueeze(-1)
    scaled = logits.double() - logits.amax(1, True)
    scaled /= torch.where(temperature == 0, 1.0, temperature)
    count = min(HEAD_TOKENS, logits.shape[1])
    place = torch.arange(count, device=logits.device)
    ids = _largest(logits, count)
    values = scaled.gather(1, ids)
    values = torch.where((top_k == 0) | (place < top_k), values, -torch.inf)
    total = torch.where(top_k == 0, scaled.logsumexp(1, True), values.logsumexp(1, True))
    mass = (values - total).exp()
    kept = (mass > 0).sum(1, True)
    in_mass = (mass.cumsum(1) - mass < top_p).sum(1, True)
    kept = torch.where(top_p < 1, torch.minimum(kept, in_mass), kept)
    likely = (mass >= mass[:, :1] * min_p).sum(1, True)
    kept = torch.where(min_p > 0, torch.minimum(kept, likely), kept).clamp(min=1)
    lacks_tail = (kept == count) & (top_k == 0) & (count < logits.shape[1])
    cumulative = torch.where(place < kept, mass, 0.0).cumsum(1)
    index = (cumulative <= number * cumulative[:, -1:]).sum(1, True)
    tokens = ids.gather(1, torch.minimum(index, kept - 1))
    return torch.where(lacks_tail, -1, tokens)[:, 0]


def _largest(logits: Tensor, count: int) -> Tensor:
    """Ids of the largest logits of each row, of equals the lowest first: `topk` does not say which
    of equals it takes, so it is asked about numbers that hold the id too."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 is 0.0 now
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    from_last = 0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device)
    keys = ordered << 32 | from_last
    return 0xFFFFFFFF - (keys.topk(count, 1).values & 0xFFFFFFFF)
