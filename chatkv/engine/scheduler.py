"""Iteration-level scheduling: each step of the model computes what all turns need next, together.

A turn runs in a thread of its own and asks for one piece of work at a time: the next token of its
answer, or as much as may be of its prompt. One thread computes: it waits until every turn of the
last step has asked again, adds as much prefill as the budget allows, and gives each turn its
logits. (Continuous batching as in Orca, OSDI '22; chunked prefill as in Sarathi-Serve, OSDI '24.)
So a turn reads from top to bottom, a slow reader holds up nobody, and a turn that ends, comes or is
cancelled changes the next step and nothing else.

A token does not depend on who else is in its step beyond rounding: attention sees one sequence at
a time, all else is per row; in float32 on a CPU rows agree to the bit in any company.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from chatkv.engine.budget import LEAST_TOKENS, StepBudget
from chatkv.engine.calls import Call
from chatkv.engine.draft_costs import DraftCosts
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.process import leave_cores_to_others

# How long a step waits for a turn that is still busy with what the last step gave it: so much, or
# a part of what the last step took, since that is what missing one costs. A turn that is late is
# not waited for again until it has asked; but for some steps, prefill is kept short for it.
GRACE_S = 0.005
GRACE = 0.25
LATE_STEPS = 4
# How often a turn that waits asks whether it is cancelled.
POLL_S = 0.05
# Background work that so many steps had no room for takes its share of the next one.
MAX_PASSED_OVER = 32


class Cancelled(Exception):
    """The caller's `cancelled` said so; the sequence keeps what is computed."""


class EngineClosed(Exception):
    """The engine was closed under a turn."""


