"""Drafts by modules or heads of the model's own, from what came out of it for the last tokens.

A module attends to KV of its own, of the tokens that this turn has computed. That is made when the
first draft is asked for, from the sequence's `Trail`, and again whenever that does not go on from
where it was: no more than a pass of one layer over so many tokens, so none of it is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.engine.drafts import Draft, Drawn, GoesOn, always
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.model.mtp import DraftHead, Module, Predictor

MAX_DRAFT = 6
# A drafted token's kind is how sure its drafter was of the likeliest one; and how often one that
# it was so sure of is right, before that is measured.
_KINDS = ((0.0, 0.15), (0.2, 0.3), (0.4, 0.5), (0.6, 0.65), (0.8, 0.8), (0.95, 0.95))

Compute = Callable[[Callable[[], None]], None]
"""Has something computed where it is computed best, and waits for it."""


@dataclass
class ModuleSpan:
    """New tokens of one sequence behind those whose KV a module has (a `Span`)."""

    kv: ModuleKV
    start: int
    length: int
    is_draft: bool = False

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        first = self.start - self.kv.begin
        end = first + self.length
        self.kv.keys[:, first:end] = keys.transpose(0, 1)
        self.kv.values[:, first:end] = values.transpose(0, 1)
        return self.kv.keys[:, :end], self.kv.values[:, :end]


class ModuleKV:
    """Of one module and one sequence: the KV of positions [begin, stop), and what waits to go in.

    waiting: what came out before this module at the positions from `stop` on, whose token further
    on is not known yet, [num_rows, hidden_size].
    """

    def __init__(self, module: Module, window: int, dtype: torch.dtype) -> None:
        config = module.config
        # Room for as much again, so that what is old leaves rarely, and for a draft.
        shape = (config.num_kv_heads, 2 * window + 2 * MAX_DRAFT, config.head_dim)
        self.module, self.window = module, window
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._nothing = torch.zeros(0, config.hidden_size, dtype=dtype)
        self.begin_at(0)

    def begin_at(self, position: int) -> None:
        self.begin = self.stop = position
        self.waiting = self._nothing

    def pass_over(self, start: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What comes out at positions from `start` on, which is `stop`, or behind a draft's."""
        return self.module.forward(hidden, embedded, ModuleSpan(self, start, len(hidden)))

    def make_room(self, count: int) -> None:
        """For as many positions from `stop` on, at most a window of them, and a draft behind."""
        if self.stop + count - self.begin <= 2 * self.window:
            return
        gone = min(self.stop + count - self.window, self.stop) - self.begin
        end = self.stop - self.begin
        for kept in (self.keys, self.values):
            kept[:, : end - gone] = kept[:, gone:end].clone()
        self.begin += gone


