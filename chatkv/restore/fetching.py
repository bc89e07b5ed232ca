"""Fetching the KV of one engine's sequences from a prefill worker: to where, and until when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from chatkv.engine.engine import Engine
from chatkv.engine.pool import BLOCK_TOKENS
from chatkv.engine.scheduler import Cancelled
from chatkv.engine.sequence import TokenSequence
from chatkv.restore.plan import Remote, Situation
from chatkv.restore.prefill_worker import Offer
from chatkv.restore.remote import Fetched, RemotePrefill
from chatkv.restore.saver import DiskTier, Saver
from chatkv.restore.staging import Reach
from chatkv.restore.taking import Bits
from chatkv_store.chain import StoredBlock
from chatkv_store.errors import StoreError
from chatkv_store.layout import KVLayout
from chatkv_store.loader import default_threads, load_blocks


@dataclass(frozen=True)
class Fetching:
    """What `Restorer` needs of a prefill worker."""

    remote: RemotePrefill
    engine: Engine
    layout: KVLayout
    reach: Reach
    disk: DiskTier | None
    saver: Saver | None

    def offer(
        self, situation: Situation, load_s_per_token: float
    ) -> tuple[Offer | None, str | None]:
        """What the worker offers for what is neither in the pool nor on disk; or why nothing. The
        last token is always computed here, since its logits are wanted."""
        start, stop = situation.in_pool + situation.loadable, situation.total - 1
        return self.remote.offer(start, stop, load_s_per_token if self._shares_store else None)

    def there(self, offer: Offer) -> Remote:
        """Beside answers, a step's prefill may take as long as lengthens it by so much at most, so
        that is its share of the time here."""
        most = self.engine.scheduler.budget.max_stall
        is_alone = self.engine.memory.num_in_use <= 1
        return Remote(offer.seconds, 1.0 if is_alone else most / (most - 1))

    def fetch(
        self,
        sequence: TokenSequence,
        offer: Offer,
        load_before: Callable[[], int],
        on_progress: Callable[[int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> Fetched:
        """Bring what was offered into the sequence's run. load_before() brings what lies before
        it, and tells how many tokens have their KV then. Raises Cancelled."""

        def put(group: int, start: int, bits: Bits) -> None:
            self.reach.put(sequence.run, group, start, bits)

        def load(first: int, stop: int) -> int:
            return self._load_shared(sequence, first, stop)

        def ready(num_tokens: int) -> None:
            if on_progress is not None:
                on_progress(num_tokens, offer.stop)

        def is_cancelled() -> bool:
            return cancelled is not None and cancelled()

        fetched = self.remote.fetch(
            offer,
            sequence.ids[: offer.stop],
            sequence.name or "",
            put,
            load if offer.way.through_store else None,
            load_before,
            ready,
            lambda: is_cancelled() or self.engine.memory.room.must_give_way(sequence),
        )
        sequence.num_cached = fetched.num_cached
        if is_cancelled():
            raise Cancelled
        return fetched

    @property
    def _shares_store(self) -> bool:
        """Whether KV may come through the sequences' store: not where it is changed there."""
        return self.disk is not None and self.disk.namespace == self.remote.namespace

    def _load_shared(self, sequence: TokenSequence, first: int, stop: int) -> int:
        """Load blocks [first, stop), which another process has just stored; how many tokens. What
        lies before them need not be stored: their keys follow from the ids."""
        assert self.disk is not None and self.saver is not None
        store, ids = self.disk.store, sequence.ids[: stop * BLOCK_TOKENS]
        into = self.reach.destination(sequence.run)
        try:
            found = store.locate(self.disk.namespace, ids, self.layout)[first:stop]
            blocks = [one for one in takewhile(_is_whole, found) if one is not None]
            done = load_blocks(store, blocks, self.layout, into, default_threads())
        except StoreError:
            return 0
        sound = blocks[: done.num_tokens_ok // BLOCK_TOKENS]
        self.saver.stored(sequence, (block.key for block in sound))
        return done.num_tokens_ok


def _is_whole(block: StoredBlock | None) -> bool:
    return block is not None and block.num_tokens == BLOCK_TOKENS
