"""Drafts by a smaller model, which reads what the large one does and is sooner done with it.

It is an engine of its own: it keeps the KV of each conversation while there is room, computes what
several answers want of it in one step, and reads again what it has lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from chatkv.engine.drafts import Draft, Growth
from chatkv.engine.engine import Engine, Preempted
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.engine.sampling import Sampler
from chatkv.engine.sequence import TokenSequence
from chatkv.errors import ContextFull, ModelError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import Dtype, prepare
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import load_weights
from chatkv.paths import Folders

MAX_DRAFT = 8
# More tokens than this, which it has not read yet, are not part of what a draft takes.
_CATCH_UP = 16


@dataclass
class ModelDrafter:
    """A `Drafter` of one answer, which `sampler` draws: drafts are drawn as the answer is.

    engine: the smaller model's; `sequence`: that of the answer, vocab_size: of the large model.
    """

    engine: Engine
    sequence: TokenSequence
    sampler: Sampler
    vocab_size: int
    source: str = field(default="model", init=False)
    most: int = field(default=MAX_DRAFT, init=False)
    share: float = field(default=0.25, init=False)
    adapts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        sequence = self.sequence
        name = f"{sequence.realm}/{sequence.name or id(sequence)}"
        self._own = self.engine.memory.sequence(name, is_shareable=False)

    def expected(self, kind: int) -> float:
        return 0.6

    def outlook(self, ids: Sequence[int], freely: bool = False) -> int | None:
        return 0 if len(ids) + self.most <= self.engine.max_tokens else None

    def propose(self, ids: Sequence[int], count: int, growth: Growth | None = None) -> Draft:
        own, engine = self._own, self.engine
        drawn = []
        try:
            with engine.memory.use(own):
                own.become(ids, min(own.common_prefix(ids), len(ids) - 1))
                if len(ids) - own.num_cached > _CATCH_UP:
                    engine.prefill(own)
                    own.num_cached = len(ids) - 1
                began = time.perf_counter()
                for ahead in range(count):
                    logits = engine.prefill(own)[: self.vocab_size]
                    drawn.append(self.sampler.propose(logits, ahead))
                    own.ids.append(drawn[-1].token)
                seconds = time.perf_counter() - began
        except (ContextFull, Preempted):  # its memory is small: the answer goes on without drafts
            return Draft()
        return Draft([one.token for one in drawn], drawn=drawn, seconds=seconds)


def draft_engine(
    folders: Folders, spec: str, tokenizer: Tokenizer, dtype: Dtype, memory_bytes: int
) -> Engine:
    """The engine of the model `spec` (see `find_model`) on the CPU, to draft for a model with that
    tokenizer. Raises ModelError where its tokens are other ones, or it does not fit."""
    prepared = prepare(find_model(spec, folders.cache), dtype, folders.models)
    check_tokens(Tokenizer.from_prepared(prepared), tokenizer, prepared.name)
    config = prepared.config
    decoder = Decoder(config, load_weights(prepared))
    block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_TOKENS
    num_blocks = memory_bytes // (block_bytes * decoder.dtype.itemsize)
    if not num_blocks:
        raise ModelError(f"there is no memory for the draft model {prepared.name}")
    most = -(-4 * config.max_position // BLOCK_TOKENS)
    pool = BlockPool(config, min(num_blocks, most), decoder.dtype, torch.device("cpu"))
    return Engine(decoder, pool)


def check_tokens(draft: Tokenizer, target: Tokenizer, name: str | Path) -> None:
    """Raises ModelError unless both cut text into the same tokens, with the same ids."""
    if draft.num_ids != target.num_ids:
        raise ModelError(
            f"{name} cannot draft for this model: it has {draft.num_ids} tokens, "
            f"and the model has {target.num_ids}"
        )
    for id in range(target.num_ids):
        if draft.bytes_of(id) != target.bytes_of(id):
            raise ModelError(
                f"{name} cannot draft for this model: its token {id} is {draft.bytes_of(id)!r}, "
                f"and the model's is {target.bytes_of(id)!r}"
            )
