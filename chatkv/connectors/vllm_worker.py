"""The side of the connector that computes: it brings blocks into vLLM's KV, and takes them out.

Loading goes layer by layer beside the step: attention to a layer waits for that layer alone. A
block that is missing or damaged is reported, with all of its request behind it, and computed again.
Saving copies the blocks and leaves the rest to the store's writer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from chatkv.connectors.vllm_identity import Kept
from chatkv.connectors.vllm_plan import Load, Plan, Save
from chatkv.connectors.vllm_rates import Rates
from chatkv.connectors.vllm_scheduler import namespace_for
from chatkv.connectors.vllm_tensors import Blocks, KVTensors, Step
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import NewBlock, StoredBlock
from chatkv_store.errors import StoreError
from chatkv_store.keys import chain_keys
from chatkv_store.loader import LoadResult, default_threads, load_blocks
from chatkv_store.uses import Uses
from chatkv_store.writer import BlockWriter

_AT_ONCE = 4  # blocks of a request that has ended in one commit

log = logging.getLogger("vllm.chatkv")  # below vLLM's own, whose settings it follows


@dataclass
class _Loading:
    """A load that is under way; `groups` values of every block have come."""

    load: Load
    blocks: list[StoredBlock]
    is_alone: bool  # in its step
    groups: int = 0
    failed: set[int] = field(default_factory=set)  # vLLM's blocks that will not come
    is_over: bool = False


class WorkerSide:
    """Loads and saves for one worker, whose KV is called `kept`, and measures what that takes."""

    def __init__(
        self,
        store: BlockStore,
        writer: BlockWriter,
        tensors: KVTensors,
        kept: Kept,
        rates: Rates | None = None,
    ) -> None:
        self._store, self._writer = store, writer
        self._tensors, self._kept, self._rates = tensors, kept, rates
        self._step: Step | None = None
        self._uses = Uses(store)
        self._changed = threading.Condition()
        self._loading: list[_Loading] = []
        self._finished: set[str] = set()
        self._registered: set[bytes] = set()
        writer.call(use_every_core)

    def begin(self) -> None:
        """A step begins."""
        self._note_step()
        self._step = self._tensors.step()

    def start(self, plan: Plan) -> None:
        """Begin the loads of a step."""
        threads = max(1, default_threads() // max(1, len(plan.loads)))
        for load in plan.loads:
            loading = _Loading(load, self._stored(load), is_alone=len(plan.loads) == 1)
            self._loading.append(loading)
            into = self._tensors.destination(load.block_ids, load.first)
            task = partial(self._run, loading, into, threads)
            threading.Thread(target=task, name="kv-load", daemon=True).start()

    def wait_for(self, layer: str) -> None:
        """Wait until the layer is in place for all loads of the step, or will not come."""
        index = self._tensors.layer_of.get(layer)
        if index is None or not self._loading:
            return
        needed = index // self._tensors.layout.layers_per_value + 1
        with self._changed:
            self._changed.wait_for(
                lambda: all(one.is_over or one.groups >= needed for one in self._loading)
            )

    def save(self, plan: Plan) -> None:
        """Copy what is to be saved and hand it to the writer; waits for no disk. The blocks of a
        request that has ended are vLLM's no more until they are written, and need no copy."""
        if self._step is not None:
            self._step.end(plan.computes)
        for save in plan.saves:
            if save.is_last:
                self._writer.call(partial(self._write, save))
            else:
                self._hand_over(save)

    def take_failed(self) -> set[int]:
        """vLLM's blocks that could not be loaded in this step; waits for what is still loading."""
        with self._changed:
            self._changed.wait_for(lambda: all(one.is_over for one in self._loading))
        failed = set().union(*(one.failed for one in self._loading))
        self._loading = []
        return failed

    def _note_step(self) -> None:
        """Learn from the last step, by now done."""
        step, self._step = self._step, None
        if step is not None and step.computed is not None and self._rates is not None:
            record = partial(self._rates.computed, *step.computed, step.seconds)
            self._writer.call(record)

    def take_finished(self) -> set[str]:
        """Requests that have ended and whose blocks were written since the last call."""
        with self._changed:
            finished, self._finished = self._finished, set()
        return finished

    def _stored(self, load: Load) -> list[StoredBlock]:
        """The blocks to load, up to the first that has gone since they were found."""
        layout = self._tensors.layout
        space = namespace_for(self._kept.namespace, load.salt)
        try:
            found = self._store.match(space, load.ids, layout).blocks
        except StoreError:
            return []
        return [one for one in found[load.first :] if one.num_tokens == layout.block_tokens]

    def _run(self, loading: _Loading, into: Blocks, threads: int) -> None:
        """On a thread of its own, until everything has come or it is known what will not."""
        use_every_core()
        load, began = loading.load, time.perf_counter()
        result = LoadResult(0, 0)

        def group_done(group: int, _: int) -> None:
            with self._changed:
                loading.groups = group + 1
                self._changed.notify_all()

        try:
            result = load_blocks(
                self._store, loading.blocks, self._tensors.layout, into, threads, group_done
            )
            # Before it is told: what is computed again is stored again, in its place.
            self._drop_damaged(loading.blocks, result)
        except Exception as error:  # whatever it was, vLLM computes these blocks and goes on
            result = LoadResult(0, 0, [repr(error)])
        finally:
            loaded = result.num_tokens_ok // self._tensors.layout.block_tokens
            with self._changed:
                loading.failed = set(load.block_ids[loaded:])
                loading.is_over = True
                self._changed.notify_all()
        took_ms = (time.perf_counter() - began) * 1e3
        log.info(
            "chatkv: loaded %d tokens of %s, %.1f MB in %.0f ms",
            *(result.num_tokens_ok, load.request, result.bytes_read / 1e6, took_ms),
        )
        if self._rates is not None and result.num_tokens_ok and loading.is_alone:
            self._rates.loaded(result.num_tokens_ok, took_ms / 1e3)
        if loading.failed:
            reason = "; ".join(result.misses) or "gone since it was found"
            log.warning("chatkv: %s is computed again: %s", load.request, reason)

    def _drop_damaged(self, blocks: Sequence[StoredBlock], result: LoadResult) -> None:
        loaded = result.num_tokens_ok // self._tensors.layout.block_tokens
        if result.misses and loaded < len(blocks):
            self._writer.call(partial(self._store.remove, [blocks[loaded].key]))

    def _hand_over(self, save: Save) -> None:
        space = namespace_for(self._kept.namespace, save.salt)
        self._writer.call(lambda: self._note(space, save))
        for block in self._new_blocks(space, save, 0, len(save.block_ids)):
            self._writer.submit(space, self._tensors.layout, [block], self._kept.codec)

    def _write(self, save: Save) -> None:
        """Store the blocks of a request that has ended, on the writer's thread."""
        space = namespace_for(self._kept.namespace, save.salt)
        try:
            self._note(space, save)
            for at in range(0, len(save.block_ids), _AT_ONCE):
                blocks = self._new_blocks(space, save, at, at + _AT_ONCE)
                self._store.put(space, self._tensors.layout, blocks, self._kept.codec)
        finally:
            with self._changed:
                self._finished.add(save.request)

    def _new_blocks(self, space: bytes, save: Save, begin: int, end: int) -> list[NewBlock]:
        """Some of the blocks of `save`, as they are now."""
        block_tokens = self._tensors.layout.block_tokens
        keys = [space, *chain_keys(space, save.ids, block_tokens)]
        blocks = []
        taken = self._tensors.take(save.block_ids[begin:end])
        for index, values in enumerate(taken, save.first + begin):
            start = index * block_tokens
            ids = save.ids[start : start + block_tokens]
            blocks.append(NewBlock(keys[index], ids, values, start))
        return blocks

    def _note(self, space: bytes, save: Save) -> None:
        """Say in the store what the KV is of and that it is used; on the writer's thread, in front
        of the blocks: what is worth nothing to anybody is the first to be evicted."""
        if space not in self._registered:
            self._store.register(space, self._kept.about)
            self._registered.add(space)
        self._uses.note(
            space,
            save.ids,
            self._tensors.layout,
            title=f"{self._kept.engine} {save.request}",
            model=self._kept.about["model"],
            is_new=save.is_new,
        )


def use_every_core() -> None:
    """Let this thread run wherever its process may: vLLM binds the one that starts it to a core,
    which it needs itself."""
    allowed = allowed_cores()
    if allowed and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, allowed)
        except OSError:
            return


def allowed_cores(tasks: str = "/proc/self/task") -> Sequence[int]:
    """Every core that any thread of this process is bound to."""
    found: set[int] = set()
    try:
        for task in os.listdir(tasks):
            found |= os.sched_getaffinity(int(task))
    except (OSError, AttributeError, ValueError):
        return []
    return sorted(found)
