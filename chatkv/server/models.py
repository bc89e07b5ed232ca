"""The models that an engine process has loaded: each once, few at a time, all on one disk tier."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from chatkv.engine.auto_weights import ChosenWeights, choose_weights
from chatkv.engine.device import choose_device
from chatkv.errors import UsageError
from chatkv.model.catalog import find_model
from chatkv.model.dtype import choose_dtype
from chatkv.model.prepared import Dtype
from chatkv.paths import Folders
from chatkv.process import prepare_to_compute
from chatkv.restore.disk import Disk
from chatkv.restore.prefill_worker import PrefillWorker
from chatkv.runtime import Runtime
from chatkv.session.request import WantedDtype, WantedWeights
from chatkv.words import plural
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations

Progress = Callable[[str, int, int], None]

# A third model would hardly fit beside the KV of two. A GPU's memory is all one model's.
MAX_MODELS, MAX_MODELS_ON_GPU = 2, 1


class Models:
    """Loads and unloads. Every method may be called from any thread.

    `lock` guards which ones there are. let_go(runtime) closes what is open in one that has to make
    room, and is False where somebody uses it; it is called with the lock held. prefill: a worker
    that may compute prompts of any of them.
    """

    def __init__(
        self,
        folders: Folders,
        conversations: Conversations,
        lock: threading.RLock,
        let_go: Callable[[Runtime], bool],
        prefill: PrefillWorker | None = None,
    ) -> None:
        prepare_to_compute()
        self._folders, self._conversations = folders, conversations
        self._lock, self._let_go, self._prefill = lock, let_go, prefill
        self._loading = threading.Lock()  # one at a time: both would need the whole machine
        self._disk: Disk | None = None
        # What "auto" means of weights, as long as this process lives.
        self._choices: dict[tuple[str | None, str], ChosenWeights] = {}
        self._loaded: dict[tuple[str | None, str, str], Runtime] = {}  # the last used one last
        self._is_closed = False

    def get(
        self,
        model: str | None,
        dtype: WantedDtype,
        on_progress: Progress | None = None,
        weights: WantedWeights = "auto",
    ) -> Runtime:
        """The model, loaded where it is not yet; the one used longest ago makes room."""
        # A session remembers the dtype that "auto" once meant: both are the same model.
        if dtype == "auto":
            dtype = choose_dtype(self._folders.cache, choose_device())
        chosen = self._choices.get((model, dtype)) if weights == "auto" else None
        key = (model, dtype, weights if chosen is None else chosen.weights)
        if (known := self._known(key)) is not None:
            return known
        with self._loading:
            if weights == "auto":
                chosen = self._choose(model, dtype, on_progress)
                key = (model, dtype, chosen.weights)
            if (known := self._known(key)) is not None:
                return known
            self._make_room()
            if self._disk is None or self._disk.store is None:  # refused: it may be possible now
                self._disk = Disk(self._folders, self._conversations)
            runtime = Runtime(
                self._folders,
                self._conversations,
                model,
                dtype,
                on_progress,
                disk=self._disk,
                weights=chosen or weights,
                prefill=self._prefill,
            )
            with self._lock:
                if not self._is_closed:
                    self._loaded[key] = runtime
                    return runtime
            runtime.close()
            raise closed()

    def _choose(
        self, model: str | None, dtype: Dtype, on_progress: Progress | None
    ) -> ChosenWeights:
        if (model, dtype) not in self._choices:
            folders, measures = self._folders, os.environ.get("CHATKV_CALIBRATE") != "0"
            files = find_model(model, folders.cache)
            self._choices[model, dtype] = choose_weights(
                files, dtype, choose_device(), folders, measures, on_progress
            )
        return self._choices[model, dtype]

    @property
    def loaded(self) -> list[Runtime]:
        with self._lock:
            return list(self._loaded.values())

    @property
    def blocks(self) -> BlockStore | None:
        """What the disk tier holds, None where it is not open."""
        return self._disk.store if self._disk is not None else None

    def flush(self, timeout_s: float) -> None:
        """Wait until what was computed is on the disk."""
        if self._disk is not None and self._disk.writer is not None:
            self._disk.writer.flush(timeout_s)

    def close(self) -> None:
        """Write what is queued; nothing is loaded from now on."""
        with self._lock:
            self._is_closed = True
        for runtime in self.loaded:
            runtime.close()
        if self._disk is not None:
            self._disk.close()

    def _known(self, key: tuple[str | None, str, str]) -> Runtime | None:
        with self._lock:
            if self._is_closed:
                raise closed()
            runtime = self._loaded.pop(key, None)
            if runtime is not None:
                self._loaded[key] = runtime
            return runtime

    def _make_room(self) -> None:
        most = MAX_MODELS if choose_device().type == "cpu" else MAX_MODELS_ON_GPU
        with self._lock:
            if len(self._loaded) < most:
                return
            key = next((key for key, one in self._loaded.items() if self._is_free(one)), None)
            if key is None:
                raise UsageError(
                    f"{plural(most, 'model is', 'models are')} answering already: wait for one of "
                    "them, or stop it"
                )
            runtime = self._loaded.pop(key)
        runtime.close()

    def _is_free(self, runtime: Runtime) -> bool:
        return not runtime.engine.memory.num_in_use and self._let_go(runtime)


def closed() -> UsageError:
    """What is said to whoever comes while the process ends."""
    return UsageError("the engine is ending: try again")
