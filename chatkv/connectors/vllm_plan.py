"""What the two sides of the connector tell each other. Plain values, to be pickled.

vLLM decides in one process (the scheduler's) and computes in others (one worker per GPU or CPU).
Each worker says once what its part of the KV is called (`Shard`); with every step the scheduler
says what is to be loaded and saved (`Plan`). All counts are of whole blocks of vLLM's: block i of a
request holds its tokens [i * block_tokens, (i + 1) * block_tokens).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """One worker's part of the KV, as it lies in the store."""

    namespace: bytes
    layout: str  # KVLayout as JSON
    machine: str  # where its store is
    rates: str = ""  # under which its rates are kept


@dataclass(frozen=True)
class Load:
    """Blocks of a request that are to come from the store in this step."""

    request: str
    salt: str  # who may share its KV; "" for everybody
    ids: array[int]  # the tokens (u32) of all blocks up to the last one that is loaded
    first: int  # block that is loaded first
    block_ids: list[int]  # vLLM's, for the blocks from `first` on


@dataclass(frozen=True)
class Save:
    """Blocks of a request that are computed for certain; with none, its log is merely in use."""

    request: str
    salt: str
    ids: array[int]  # the tokens (u32) of all blocks up to the last one that is saved
    first: int
    block_ids: list[int]
    is_new: bool  # the first that is heard of this request
    is_last: bool = False  # vLLM frees the blocks when the worker says that they are written


@dataclass
class Plan:
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    # The tokens [start, stop) of a prompt, where the step computes them and nothing else.
    computes: tuple[int, int] | None = None
