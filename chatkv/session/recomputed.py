"""Whether stored KV is what its model computes of its tokens: some of it computed again, compared.

A digest tells that bytes are as they were written, and headers whose they are; that they were right
when they were written, only this tells. KV that is computed in other pieces differs in rounding,
and a lossy codec changes it: what is far from both is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from chatkv.errors import ModelError, UsageError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.prepared import PreparedModel, prepare
from chatkv.model.weights import TORCH_DTYPES, load_weights
from chatkv.paths import Folders
from chatkv.restore.names import namespace_of
from chatkv.session.predictions import CHUNK_TOKENS, TextOnModel
from chatkv.session.request import ChatRequest, find
from chatkv_store import codec as codecs
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import StoredBlock
from chatkv_store.conversations import Conversations, Session
from chatkv_store.errors import BlockMiss
from chatkv_store.logs import is_use
from chatkv_store.sharing import stored_blocks

# Of the length of a token's keys or values in one layer. Rounding moves them by hundredths, int4 by
# a fifth; KV of other tokens is as far away as it is long.
MAX_ROUNDED, MAX_LOSSY = 0.25, 0.7

Progress = Callable[[str, int, int], None]


@dataclass
class Recomputed:
    """What was compared. `wrong`: blocks, and what is wrong with each; `left_out`: why others could
    not be computed again, by model."""

    num_blocks: int = 0
    wrong: list[tuple[StoredBlock, str]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def recompute(
    folders: Folders,
    store: BlockStore,
    conversations: Conversations,
    sessions: Iterable[Session],
    num_blocks: int,
    on_progress: Progress = lambda stage, done, total: None,
) -> Recomputed:
    """Compute up to num_blocks of the blocks that `sessions` find once more, and compare. Which
    ones is drawn, the same way each time. What cannot be read is no matter of this."""
    finders: dict[bytes, tuple[Session, StoredBlock]] = {}
    for session in sessions:
        for block in stored_blocks(store, conversations, session):
            finders.setdefault(block.key, (session, block))
    drawn = random.Random(0).sample(sorted(finders), min(num_blocks, len(finders)))
    by_session: dict[str, tuple[Session, list[StoredBlock]]] = {}
    for key in drawn:
        session, block = finders[key]
        by_session.setdefault(session.id, (session, []))[1].append(block)
    found = Recomputed()
    loaded: tuple[PreparedModel, Decoder] | None = None
    for session, blocks in sorted(by_session.values(), key=lambda one: one[0].namespace or ""):
        try:
            model = _model_of(folders, conversations, session)
        except (ModelError, UsageError) as error:
            found.left_out[session.model] = str(error)
            continue
        if loaded is None or loaded[0] != model:
            loaded = model, Decoder(model.config, load_weights(model))
        ids = conversations.token_log(session.id)
        ids = ids[: max(block.start + block.num_tokens for block in blocks)]
        text = TextOnModel(loaded[1], ids)
        for start in range(0, len(ids), CHUNK_TOKENS):
            text.compute(start, min(start + CHUNK_TOKENS, len(ids)))
            on_progress("computing KV again", found.num_blocks, len(drawn))
        for block in blocks:
            wrong = _wrong(store, block, text)
            found.num_blocks += 1
            if wrong is not None:
                found.wrong.append((block, wrong))
    return found


def _model_of(folders: Folders, conversations: Conversations, session: Session) -> PreparedModel:
    """The model whose KV a session has. Raises ModelError and UsageError where it is not here."""
    if is_use(session):
        raise ModelError("another engine has computed it")
    held = find(conversations, ChatRequest(resume=session.id))
    if held.dtype == "auto":
        raise UsageError("it was never held here")
    weights = None if held.weights == "auto" or held.weights == "full" else held.weights
    files = find_model(held.model, folders.cache)
    model = prepare(files, held.dtype, folders.models, quantised=weights)
    owner = session.settings.get("owner", "")
    if namespace_of(model, held.kv_codec, owner).hex() != session.namespace:
        raise ModelError("its files are others than those that computed this KV")
    return model


def _wrong(store: BlockStore, block: StoredBlock, text: TextOnModel) -> str | None:
    """Where a block's KV is not that of its tokens, None where it is nowhere far from it."""
    layout, tokens = block.header.layout, slice(block.start, block.start + block.num_tokens)
    computed = text.kv[:, :, :, tokens].float()
    kind = np.uint32 if layout.dtype == "float32" else np.uint16
    bits = np.empty((*computed.shape,), kind)
    try:
        for group in range(layout.num_values):
            layers = layout.value_layers(group)
            store.read(block, group, bits[layers.start : layers.stop])
    except BlockMiss:
        return None  # it is said elsewhere, and would be computed again
    stored = torch.from_numpy(bits).view(TORCH_DTYPES[layout.dtype]).float()
    apart = (stored - computed).norm(dim=(2, 4)) / computed.norm(dim=(2, 4)).clamp_min(1e-6)
    limit = MAX_LOSSY if codecs.is_quantised(block.header.codec) else MAX_ROUNDED
    apart = apart.nan_to_num(nan=float("inf"))
    if float(apart.max()) <= limit:
        return None
    layer, part, token = np.unravel_index(int(apart.argmax()), apart.shape)
    name = ("keys", "values")[part]
    return (
        f"the {name} of layer {layer} are not those of token {block.start + token}: "
        f"{float(apart.max()):.0%} away"
    )
