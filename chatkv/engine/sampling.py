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

from chatkv.engine.drafts import Drawn, draw, verified
from chatkv.engine.options import SamplingOptions
from chatkv.model.grammar import GrammarState

# Tokens examined first when top-p or min-p cut the tail: sorting a whole vocabulary of 50-150k
# costs milliseconds a token. Where these do not hold the wanted mass, everything is sorted.
HEAD_TOKENS = 512
# What the numbers of a draw are for. A token takes one draw, drafted or not.
_TO_PICK, _TO_ACCEPT, _TO_PROPOSE = range(3)


@dataclass
class Sampler:
    """Draws tokens; `draws` counts the random numbers used since the seed was set. `grammar`: what
    they must add up to."""

    options: SamplingOptions
    seed: int
    draws: int = 0
    grammar: GrammarState | None = None

    def pick(self, logits: Tensor, drawn: Drawn | None = None) -> int:
        """One token id from logits [vocab_size] in float32. What the grammar forbids is as if the
        model knew it not, before anything else is made of the logits. `drawn`: what somebody has
        drawn for it, to be accepted or replaced (`verified`)."""
        if self.grammar is None:
            return self._draw(logits, drawn)
        token = self._draw(self.grammar.masked(logits), drawn)
        self.grammar.accept(token)
        return token

    def accept(self, token: int) -> int:
        """A token that somebody else has drawn as `pick` would have, with `number_to_pick`."""
        self.draws += self.options.temperature > 0
        return token

    def number_to_pick(self, draw_number: int) -> float:
        """What decides that draw, from [0, 1)."""
        return self._numbers(draw_number)[_TO_PICK]

    def propose(self, logits: Tensor, ahead: int) -> Drawn:
        """A guess at the token after the next `ahead` ones, from the logits of somebody who drafts.
        Draws nothing that is counted."""
        if self.options.temperature == 0:
            ids = logits.argmax()[None]
            return Drawn(int(ids), (ids, torch.ones(1, dtype=torch.float64)))
        ids, probabilities = self.distribution(logits)
        token_id = draw(ids, probabilities, self._numbers(self.draws + ahead)[_TO_PROPOSE])
        return Drawn(token_id, (ids, probabilities / probabilities.sum()))

    def _draw(self, logits: Tensor, drawn: Drawn | None = None) -> int:
        if self.options.temperature == 0:
            return int(logits.argmax())
        numbers = self._numbers(self.draws)
        self.draws += 1
        ids, probabilities = self.distribution(logits)
        if drawn is not None:
            accept, redraw = numbers[_TO_ACCEPT], numbers[_TO_PICK]
            return verified((ids, probabilities), drawn, accept, redraw)
        return draw(ids, probabilities, numbers[_TO_PICK])

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and their probabilities (float64, most likely first, not renormalised after
        the cut) under temperature, then top-k, top-p and min-p."""
        options = self.options
        scaled = (logits.double() - logits.max()) / options.temperature  # finite, however small
        full = scaled.shape[0]
        total = torch.logsumexp(scaled, 0)
        count = options.top_k if 0 < options.top_k < full else full
        if options.top_k == 0 and (options.top_p < 1 or options.min_p > 0):
            count = min(HEAD_TOKENS, full)
        values, ids = _largest(scaled, count)
        if options.top_k:
            total = torch.logsumexp(values, 0)
        probabilities = (values - total).exp()
        kept = self._kept(probabilities)
        if kept == count < full and options.top_k == 0:
            values, ids = scaled.sort(descending=True, stable=True)
            probabilities = (values - total).exp()
            kept = self._kept(probabilities)
        elif count < full and values[kept - 1] == values[-1]:
            ids = _first_of_equals(scaled, values, ids)
        return ids[:kept], probabilities[:kept]

    def _kept(self, probabilities: Tensor) -> int:
        """How many of the descending probabilities pass top-p (the smallest set that holds the
        mass) and min-p (relative to the most likely token); at least one, and none that cannot
        be."""
        kept = int((probabilities > 0).sum())
        if self.options.top_p < 1:
            before = probabilities.cumsum(0) - probabilities
            kept = min(kept, int((before < self.options.top_p).sum()))
        if self.options.min_p > 0:
            floor = probabilities[0] * self.options.min_p
            kept = min(kept, int((probabilities >= floor).sum()))
        return max(kept, 1)

    def _numbers(self, draw_number: int) -> list[float]:
        """Of one draw, from [0, 1): all of one block of the generator, so no draw shares any."""
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=draw_number))
        return [float(number) for number in generator.random(3)]


def _largest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers and their ids, of equals the lowest id first: of logits in 16 bits many
    are equal, and the order in which `topk` has them differs from device to device."""
    ids = scaled.topk(count, sorted=False).indices.sort().values
    values, order = scaled[ids].sort(descending=True, stable=True)
    return values, ids[order]


def _first_of_equals(scaled: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """The ids with the lowest ones of all that have the last value: `topk` takes any of these."""
    num_last = int((values == values[-1]).sum())
    equal_to_last = (scaled == values[-1]).nonzero()[:num_last, 0]
    return torch.cat([ids[: len(ids) - num_last], equal_to_last])
