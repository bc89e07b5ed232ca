"""Choosing a token from logits, reproducibly.

The random number of the n-th draw of a turn is a pure function of (seed, n): Philox, a counter
based generator (Salmon et al., SC'11). The state of sampling is therefore two integers, which a
turn commits with its tokens; nothing is lost with a process.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chatkv.engine.options import SamplingOptions

# Tokens examined first when top-p or min-p cut the tail: sorting a whole vocabulary of 50-150k
# costs milliseconds a token. Where these do not hold the wanted mass, everything is sorted.
HEAD_TOKENS = 512


@dataclass
class Sampler:
    """Draws tokens; `draws` counts the random numbers used since the seed was set."""

    options: SamplingOptions
    seed: int
    draws: int = 0

    def pick(self, logits: Tensor) -> int:
        """One token id from logits [vocab_size] in float32."""
        if self.options.temperature == 0:
            return int(logits.argmax())
        ids, probabilities = self.distribution(logits)
        cumulative = probabilities.cumsum(0)
        target = self._uniform() * float(cumulative[-1])
        index = int(torch.searchsorted(cumulative, target, right=True))
        return int(ids[min(index, len(ids) - 1)])

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and their probabilities (float64, most likely first, not renormalised after
        the cut) under temperature, then top-k, top-p and min-p."""
        options = self.options
        scaled = logits.double() / options.temperature
        full = scaled.shape[0]
        total = torch.logsumexp(scaled, 0)
        count = options.top_k if 0 < options.top_k < full else full
        if options.top_k == 0 and (options.top_p < 1 or options.min_p > 0):
            count = min(HEAD_TOKENS, full)
        values, ids = scaled.topk(count)
        if options.top_k:
            total = torch.logsumexp(values, 0)
        probabilities = (values - total).exp()
        kept = self._kept(probabilities)
        if kept == count < full and options.top_k == 0:
            values, ids = scaled.sort(descending=True)
            probabilities = (values - total).exp()
            kept = self._kept(probabilities)
        return ids[:kept], probabilities[:kept]

    def _kept(self, probabilities: Tensor) -> int:
        """How many of the descending probabilities pass top-p (the smallest set that holds the
        mass) and min-p (relative to the most likely token); at least one."""
        kept = probabilities.shape[0]
        if self.options.top_p < 1:
            before = probabilities.cumsum(0) - probabilities
            kept = int((before < self.options.top_p).sum())
        if self.options.min_p > 0:
            floor = probabilities[0] * self.options.min_p
            kept = min(kept, int((probabilities >= floor).sum()))
        return max(kept, 1)

    def _uniform(self) -> float:
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=self.draws))
        self.draws += 1
        return float(generator.random())
