"""An engine on a device with memory of its own: the ledger first, then weights, then the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from chatkv.engine.engine import Engine
from chatkv.engine.ledger import Ledger, fit, saved_bytes
from chatkv.engine.paged import PagedPool
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.runner import PagedRunner
from chatkv.model.config import ModelConfig
from chatkv.model.decoder import Decoder
from chatkv.model.weights import Weight, dense_weight


def engine_on(
    device: torch.device,
    config: ModelConfig,
    weights: Mapping[str, Weight],
    free_bytes: int,
    most_tokens: int,
    staging: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Engine, Ledger]:
    """An engine with as much KV as fits into free_bytes beside the rest, at most most_tokens, and
    what it takes. Each tensor goes from its file's mapping to the device by itself. Quantised
    weights are kept as they are, and made dense for the moment where many rows want them.

    on_progress(done, total) is told of each layer. Raises ModelError, with nothing allocated,
    where the model does not fit.
    """
    dtype = dense_weight(weights["model.norm.weight"]).dtype
    most_blocks = -(-most_tokens // BLOCK_TOKENS)
    saved = saved_bytes(config, weights, dtype.itemsize)
    num_blocks, ledger = fit(config, dtype.itemsize, free_bytes, most_blocks, staging, saved)
    max_position = min(config.max_position, num_blocks * BLOCK_TOKENS)
    decoder = Decoder(
        config,
        weights,
        max_position,
        device,
        fused=True,
        on_progress=on_progress,
    )
    engine = Engine(decoder, PagedPool(config, num_blocks, dtype, device))
    assert isinstance(engine.runner, PagedRunner)
    engine.runner.prepare()
    return engine, ledger
