"""Taking tokens out of a sequence whose KV stays (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import torch

from chatkv.engine.pool import BlockPool
from chatkv.engine.sequence import TokenSequence
from chatkv.model.rope import inverse_frequencies
from chatkv_kernels.rerotate import rerotate, turn


def take_out(pool: BlockPool, sequence: TokenSequence, start: int, stop: int) -> None:
    """Take tokens [start, stop) out of the sequence: the KV behind them moves up, keys turned to
    their new positions.

    That KV was computed on what has left, so from `start` on it is approximate, and a key that
    moves a second time is rounded a second time. The sequence is in use.
    """
    assert start <= stop <= sequence.num_cached
    cos, sin = turn(torch.tensor([start - stop]), inverse_frequencies(pool.config)[0])
    first = sequence.run.first_slot
    source = torch.arange(first + stop, first + sequence.num_cached)
    target = source + (start - stop)
    keys = pool.kv[:, 0][None]  # to the kernel: the one block of a pool
    rerotate(keys, keys, source, target, cos, sin)
    values = pool.kv[:, 1]
    values[:, :, target] = values[:, :, source]
    num_cached = sequence.num_cached - (stop - start)
    sequence.become([*sequence.ids[:start], *sequence.ids[stop:]], num_cached)
    sequence.exact_until = start
