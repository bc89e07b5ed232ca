"""The side of the connector that decides: what of a request is stored, and what is to be saved.

Runs in vLLM's scheduler. A request that comes is looked for in the store, in the parts of all
workers; what all of them have is loaded. Blocks are saved when they are computed *for certain*: a
step in which a block could not be loaded computes on garbage, in every worker, and that is known
only when its results have come. So a block is saved in a step after the one that computed it, and
what the last step of a request computed after its end, while vLLM keeps its blocks (`finished`).
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatkv.connectors.vllm_plan import Load, Plan, Save, Shard
from chatkv.connectors.vllm_rates import Rates, seconds_of
from chatkv_store.errors import StoreError
from chatkv_store.layout import KVLayout

if TYPE_CHECKING:
    from pathlib import Path

    from chatkv_store.blocks import BlockStore

log = logging.getLogger("vllm.chatkv")

BlockIds = Callable[[str], Sequence[int] | None]  # request -> its blocks, None: not in this step


@dataclass
class _Tracked:
    """A request that vLLM computes."""

    request: Any
    num_stored: int  # blocks that were found when it came
    num_handed: int  # blocks that are stored or on their way there
    load_from: int | None = None  # the first block to load in the next step
    is_noted: bool = False
    # Tokens that were computed at the start of the last few steps.
    computed: deque[int] = field(default_factory=deque)


class SchedulerSide:
    """`steps_ahead`: how many steps may be on their way when the next one is planned (1: none).
    `costs`: where the workers keep their rates; None: whatever is stored is loaded."""

    def __init__(
        self,
        store: BlockStore | None,
        block_tokens: int,
        steps_ahead: int = 1,
        costs: Path | None = None,
    ) -> None:
        self._store = store
        self._block_tokens = block_tokens
        self._steps_ahead = steps_ahead
        self._costs = costs
        self._shards: list[tuple[bytes, KVLayout]] = []
        self._rates: list[Rates] = []
        self._found: dict[str, int] = {}  # blocks by request, from the last look
        self._skipped: set[str] = set()  # requests whose blocks are not worth loading
        self._tracked: dict[str, _Tracked] = {}
        self._last_saves: list[Save] = []

    def set_shards(self, shards: Iterable[Shard]) -> None:
        """What the workers call their parts; without them nothing is found or saved."""
        found = list(shards)
        self._shards = [(one.namespace, KVLayout.from_json(one.layout)) for one in found]
        if self._costs is not None:
            self._rates = [Rates(self._costs, one.rates) for one in found]

    def matched(self, request: Any, num_computed: int) -> int:
        """Tokens behind the first `num_computed` that can be loaded. Changes nothing.

        The last token is never among them: its logits are needed.
        """
        if not self._can_keep(request):
            return 0
        usable = (request.num_tokens - 1) // self._block_tokens * self._block_tokens
        num_blocks = self._stored_blocks(request, usable)
        self._found[request.request_id] = num_blocks
        self._skipped.discard(request.request_id)
        stop = num_blocks * self._block_tokens
        if stop > num_computed and not self._is_worth_it(num_computed, stop):
            self._skipped.add(request.request_id)
            return 0
        return max(0, stop - num_computed)

    def admitted(self, request: Any, num_external: int) -> None:
        """vLLM computes the request from the next step on, and loads `num_external` tokens."""
        if not self._can_keep(request):
            return
        stored = self._found.pop(request.request_id, 0)
        if request.request_id in self._skipped:
            self._skip(request)
        tracked = _Tracked(request, stored, stored)
        if num_external > 0:
            tracked.load_from = stored - num_external // self._block_tokens
        self._tracked[request.request_id] = tracked

    def plan(self, block_ids: BlockIds, num_scheduled: Mapping[str, int] | None = None) -> Plan:
        """What the next step loads and saves. num_scheduled: the tokens of requests in it."""
        plan = Plan(saves=self._last_saves)
        self._last_saves = []
        for request_id, tracked in self._tracked.items():
            blocks = block_ids(request_id)
            if blocks is None:
                continue
            if tracked.load_from is not None:
                plan.loads.append(self._load(tracked, blocks))
                tracked.load_from = None
            num_sure = self._sure_blocks(tracked)
            if num_sure > tracked.num_handed or (tracked.num_stored and not tracked.is_noted):
                plan.saves.append(self._save(tracked, blocks, max(num_sure, tracked.num_handed)))
        plan.computes = self._alone(num_scheduled or {}) if not plan.loads else None
        return plan

    def finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """The request has ended; True where vLLM must keep its blocks until they are saved."""
        self._found.pop(request.request_id, None)
        self._skipped.discard(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or getattr(request.status, "name", "") == "FINISHED_ABORTED":
            return False  # its last step may still be on its way
        sure = min(request.num_computed_tokens - _in_flight(request), request.num_tokens - 1)
        num_sure = min(sure // self._block_tokens, len(block_ids))
        if num_sure <= tracked.num_stored:
            return False
        # Once more from the first: what the writer had to drop on the way is still there.
        tracked.num_handed = tracked.num_stored
        self._last_saves.append(self._save(tracked, block_ids, num_sure, is_last=True))
        return True

    def failed(self) -> None:
        """Blocks could not be loaded, and vLLM has set back the requests that needed them."""
        for tracked in self._tracked.values():
            computed = tracked.request.num_computed_tokens // self._block_tokens
            tracked.num_handed = min(tracked.num_handed, computed)
            tracked.num_stored = min(tracked.num_stored, computed)
            tracked.computed.clear()

    def _is_worth_it(self, start: int, stop: int) -> bool:
        """Whether loading tokens [start, stop) is expected to be faster than computing them."""
        expected = seconds_of(self._rates, start, stop)
        return expected is None or expected[0] < expected[1]

    def _skip(self, request: Any) -> None:
        """What is stored of a request is computed, since that seems to be faster."""
        self._skipped.discard(request.request_id)
        for rates in self._rates:
            rates.skipped()
        log.info("chatkv: stored KV of %s is computed again: that seems faster", request.request_id)

    def _alone(self, num_scheduled: Mapping[str, int]) -> tuple[int, int] | None:
        """What a step computes that has one request."""
        if len(num_scheduled) != 1:
            return None
        ((request_id, count),) = num_scheduled.items()
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return None
        start = int(tracked.request.num_computed_tokens)
        return start, start + count

    def _can_keep(self, request: Any) -> bool:
        """KV that depends on more than the weights and the ids of tokens is nobody else's."""
        return (
            self._store is not None
            and bool(self._shards)
            and request.lora_request is None
            and not request.mm_features
            and request.prompt_embeds is None
            and request.pooling_params is None
            and not getattr(request, "resumable", False)
        )

    def _stored_blocks(self, request: Any, num_tokens: int) -> int:
        """Blocks of the first `num_tokens` tokens that every worker has."""
        assert self._store is not None
        ids = request.all_token_ids[:num_tokens]
        for namespace, layout in self._shards:
            if not ids:
                break
            space = namespace_for(namespace, request.cache_salt or "")
            try:
                found = self._store.match(space, ids, layout).num_tokens
            except StoreError:
                return 0
            ids = ids[: found // self._block_tokens * self._block_tokens]
        return len(ids) // self._block_tokens

    def _sure_blocks(self, tracked: _Tracked) -> int:
        """Whole blocks that steps have computed whose results have come."""
        computed = tracked.computed
        # What vLLM had in its own cache when the request came may be computed in this very step.
        computed.append(tracked.request.num_computed_tokens if computed else 0)
        if len(computed) < self._steps_ahead:
            return 0
        while len(computed) > self._steps_ahead:
            computed.popleft()
        return min(computed[0], int(tracked.request.num_computed_tokens)) // self._block_tokens

    def _load(self, tracked: _Tracked, blocks: Sequence[int]) -> Load:
        first, end = tracked.load_from, tracked.num_stored
        assert first is not None
        return Load(
            tracked.request.request_id,
            tracked.request.cache_salt or "",
            self._ids(tracked, end),
            first,
            list(blocks[first:end]),
        )

    def _save(
        self, tracked: _Tracked, blocks: Sequence[int], end: int, is_last: bool = False
    ) -> Save:
        first, tracked.num_handed = tracked.num_handed, end
        is_new, tracked.is_noted = not tracked.is_noted, True
        return Save(
            tracked.request.request_id,
            tracked.request.cache_salt or "",
            self._ids(tracked, end),
            first,
            list(blocks[first:end]),
            is_new,
            is_last,
        )

    def _ids(self, tracked: _Tracked, num_blocks: int) -> array[int]:
        return array("I", tracked.request.all_token_ids[: num_blocks * self._block_tokens])


def namespace_for(namespace: bytes, salt: str) -> bytes:
    """Where the KV of requests with this salt lies: KV of two salts never meets."""
    if not salt:
        return namespace
    return hashlib.sha256(namespace + salt.encode("utf-8", "replace")).digest()[: len(namespace)]


def shards_in_order(found: Mapping[tuple[int, int], Shard], machine: str) -> list[Shard]:
    """The workers' parts by rank. Those of workers on other machines cannot be looked for: then
    there are none."""
    shards = [found[rank] for rank in sorted(found)]
    return shards if all(one.machine == machine for one in shards) else []


def _in_flight(request: Any) -> int:
    return int(getattr(request, "num_in_flight_tokens", 0))
