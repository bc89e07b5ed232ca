"""Blocks as the store's callers know them: to be stored, found, and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv_store.header import BlockHeader

if TYPE_CHECKING:
    from chatkv_store.payloads import Bits, Floats


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored block of which the first `num_tokens` tokens are wanted, at position `start`."""

    key: bytes
    start: int
    num_tokens: int
    header: BlockHeader


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some token ids."""

    blocks: list[StoredBlock]
    num_tokens: int
    miss: str | None  # why it ends before the last token; None where it does not


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be stored.

    `parent` is the key of the block before it, or the namespace. `values` holds one array of
    `KVLayout.value_shape(group, len(token_ids))` per value, or makes it when asked.

    Lossy codecs quantise keys as they are before the rotary embedding, so they need to know the
    position of the first token and the embedding's inverse frequencies, float32 [head_dim / 2].
    Who can encode itself gives `encoded`, the payload of each value in the codec that the block is
    stored with, and `values` are not asked.
    """

    parent: bytes
    token_ids: Sequence[int]
    values: Sequence[Bits] | Callable[[int], Bits]
    start: int = 0
    inverse_frequencies: Floats | None = None
    encoded: Callable[[int], bytes] | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    num_blocks: int  # decoded
    num_bytes: int  # payload bytes read
    miss: str | None  # why the block after them could not be used


@dataclass(frozen=True, slots=True)
class PutResult:
    written: int  # blocks
    skipped: int  # blocks that were stored already
    num_bytes: int  # payload bytes written
