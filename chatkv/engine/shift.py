"""Taking tokens out of a sequence whose KV stays (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

import torch

from chatkv.engine.pool import Pool
from chatkv.engine.sequence import TokenSequence
from chatkv.model.rope import inverse_frequencies
from chatkv_kernels.rerotate import rerotate, turn


def take_out(pool: Pool, sequence: TokenSequence, start: int, stop: int) -> None:
    """Take tokens [start, stop) out of the sequence: the KV behind them moves up, keys turned to
    their new positions.

    That KV was computed on what has left, so from `start` on it is approximate, and a key that
    moves a second time is rounded a second time. The sequence is in use. Raises ContextFull where
    it shares this KV, and there is no room for its own.
    """
    assert start <= stop <= sequence.num_cached
    cos, sin = turn(torch.tensor([start - stop]), inverse_frequencies(pool.config)[0])
    run, num_cached = sequence.run, sequence.num_cached - (stop - start)
    pool.reserve(run, sequence.num_cached, num_kept=start)
    source = pool.slot_index(run, stop, sequence.num_cached)
    target = pool.slot_index(run, start, num_cached)
    keys, values = pool.blocks[:, :, 0], pool.blocks[:, :, 1]
    rerotate(keys, keys, source, target, cos.to(pool.device), sin.to(pool.device))
    block_tokens = values.shape[3]
    moved = values[source // block_tokens, :, :, source % block_tokens]
    values[target // block_tokens, :, :, target % block_tokens] = moved
    sequence.become([*sequence.ids[:start], *sequence.ids[stop:]], num_cached)
    sequence.exact_until = start
