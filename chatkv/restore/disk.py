"""The disk tier of a process: one store and one writer, whichever models are loaded.

LMDB does not let a process open an environment twice, so all models of a process share it.
"""

from __future__ import annotations

from contextlib import ExitStack

from chatkv.paths import Folders
from chatkv.restore.cost import CostFile, cost_key
from chatkv_store.blocks import BlockStore
from chatkv_store.budget import default_budget
from chatkv_store.conversations import Conversations
from chatkv_store.errors import StoreError
from chatkv_store.writer import BlockWriter


class Disk:
    """`store` and `writer`, both None where the disk cannot be used: a chat goes on without it, and
    `notices` say so."""

    def __init__(self, folders: Folders, conversations: Conversations) -> None:
        self.notices: list[str] = []
        self.store: BlockStore | None = None
        self.writer: BlockWriter | None = None
        self._costs = CostFile(folders.costs)
        self._open = ExitStack()
        try:
            store = BlockStore(
                folders.kv,
                budget=default_budget(folders.kv),
                conversations=conversations,
                replace_damaged=True,
                prefill_rates=self._prefill_rates,
            )
        except (StoreError, OSError) as error:
            self.notices.append(f"KV is not kept: {error}")
            return
        self.store = store
        self._open.callback(store.close)
        if store.replaced:
            self.notices.append(f"the KV cache was damaged and starts empty: {store.replaced}")
        self.writer = BlockWriter(store)
        self._open.callback(self.writer.close)

    def close(self) -> None:
        """Write what is queued and close the store."""
        self._open.close()

    def _prefill_rates(self, namespace: bytes) -> tuple[float, float]:
        """What prefill of a namespace's model takes here, so that the store knows what to keep."""
        known = [self._costs.load(cost_key(namespace, device)) for device in ("cuda", "cpu")]
        cost = max(known, key=lambda one: one.num_observations)
        return cost.prefill_s_per_token, cost.prefill_s_per_token_pair
