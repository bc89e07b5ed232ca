"""Drafts by modules or heads of the model's own, from what came out of it for the last tokens.

A module attends to KV of its own, of the tokens that this turn has computed. That is made when the
first draft is asked for, from the sequence's `Trail`, and again whenever that does not go on from
where it was: no more than a pass of one layer over so many tokens, so none of it is stored.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from chatkv.engine.drafts import Draft, Growth, Look
from chatkv.engine.sequence import TokenSequence
from chatkv.model.mtp import DraftHead, Module, Predictor

# Tokens of a draft, and of the branch that it grows along.
MAX_DRAFT, MAX_AHEAD = 7, 6
# How many tokens are thought of at each place.
WIDTH = 6
# A token's kind is how likely its drafter thought it; and how often one that it thought so likely
# is right, before that is measured.
_KINDS = (
    *((0.0, 0.02), (0.05, 0.06), (0.1, 0.12), (0.15, 0.16), (0.2, 0.22), (0.3, 0.3)),
    *((0.4, 0.4), (0.5, 0.5), (0.6, 0.6), (0.7, 0.72), (0.85, 0.8), (0.95, 0.93)),
)

Compute = Callable[[Callable[[], None]], None]
"""Has something computed where it is computed best, and waits for it."""


@dataclass
class ModuleSpan:
    """New tokens of one sequence behind those whose KV a module has (a `Span`)."""

    kv: ModuleKV
    start: int
    length: int
    draft: Sequence[int] | None = None
    place = None

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
        shape = (config.num_kv_heads, 2 * window + 2 * MAX_AHEAD, config.head_dim)
        self.module, self.window = module, window
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self._nothing = torch.zeros(0, config.hidden_size, dtype=dtype)
        self.begin_at(0)

    def begin_at(self, position: int) -> None:
        self.begin = self.stop = position
        self.waiting = self._nothing

    def pass_over(self, start: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What comes out at positions from `start` on, which is `stop`, or behind a draft's."""
        # A few rows attend as those of a draft do, one behind the other: four times as fast.
        in_a_row = () if len(hidden) <= 1 + MAX_DRAFT else None
        return self.module.forward(hidden, embedded, ModuleSpan(self, start, len(hidden), in_a_row))

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
    """A `Drafter` of one answer, behind `sequence`.

    A draft grows along the likeliest tokens, and has others beside them where they may well come
    instead. They are not drawn, so they change no answer. first_kind: the lowest of its kinds.
    """

    predictor: Predictor
    sequence: TokenSequence
    compute: Compute
    first_kind: int = 0
    source: str = field(default="mtp", init=False)
    most: int = field(default=MAX_DRAFT, init=False)
    share: float = field(default=0.06, init=False)
    adapts: bool = field(default=True, init=False)
    _looks: list[Look] = field(init=False)  # of the next draft: of its first place, with heads all
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        window, dtype = self.predictor.window, self.predictor.embedding.dtype
        self.head = DraftHead(self.predictor.head)
        self._num_heard = 0  # tokens
        self._kv = [ModuleKV(module, window, dtype) for module in self.predictor.modules]

    def expected(self, kind: int) -> float:
        return _KINDS[kind - self.first_kind][1]

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        trail = self.sequence.trail
        if freely or not len(trail) or trail.stop != len(ids) - 1:
            return None  # nothing is known of the token before the last: somebody else's KV
        began = time.perf_counter()
        self.compute(lambda: self._look(ids))
        self._seconds = time.perf_counter() - began
        return self._looks[0].kinds[0]

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        assert growth is not None
        chain, beside, instead = list[int](), list[int](), list[int]()
        began = time.perf_counter()

        def grow() -> bool:
            """As far as was looked; whether it pays to look further."""
            while (ahead := len(chain)) < len(self._looks):
                taken = growth.take(self._looks[ahead].kinds[: count - ahead - len(beside)])
                if not taken:
                    return False
                tokens = self._looks[ahead].tokens[:taken]
                chain.append(tokens[0])
                beside.extend(tokens[1:])
                instead.extend([ahead] * (taken - 1))
                is_full = len(chain) + len(beside) >= count or len(chain) == self._most_ahead
                if is_full or not growth.goes_on():
                    return False
            return True

        def look_further() -> None:
            self._look_behind(len(ids), chain)
            while grow():
                self._look_behind(len(ids), chain)

        if grow():
            self.compute(look_further)  # one call: to wake that thread takes as long as a look
        seconds = self._seconds + time.perf_counter() - began
        return Draft([*chain, *beside], instead, looks=self._looks, seconds=seconds)

    @property
    def _most_ahead(self) -> int:
        return MAX_AHEAD if self._kv else min(MAX_AHEAD, len(self.predictor.heads))

    def _looked(self, logits: Tensor) -> Look:
        """logits: of one place, as `DraftHead` has them."""
        sure, index = torch.softmax(logits, -1).topk(min(WIDTH, len(logits)))
        ids = index if self.head.vocabulary is None else self.head.vocabulary[index]
        kinds = [bisect_right(_KINDS, share, key=itemgetter(0)) - 1 for share in sure.tolist()]
        return Look(ids.tolist(), [self.first_kind + max(kind, 0) for kind in kinds])

    def _look(self, ids: Sequence[int]) -> None:
        """Take in what was computed since, and see what follows."""
        self.head.hear(ids[self._num_heard :])
        self._num_heard = len(ids)
        if not self._kv:
            hidden = self.sequence.trail.since(len(ids) - 2)
            rows = [head.forward(hidden) for head in self.predictor.heads]
            self._looks = [self._looked(logits) for logits in self.head(torch.cat(rows))]
            return
        self._out = self._catch_up(ids)[-1:]
        self._made = self._out[:0]  # at positions of the draft, by the module before
        self._position = len(ids) - 1
        logits = self.head(self.predictor.modules[0].out_norm(self._out))
        self._looks = [self._looked(logits[0])]

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

    def _look_behind(self, total: int, chain: Sequence[int]) -> None:
        """See what follows so many tokens and those of a draft, of which all but the last were
        looked behind before."""
        if len(chain) < len(self._kv):
            kv = self._kv[len(chain)]
            rows = torch.cat([kv.waiting, self._made])
            self._made = kv.pass_over(kv.stop, rows, self._embedded(chain))
            self._position = total - 1
        else:
            kv = self._kv[-1]
            self._made = kv.pass_over(self._position, self._out, self._embedded(chain[-1:]))
            self._position += 1
        self._out = self._made[-1:]
        self._looks.append(self._looked(self.head(kv.module.out_norm(self._out))[0]))

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return F.embedding(torch.tensor(ids), self.predictor.embedding)