@dataclass
class MtpDrafter:
    """A `Drafter` of one answer, which `sampler` draws behind `sequence`.

    keeps_answer: guess the very token that will be drawn, by the same number: then the answer is
    what it is without drafts, to the token, and how many are drafted, which depends on the clock,
    changes nothing. Else what it drafts is verified, and is right a little more often.
    """

    predictor: Predictor
    sequence: TokenSequence
    sampler: Sampler
    compute: Compute
    keeps_answer: bool = False
    source: str = field(default="mtp", init=False)
    share: float = field(default=0.06, init=False)
    adapts: bool = field(default=True, init=False)
    _logits: Tensor = field(init=False)  # of the next draft's first token, or of all with heads
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        window, dtype = self.predictor.window, self.predictor.embedding.dtype
        self.head = DraftHead(self.predictor.head)
        self._num_heard = 0  # tokens
        self._kv = [ModuleKV(module, window, dtype) for module in self.predictor.modules]

    @property
    def most(self) -> int:
        return MAX_DRAFT if self._kv else min(MAX_DRAFT, len(self.predictor.heads))

    def expected(self, kind: int) -> float:
        return _KINDS[kind][1]

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        trail = self.sequence.trail
        if freely or not len(trail) or trail.stop != len(ids) - 1:
            return None  # nothing is known of the token before the last: somebody else's KV
        began = time.perf_counter()
        self.compute(lambda: self._look(ids))
        self._seconds = time.perf_counter() - began
        return self._kind(self._logits[0])

    def propose(self, ids: Sequence[int], count: int, goes_on: GoesOn = always) -> Draft:
        drawn: list[Drawn] = []
        kinds: list[int] = []

        def may_go_on(logits: Tensor) -> bool:
            kinds.append(self._kind(logits))
            return goes_on(kinds[-1])

        began = time.perf_counter()
        self.compute(lambda: self._draw(len(ids), count, may_go_on, drawn))
        seconds = self._seconds + time.perf_counter() - began
        tokens = [one.token for one in drawn]
        if self.keeps_answer:
            drawn = []
        return Draft(tokens, drawn, kinds[: len(tokens) - 1], seconds)

    def _kind(self, logits: Tensor) -> int:
        sure = float(torch.softmax(logits, -1).max())
        return max(kind for kind, (least, _) in enumerate(_KINDS) if least <= sure)

    def _look(self, ids: Sequence[int]) -> None:
        """Take in what was computed since, and see what follows."""
        self.head.hear(ids[self._num_heard :])
        self._num_heard = len(ids)
        if not self._kv:
            hidden = self.sequence.trail.since(len(ids) - 2)
            rows = [head.forward(hidden) for head in self.predictor.heads]
            self._logits = self.head(torch.cat(rows))
            return
        out = self._catch_up(ids)
        self._out = out[-1:]
        self._logits = self.head(self.predictor.modules[0].out_norm(self._out))

    def _catch_up(self, ids: Sequence[int]) -> Tensor:
        """Pass every module over the positions that are new; what came out of the first."""
        trail, first = self.sequence.trail, self._kv[0]
        oldest = max(trail.start, trail.stop - self.predictor.window)
        if not oldest <= first.stop < trail.stop:
            for kv in self._kv:
                kv.begin_at(oldest)
        rows, outs = trail.since(first.stop), []
        for ahead, kv in enumerate(self._kv, 1):
            kv.waiting = torch.cat([kv.waiting, rows])
            count = len(ids) - ahead - kv.stop
            if count <= 0:
                break
            embedded = self._embedded(ids[kv.stop + ahead : len(ids)])
            kv.make_room(count)
            rows = kv.pass_over(kv.stop, kv.waiting[:count], embedded)
            kv.waiting, kv.stop = kv.waiting[count:], kv.stop + count
            outs.append(rows)
        return outs[0]

    def _draw(
        self, total: int, count: int, may_go_on: Callable[[Tensor], bool], drawn: list[Drawn]
    ) -> None:
        """A draft behind so many tokens. Whether it goes on is decided before a token is drawn, not
        because of it: else what is drafted would not be distributed as it says."""
        tokens: list[int] = []
        if not self._kv:
            for logits in self._logits[:count]:
                if tokens and not may_go_on(logits):
                    return
                tokens.append(self._drawn(logits, drawn))
            return
        logits, out = self._logits[0], self._out
        position = total - 1
        made = out[:0]  # at positions of the draft, by the module before
        for number in range(1, count + 1):
            if number > 1:
                if number <= len(self._kv):
                    kv = self._kv[number - 1]
                    rows, following = torch.cat([kv.waiting, made]), tokens
                    made = kv.pass_over(kv.stop, rows, self._embedded(following))
                    position = total - 1
                else:
                    kv = self._kv[-1]
                    made = kv.pass_over(position, out, self._embedded(tokens[-1:]))
                    position += 1
                out = made[-1:]
                logits = self.head(kv.module.out_norm(out))[0]
                if not may_go_on(logits):
                    return
            tokens.append(self._drawn(logits, drawn))

    def _drawn(self, logits: Tensor, drawn: list[Drawn]) -> int:
        one = self.sampler.propose(
            logits, len(drawn), self.head.vocabulary, is_same_number=self.keeps_answer
        )
        drawn.append(one)
        return one.token

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(ids), self.predictor.embedding)
