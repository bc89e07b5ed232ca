"""Iteration-level scheduling: each step of the model computes what all turns need next, together.

A turn runs in a thread of its own and asks for one piece of work at a time: the next token of its
answer, or as much as may be of its prompt. One thread computes: it waits until every turn of the
last step has asked again, adds as much prefill as the budget allows, and gives each turn its
logits. (Continuous batching as in Orca, OSDI '22; chunked prefill as in Sarathi-Serve, OSDI '24.)
Where a pass may stop between layers, prefill beside answers goes in chunks that fill the
processor, in each step through as many layers as the answers can bear: shorter chunks would each
walk through all weights, and through the whole history behind which they stand.
So a turn reads from top to bottom, a slow reader holds up nobody, and a turn that ends, comes or is
cancelled changes the next step and nothing else.

A token does not depend on who else is in its step beyond rounding: no sequence sees anything of
another, all else is per row; in float32 on a CPU rows agree to the bit in any company.
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
from chatkv.engine.piece import Piece
from chatkv.engine.sequence import TokenSequence
from chatkv.engine.shares import divide
from chatkv.waiting import Patience, leave_cores_to_others

# How long a step waits for a turn that is still busy with what the last step gave it: so much, or
# a part of what the last step took, since that is what missing one costs. A turn that is late is
# not waited for again until it has asked; but for some steps, prefill is kept short for it.
GRACE_S = 0.005
GRACE = 0.25
LATE_STEPS = 4
# How often a turn that waits asks whether it is cancelled.
POLL_S = 0.05


class Cancelled(Exception):
    """The caller's `cancelled` said so; the sequence keeps what is computed."""


class EngineClosed(Exception):
    """The engine was closed under a turn."""


@dataclass
class Scheduler:
    """forward(pieces) takes each piece through its layers, and returns the logits after each, None
    for those that are not through yet. num_layers: into so many parts a pass can be cut."""

    forward: Callable[[Sequence[Piece]], Sequence[Tensor | None]]
    num_layers: int = 1
    budget: StepBudget = field(default_factory=StepBudget)
    draft_costs: DraftCosts = field(default_factory=DraftCosts)
    patience: Patience = field(default_factory=Patience)
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
        Cancelled where `cancelled` says so before its last step has begun."""
        leave_cores_to_others()  # who asks only samples
        try:
            self._ask(piece)
            while not piece.done.wait(POLL_S if cancelled is not None else None):
                if cancelled is not None and cancelled():
                    break
        finally:
            self._withdraw(piece)
        if piece.error is not None:
            raise piece.error
        if piece.logits is None:
            raise Cancelled
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
        self.patience.close()

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
            piece.is_withdrawn = True
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
                return [piece]
        decodes = [piece for piece in self._pending if piece.is_decode]
        prefills = [piece for piece in self._pending if not piece.is_decode]
        tokens = self.budget.prefill_tokens(len(decodes) or len(self._late(self._last_tokens)))
        if tokens and self.num_layers == 1:
            tokens = max(int(tokens), LEAST_TOKENS)
        return decodes + divide(
            prefills, tokens if decodes else max(tokens, LEAST_TOKENS), self.num_layers
        )

    def _step(self, pieces: Sequence[Piece]) -> None:
        num_prefilled = sum(piece.work(self.num_layers) for piece in pieces if not piece.is_decode)
        began = time.perf_counter()
        try:
            for piece, logits in zip(pieces, self.forward(pieces), strict=True):
                if logits is not None:
                    piece.logits = logits
                    piece.sequence.num_cached = piece.stop
            seconds = time.perf_counter() - began
            self.patience.observe(seconds)
            if pieces[-1].wait_layer is None:  # else it may have waited most of the time
                self._learn(pieces, num_prefilled, seconds)
        except BaseException as error:  # nobody may wait for a thread that has ended
            for piece in pieces:
                piece.error = error
        with self._changed:
            for piece in pieces:
                is_over = piece.logits is not None or piece.error is not None
                if is_over or piece.is_withdrawn:
                    piece.passing = None
                    piece.done.set()
                else:  # there are more layers
                    piece.is_started = False
                    self._pending.append(piece)

    def _learn(self, pieces: Sequence[Piece], num_prefilled: float, seconds: float) -> None:
        num_decoding = sum(piece.is_decode for piece in pieces)
        self._step_s = seconds
        self.budget.observe(num_decoding, num_prefilled, seconds)
        if not num_prefilled:
            num_drafted = sum(len(piece.draft) for piece in pieces)
            self.draft_costs.observe(num_decoding, num_drafted, seconds)
