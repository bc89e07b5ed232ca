"""Taking a conversation out of the stores into an archive, and bringing one back in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chatkv_store import importing
from chatkv_store.archive import ArchiveReader, ArchiveWriter
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import NewBlock, StoredBlock
from chatkv_store.conversations import Conversations, Session
from chatkv_store.errors import BlockMiss, StoreFull
from chatkv_store.keys import ID_BYTES, unpack_ids
from chatkv_store.saving import Encoded, encode
from chatkv_store.sharing import known_layouts, stored_blocks

COMMIT_BYTES = 8 << 20


@dataclass(frozen=True)
class Exported:
    num_blocks: int
    num_tokens: int  # whose KV is in the archive
    file_bytes: int


@dataclass(frozen=True)
class Imported:
    session: Session
    is_renamed: bool  # its id, or that of a turn, was taken
    num_blocks: int  # of KV in the archive
    written_blocks: int  # the others were stored already, or refused
    refusal: str | None  # why KV was not stored


def export_session(
    conversations: Conversations, blocks: BlockStore | None, session: Session, path: Path
) -> Exported:
    """Write the session into a new archive at `path`, readable by its owner alone.

    KV that is missing or damaged is left out. Without `blocks` the text alone is taken. Raises
    StoreError, and OSError where the file cannot be written; then there is no file at `path`.
    """
    partial = path.with_name(path.name + ".partial")
    layout = None
    if blocks is not None and session.namespace:
        layout = known_layouts(blocks).get(bytes.fromhex(session.namespace))
    file = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    try:
        with file:
            writer = ArchiveWriter(file)
            writer.add_conversation(conversations.export_text(session.id))
            manifest = {"session": session.id, "model": session.model}
            num_blocks = num_tokens = 0
            if blocks is not None and layout is not None:
                found = stored_blocks(blocks, conversations, session)
                num_blocks, num_tokens = writer.add_blocks(_encoded(blocks, found))
                writer.finish(
                    {
                        **manifest,
                        "namespace": session.namespace,
                        "layout": json.loads(layout.to_json()),
                        "kv": {"blocks": num_blocks, "tokens": num_tokens},
                    }
                )
            else:
                writer.finish({**manifest, "namespace": session.namespace, "kv": None})
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return Exported(num_blocks, num_tokens, path.stat().st_size)


def import_session(
    conversations: Conversations,
    blocks: BlockStore | None,
    path: Path,
) -> Imported:
    """Verify the archive at `path`, all of it, and only then store it: the text, then its KV.

    `blocks` None takes the text alone. KV for which there is no room is left out, which `refusal`
    says. Raises StoreDamaged or StoreVersionError where it does not verify, with nothing stored.
    """
    with ArchiveReader(path) as archive:
        values = archive.conversation()
        importing.check(values, str(path))
        token_ids = [
            token for turn in values["turns"] for token in (*turn["prompt_ids"], *turn["reply_ids"])
        ]
        manifest = archive.manifest
        if blocks is not None:
            archive.verify_kv(token_ids)
        session = conversations.import_text(values, str(path))
        written, refusal = 0, None
        if blocks is not None and manifest.namespace is not None and manifest.layout is not None:
            if manifest.namespace not in blocks.namespaces():
                info = {"model": manifest.model, "layout": manifest.layout.to_json()}
                blocks.register(manifest.namespace, info)
            try:
                for batch in _batches(archive.blocks()):
                    written += blocks.put_encoded(batch).written
            except StoreFull as error:
                refusal = str(error)
        is_renamed = session.id != manifest.session
        return Imported(session, is_renamed, manifest.num_blocks, written, refusal)


def _encoded(store: BlockStore, found: list[StoredBlock]) -> Iterator[Encoded]:
    for block in found:
        with suppress(BlockMiss):
            if block.num_tokens == block.header.num_tokens:
                yield Encoded(block.key, block.header, store.payloads(block))
            elif (part := _front(store, block)) is not None:
                yield part


def _front(store: BlockStore, block: StoredBlock) -> Encoded | None:
    """The block cut to the tokens of this session: the others are words of another conversation.

    None where its codec loses something, which must not be done twice.
    """
    import numpy as np

    from chatkv_store.codec import by_id

    header = block.header
    codec = by_id(header.codec)
    if codec is None or codec.family != "lossless":
        return None
    values = []
    for group in range(header.layout.num_values):
        shape = header.layout.value_shape(group, block.num_tokens)
        out = np.empty(shape, header.layout.bits_dtype)
        store.read(block, group, out)
        values.append(out)
    ids = unpack_ids(header.ids[: block.num_tokens * ID_BYTES])
    new = NewBlock(header.parent, ids, values, block.start)
    return encode(header.namespace, header.layout, new, codec.name)


def _batches(blocks: Iterator[Encoded]) -> Iterator[list[Encoded]]:
    batch: list[Encoded] = []
    for block in blocks:
        batch.append(block)
        if sum(one.header.num_payload_bytes for one in batch) >= COMMIT_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch
