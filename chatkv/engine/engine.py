"""From token ids to the next token: chunked prefill and decode over the block pool.

Knows sequences of ids and their KV. Does not know text, sessions or disks: whoever restores a
sequence writes its KV into the pool and moves `num_cached`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from chatkv.engine.pool import BLOCK_TOKENS, BlockPool, Run, RunSpan
from chatkv.engine.sampling import Sampler
from chatkv.errors import ContextFull
from chatkv.model.decoder import Decoder

# Tokens per prefill chunk: the unit of progress and of cancelling. 256 lost 10% of the rate on
# two cores, 1024 won 2% and doubled the wait for Ctrl-C.
CHUNK_TOKENS = 512


class Arriving(Protocol):
    """KV that others are putting into a sequence's run while it is prefilled."""

    def next_gap(self, position: int, total: int, limit: int) -> tuple[int, int]:
        """The next tokens to compute, [start, stop): start >= position, all before start have
        their KV; at most `limit` tokens, at least the last of `total`."""


class Cancelled(Exception):
    """The caller's `cancelled` said so; the sequence keeps what is computed."""


@dataclass(eq=False)
class TokenSequence:
    """The token ids of one conversation, and how many of them have their KV in the pool.

    Invariant: KV of ids[:num_cached] is in `run`; num_cached <= len(ids).
    """

    ids: list[int] = field(default_factory=list)
    run: Run = field(default_factory=Run)
    num_cached: int = 0

    def common_prefix(self, ids: Sequence[int]) -> int:
        """How many leading tokens of `ids` have their KV here."""
        cached = self.ids[: self.num_cached]
        if cached == ids[: self.num_cached]:
            return self.num_cached
        pairs = enumerate(zip(cached, ids, strict=False))
        return next(
            (at for at, (mine, theirs) in pairs if mine != theirs), min(len(ids), len(cached))
        )

    def become(self, ids: Sequence[int], num_cached: int) -> None:
        """Hold `ids`, the first num_cached of which (at most `common_prefix`) keep their KV."""
        self.ids, self.num_cached = list(ids), num_cached


@dataclass
class Engine:
    """One decoder and its block pool."""

    decoder: Decoder
    pool: BlockPool

    @property
    def max_tokens(self) -> int:
        """The longest sequence that can be computed."""
        return min(self.decoder.max_position, self.pool.num_blocks * BLOCK_TOKENS)

    def prefill(
        self,
        sequence: TokenSequence,
        on_progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        arriving: Arriving | None = None,
    ) -> Tensor:
        """Compute every id that has no KV yet; logits after the last one, [vocab_size] float32.

        What `arriving` brings meanwhile is skipped.

        on_progress(done, total) is told after every chunk. Raises Cancelled between chunks and
        ContextFull before anything is computed.
        """
        total = len(sequence.ids)
        if total > self.max_tokens:
            raise ContextFull(
                f"the conversation has {total} tokens, and the model's context ends at "
                f"{self.max_tokens}: start a new session or fork an earlier turn"
            )
        assert sequence.num_cached < total, "prefill needs at least one token to compute"
        self.pool.reserve(sequence.run, total)
        logits = None
        while sequence.num_cached < total:
            if cancelled is not None and cancelled():
                raise Cancelled
            stop = min(sequence.num_cached + CHUNK_TOKENS, total)
            if arriving is not None:
                gap = arriving.next_gap(sequence.num_cached, total, CHUNK_TOKENS)
                sequence.num_cached, stop = gap
            logits = self._forward(sequence, stop)
            if on_progress is not None:
                on_progress(stop, total)
        assert logits is not None
        return logits

    def decode(
        self,
        sequence: TokenSequence,
        logits: Tensor,
        sampler: Sampler,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Sample tokens one by one, each appended to the sequence and yielded with the logits it
        was drawn from. Ends after a stop id, max_new_tokens, a full context or a cancel; the last
        token yielded has no KV yet.
        """
        for count in range(max_new_tokens):
            token = sampler.pick(logits)
            sequence.ids.append(token)
            yield token, logits
            last = token in stop_ids or count + 1 == max_new_tokens
            if last or len(sequence.ids) >= self.max_tokens or (cancelled and cancelled()):
                return
            self.pool.reserve(sequence.run, len(sequence.ids))
            logits = self._forward(sequence, len(sequence.ids))

    def _forward(self, sequence: TokenSequence, stop: int) -> Tensor:
        start = sequence.num_cached
        ids = torch.tensor(sequence.ids[start:stop], device=self.decoder.device)
        span = RunSpan(self.pool, sequence.run, start, stop - start)
        logits = self.decoder.forward(ids, [span])[0]
        sequence.num_cached = stop
        return logits