@dataclass(eq=False)
class Piece:
    """The KV that a turn wants next: of ids[start:stop) of its sequence.

    A step may compute only the front of a piece of prefill; the turn asks again for the rest.
    draft: tokens that may follow, computed with it; their KV lies behind that of the sequence, to
    be counted in by whoever accepts them.
    wait_layer(layer) is called before a layer attends to KV that is still arriving: a step of its
    own, since all of it may have to wait or to fail. front: a piece of the same sequence that is
    computed in that step too, in front of what arrives.
    """

    sequence: TokenSequence
    start: int
    stop: int
    since: float = 0.0  # when its turn began to prefill
    is_decode: bool = False
    is_background: bool = False
    wait_layer: Callable[[int], None] | None = None
    front: Piece | None = None
    draft: Sequence[int] = ()
    # How the token that follows is drawn, where the runner may draw it, and put it into `token`;
    # and whether there is room for its KV, so that the step behind this one may begin.
    sampler: Sampler | None = None
    may_go_ahead: bool = False
    token: int | None = None
    # After the last token computed, [vocab_size] float32. With a draft: after the one in front of
    # it and after each of its tokens, [1 + num_drafted, vocab_size].
    logits: Tensor | None = None
    # Out of the last norm, for each token computed, [length, hidden_size]; None: nobody keeps it.
    hidden: Tensor | None = None
    error: BaseException | None = None
    is_started: bool = False
    num_passed_over: int = 0  # steps that had no room for it
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def ids(self) -> Sequence[int]:
        """All tokens to compute."""
        ids = self.sequence.ids[self.start : self.stop]
        return [*ids, *self.draft] if self.draft else ids

    @property
    def end(self) -> int:
        """Of the sequence and its draft."""
        return self.stop + len(self.draft)

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass
class Scheduler:
    """forward(pieces) computes each piece whole, and returns the logits after each."""

    forward: Callable[[Sequence[Piece]], Sequence[Tensor]]
    budget: StepBudget = field(default_factory=StepBudget)
    draft_costs: DraftCosts = field(default_factory=DraftCosts)
    num_steps: int = 0
    _step_s: float = 0.0  # that the last step took
    _pending: list[Piece] = field(default_factory=list)
    _calls: list[Call] = field(default_factory=list)
    _last_steps: dict[TokenSequence, int] = field(default_factory=dict)  # of turns that go on
    _last_tokens: dict[TokenSequence, int] = field(default_factory=dict)  # of answers, the same
    _thread: threading.Thread | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def run(self, piece: Piece, cancelled: Callable[[], bool] | None = None) -> Tensor:
        """Have a piece computed, at least its front; its logits. Raises what `forward` raises, and
        Cancelled where `cancelled` says so before its step has begun."""
        leave_cores_to_others()  # who asks only samples
        try:
            self._ask(piece)
            while not piece.done.wait(POLL_S if cancelled is not None else None):
                if cancelled is not None and not piece.is_started and cancelled():
                    raise Cancelled
        finally:
            self._withdraw(piece)
        if piece.error is not None:
            raise piece.error
        assert piece.logits is not None
        return piece.logits

    def compute(self, work: Callable[[], None]) -> None:
        """Have the thread that computes do something small between two steps, on all cores. Raises
        what it raises."""
        leave_cores_to_others()
        call = Call(work)
        with self._changed:
            self._begin()
            self._calls.append(call)
            self._changed.notify()
        call.result()

    def leave(self, sequence: TokenSequence) -> None:
        """The sequence's turn has no more to ask: no step waits for it."""
        with self._changed:
            self._last_steps.pop(sequence, None)
            self._last_tokens.pop(sequence, None)
            self._changed.notify()

    def close(self) -> None:
        """End the thread, once its step is done. Turns that still want something fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _ask(self, piece: Piece) -> None:
        with self._changed:
            self._begin()
            self._pending.append(piece)
            self._changed.notify()

    def _begin(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()

    def _withdraw(self, piece: Piece) -> None:
        """Nothing is written into the sequence's blocks once its turn goes on."""
        if piece.done.is_set():
            return
        with self._changed:
            if piece in self._pending:
                self._pending.remove(piece)
            self._last_steps.pop(piece.sequence, None)
            self._last_tokens.pop(piece.sequence, None)
            self._changed.notify()
        if piece.is_started:
            piece.done.wait()

    # --- the thread that computes ---------------------------------------------------------------

    def _loop(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:  # else whoever asked was cancelled meanwhile
                self._step(batch)

    def _next_batch(self) -> list[Piece] | None:
        """What the next step computes, and before it all that is called for; None: closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._calls or self._is_closed)
                self._changed.wait_for(
                    lambda: self._calls or self._has_everyone(),
                    max(GRACE_S, GRACE * self._step_s),
                )
                calls, self._calls = self._calls, []
                if self._is_closed:
                    self._refuse([*self._pending, *calls])
                    return None
                if not calls:
                    return self._taken()
            for call in calls:
                call.run()

    @staticmethod
    def _refuse(asked: Iterable[Piece | Call]) -> None:
        for one in asked:
            one.error = EngineClosed("the engine was closed")
            one.done.set()

    def _taken(self) -> list[Piece]:
        """The pieces of the next step, taken from those that wait."""
        batch = self._choose()
        for piece in batch:
            piece.is_started = True
        self._pending = [piece for piece in self._pending if not piece.is_started]
        for piece in self._pending:
            piece.num_passed_over += 1
        self.num_steps += 1
        for piece in batch:
            self._last_steps[piece.sequence] = self.num_steps
            if piece.is_decode:
                self._last_tokens[piece.sequence] = self.num_steps
        for steps in (self._last_steps, self._last_tokens):
            for sequence in [s for s, at in steps.items() if at <= self.num_steps - LATE_STEPS]:
                del steps[sequence]
        return batch

    def _has_everyone(self) -> bool:
        """Whether all of the last step have asked again, or said that they will not."""
        last = (one for one, step in self._last_steps.items() if step == self.num_steps)
        return self._is_closed or not self._late(last)

    def _late(self, sequences: Iterable[TokenSequence]) -> set[TokenSequence]:
        return set(sequences) - {piece.sequence for piece in self._pending}

    def _choose(self) -> list[Piece]:
        for piece in self._pending:
            if piece.wait_layer is not None:
                return [piece.front, piece] if piece.front is not None else [piece]
        decodes = [piece for piece in self._pending if piece.is_decode]
        prefills = [piece for piece in self._pending if not piece.is_decode]
        tokens = self.budget.prefill_tokens(len(decodes) or len(self._late(self._last_tokens)))
        return decodes + divide(prefills, tokens if decodes else max(tokens, LEAST_TOKENS))

    def _step(self, pieces: Sequence[Piece]) -> None:
        began = time.perf_counter()
        try:
            for piece, logits in zip(pieces, self.forward(pieces), strict=True):
                piece.logits = logits
                piece.sequence.num_cached = piece.stop
            if pieces[-1].wait_layer is None:  # else it may have waited most of the time
                self._learn(pieces, time.perf_counter() - began)
        except BaseException as error:  # nobody may wait for a thread that has ended
            for piece in pieces:
                piece.error = error
        for piece in pieces:
            piece.done.set()

    def _learn(self, pieces: Sequence[Piece], seconds: float) -> None:
        num_decoding = sum(piece.is_decode for piece in pieces)
        num_prefilled = sum(piece.length for piece in pieces if not piece.is_decode)
        self._step_s = seconds
        self.budget.observe(num_decoding, num_prefilled, seconds)
        if not num_prefilled:
            num_drafted = sum(len(piece.draft) for piece in pieces)
            self.draft_costs.observe(num_decoding, num_drafted, seconds)


def divide(prefills: Sequence[Piece], tokens: int) -> list[Piece]:
    """Share a step's tokens of prefill: half of them go to whoever has waited longest, so that each
    has its turn, the others to the shortest pieces first, so that most need not wait. Background
    work gets what is left then, unless many steps had nothing left. Pieces are cut to their parts.
    """
    shares: dict[Piece, int] = {}

    def give(piece: Piece, most: int) -> None:
        nonlocal tokens
        part = min(piece.length - shares.get(piece, 0), most)
        if part > 0:
            shares[piece] = shares.get(piece, 0) + part
            tokens -= part

    for is_last in (False, True):
        group = [
            piece
            for piece in prefills
            if is_last is (piece.is_background and piece.num_passed_over < MAX_PASSED_OVER)
        ]
        if group:
            give(min(group, key=lambda piece: piece.since), (tokens + 1) // 2)
        for piece in sorted(group, key=lambda piece: piece.length):
            give(piece, tokens)
    for piece, share in shares.items():
        piece.stop = piece.start + share
    return list(shares)
