"""The runtime: one model, one pool, one store and all conversations, wired into one object."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch

from chatkv.apart.wire import Model
from chatkv.engine.admission import admit
from chatkv.engine.auto_weights import ChosenWeights, choose_weights
from chatkv.engine.device import Device, choose_device
from chatkv.engine.draft_model import draft_engine
from chatkv.engine.engine import Engine
from chatkv.engine.ledger import Ledger
from chatkv.engine.needs import Needs
from chatkv.engine.on_device import engine_on
from chatkv.engine.pool import BLOCK_TOKENS, BlockPool
from chatkv.errors import ChatkvError, ModelError
from chatkv.model.catalog import find_model
from chatkv.model.decoder import Decoder
from chatkv.model.dtype import choose_dtype
from chatkv.model.few_rows import MeasuredRows
from chatkv.model.mtp_file import find_foresight
from chatkv.model.prepared import Dtype, prepare
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
from chatkv.model.weights import TORCH_DTYPES, load_weights
from chatkv.paths import Folders
from chatkv.process import available_bytes, give_back, prepare_to_compute, resident_bytes
from chatkv.restore.calibration import Calibration
from chatkv.restore.cost import CostFile, cost_key
from chatkv.restore.disk import Disk
from chatkv.restore.names import layout_of, namespace_of
from chatkv.restore.prefill_worker import PrefillWorker
from chatkv.restore.remote import RemotePrefill
from chatkv.restore.restorer import Restorer
from chatkv.restore.saver import DiskTier
from chatkv.restore.staging import DEVICE_BYTES
from chatkv.session.conversation import Conversation
from chatkv.session.generation import ModelParts
from chatkv.session.reading import Reader
from chatkv.session.request import WantedWeights
from chatkv_store.blocks import BlockStore
from chatkv_store.codec import by_name as codec_by_name
from chatkv_store.conversations import Conversations, Session
from chatkv_store.errors import StoreError
from chatkv_store.same_store import identity as store_identity

Progress = Callable[[str, int, int], None]

# KV of live conversations may take this share of the memory that is free at the start.
POOL_SHARE_OF_MEMORY = 0.25
# More would hardly be used at once by one person, and memory that was used is not given back.
POOL_CONVERSATIONS = 8
# One of each family: those of one share what is stored, and what loading it takes.
CODECS = ("lossless", "int8", "fp8", "int4")


class Runtime:
    """Everything behind a face, in this process.

    model: what `find_model` takes, None for the embedded default. dtype "auto" is what this
    machine decodes faster; weights say how projections are stored ("auto": `choose_weights`),
    kv_codec how KV is. disk: the process's, by default one of its own. device: see `choose_device`.
    prefill: a worker that may compute prompts. Notices are lines that a user should see.
    """

    def __init__(
        self,
        folders: Folders,
        conversations: Conversations,
        model: str | None = None,
        dtype: Dtype | Literal["auto"] = "auto",
        on_progress: Progress | None = None,
        kv_codec: str = "lossless",
        disk: Disk | None = None,
        device: Device | None = None,
        weights: WantedWeights | ChosenWeights = "auto",
        prefill: PrefillWorker | None = None,
    ) -> None:
        began = time.perf_counter()
        self.folders, self.conversations = folders, conversations
        self.model_spec = model
        self.kv_codec, self._prefill = kv_codec, prefill
        self.notices: list[str] = []
        self._open = ExitStack()
        prepare_to_compute()
        resident = resident_bytes()
        files = find_model(model, folders.cache)
        where = choose_device(device)
        chosen = choose_dtype(folders.cache, where) if dtype == "auto" else dtype
        # Tests and benchmarks that must not depend on the clock switch the measuring off.
        measures = os.environ.get("CHATKV_CALIBRATE") != "0"
        if isinstance(weights, ChosenWeights):
            self.weights = weights
        elif weights != "auto":
            self.weights = ChosenWeights(weights, "as was asked for")
        else:
            self.weights = choose_weights(files, chosen, where, folders, measures, on_progress)
        if self.weights.is_lossy:
            self.notices.append(f"{self.weights.weights} weights: {self.weights.why}")
        quantised = None if self.weights.weights == "full" else self.weights.weights
        self.prepared = prepare(files, chosen, folders.models, on_progress, quantised)
        if on_progress is not None:
            on_progress("loading the model", 0, 1)
        self.needs: Needs | None = None  # of main memory
        if where.type == "cpu":
            self.needs = admit(files, self.prepared, resident)
        self._memory_bytes = int(available_bytes() * POOL_SHARE_OF_MEMORY)
        self.tokenizer = Tokenizer.from_prepared(self.prepared)
        # A template that fails does so now, and the first turn need not wait for its compiler.
        self._template(time.time()).render([{"role": "user", "content": "Hello"}])
        self.ledger: Ledger | None = None  # of a GPU's memory
        self.engine = self._engine_on(where, on_progress)
        self._open.callback(self.engine.close)
        if draft_model := os.environ.get("CHATKV_DRAFT_MODEL"):
            self.engine.draft_with(
                draft_engine(folders, draft_model, self.tokenizer, chosen, self._memory_bytes // 4)
            )
        self.layout = layout_of(self.prepared)
        self.namespace = self.namespace_of(kv_codec)
        self._disk = self._usable(disk or self._own_disk())
        self._costs = CostFile(folders.costs)
        self._restorers: dict[tuple[str, str], Restorer] = {}
        self.restorer = self.restorer_for(kv_codec)
        if on_progress is not None:
            on_progress("loading the model", 1, 1)
        self.load_model_ms = (time.perf_counter() - began) * 1e3
        wants_rates = self.restorer.disk is not None and not self.restorer.is_calibrated
        self.engine.draft_costs.is_fixed = not measures
        if wants_rates and measures:
            with suppress(StoreError, OSError):  # no room to measure in: guesses will do
                self.calibrate(on_progress)

    def calibrate(
        self, on_progress: Progress | None = None, every_codec: bool = False
    ) -> Calibration:
        """Measure what loading and prefill cost here, in a few seconds; loading with codecs too
        that this runtime does not use, where they are wanted."""
        scratch = self.folders.cache / f"calibration-{os.getpid()}"
        own = self.namespace_of(self.kv_codec)
        families = {self.namespace_of(codec): codec for codec in CODECS if every_codec}
        others = [codec for space, codec in families.items() if space != own]
        found = self.restorer.calibrate(scratch, on_progress, others)
        for loads in found.loads[1:]:
            key = self._cost_key(self.namespace_of(loads.codec))
            self._costs.save(key, self._cost_label(loads.codec), found.cost_of(loads))
            for (codec, _), restorer in self._restorers.items():
                if codec == loads.codec:
                    restorer.cost = found.cost_of(loads)
        return found

    def close(self) -> None:
        """Write what is queued and close the store."""
        self._open.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace_of(self, kv_codec: str, owner: str = "") -> bytes:
        """Under which this model's KV is stored with a codec."""
        return namespace_of(self.prepared, kv_codec, owner)

    def restorer_for(self, kv_codec: str, owner: str = "") -> Restorer:
        """What restores and saves an owner's sessions that keep their KV with a codec."""
        if (kv_codec, owner) not in self._restorers:
            namespace = self.namespace_of(kv_codec, owner)
            disk = None
            if self._disk is not None and self._disk.store and self._disk.writer:
                store, writer = self._disk.store, self._disk.writer
                with suppress(StoreError):  # only listings would miss it
                    self._register(store, namespace, kv_codec)
                disk = DiskTier(store, writer, namespace, kv_codec)
            made = Restorer(
                self.engine,
                self.layout,
                disk,
                self._costs,
                self._cost_key(self.namespace_of(kv_codec)),  # costs are the machine's
                self._cost_label(kv_codec),
                owner,
                self._remote(owner),
            )
            if not made.is_calibrated and self._restorers:  # prefill is the same with all codecs
                made.cost = replace(self.restorer.cost, num_observations=0)
            self._restorers[kv_codec, owner] = made
        return self._restorers[kv_codec, owner]

    @property
    def model(self) -> Model:
        """What its KV depends on beside tokens, as prefill workers compare it."""
        weights, config = self.prepared.weights_digest, self.prepared.config.digest()
        return Model(weights.hex(), config.hex(), self.layout.to_json())

    @property
    def store(self) -> BlockStore | None:
        """The disk tier's, None where it cannot be used."""
        return self._disk.store if self._disk is not None else None

    def _remote(self, owner: str) -> RemotePrefill | None:
        if self._prefill is None:
            return None
        return RemotePrefill(
            self._prefill,
            self.model,
            self.layout,
            self.namespace_of("lossless", owner),
            owner,
            store_identity(self.store) if self.store is not None else None,
        )

    def new_session(
        self,
        title: str = "",
        seed: int | None = None,
        kv_codec: str | None = None,
        owner: str = "",
    ) -> Session:
        """An empty session for this model, written with its first turn: a chat in which nothing is
        said leaves none. Its seed is drawn now and kept. `owner`: whose it is, where several share
        the machine; KV of two owners never meets."""
        kv_codec = kv_codec or self.kv_codec
        owned: dict[str, Any] = {"owner": owner} if owner else {}
        settings: dict[str, Any] = {
            **owned,
            **self._resumed_with(kv_codec),
            "tokenizer": self._tokenizer_digest(),
            "seed": _new_seed() if seed is None else seed,
        }
        return self.conversations.unsaved_session(
            title=title,
            model=self.prepared.name,
            namespace=self.namespace_of(kv_codec, owner).hex(),
            settings=settings,
        )

    def open(self, session: Session, kv_codec: str | None = None) -> Conversation:
        """The session, ready for its next turn; closed by the caller. kv_codec: from now on, by
        default the runtime's.

        Raises UsageError for a session whose tokens mean something else to this model, ModelError
        for one that its template cannot write.
        """
        kv_codec = kv_codec or self.kv_codec
        owner = session.settings.get("owner", "")
        parts = self._parts(self.restorer_for(kv_codec, owner), session.created_at)
        conversation = Conversation(parts, self.conversations, session)
        digest = self._tokenizer_digest()
        try:
            conversation.journal.read_with(
                Reader(self.prepared.name, digest, parts.template, parts.tokenizer)
            )
        except ChatkvError:
            conversation.close()
            raise
        drawn = {} if "seed" in session.settings else {"seed": _new_seed()}  # it was imported
        conversation.journal.held_with(
            self.prepared.name,
            self.namespace_of(kv_codec, owner).hex(),
            {**drawn, **session.settings, **self._resumed_with(kv_codec)},
        )
        return conversation

    def forget(self, session_id: str) -> None:
        """Drop a session's KV from memory."""
        for restorer in list(self._restorers.values()):
            restorer.forget(session_id)

    def scratch_parts(self, owner: str = "") -> ModelParts:
        """What answers an owner's requests that leave nothing behind (`scratch`)."""
        scratch = Restorer(self.engine, self.layout, None, self._costs, "", realm=owner)
        return self._parts(scratch, time.time())

    def status(self) -> dict[str, Any]:
        """What is loaded, and how much of its memory is taken."""
        pool = self.engine.pool
        return {
            "model": self.prepared.name,
            "spec": self.model_spec,
            "dtype": self.prepared.dtype,
            "weights": self.prepared.stored,
            "weights_why": self.weights.why,
            "device": self.engine.decoder.device.type,
            "gpu_bytes": asdict(self.ledger) if self.ledger is not None else None,
            "context": self.engine.max_tokens,
            "kv_bytes_per_token": self.layout.bytes_per_token,
            "kv_tokens": {
                "total": pool.num_blocks * BLOCK_TOKENS,
                "free": pool.free_blocks * BLOCK_TOKENS,
                "idle": self.engine.memory.num_idle_tokens,
            },
        }

    def _parts(self, restorer: Restorer, began: float) -> ModelParts:
        return ModelParts(
            self.prepared.name,
            self.engine,
            restorer,
            self.tokenizer,
            self._template(began),
            self.load_model_ms,
        )

    def _own_disk(self) -> Disk:
        disk = Disk(self.folders, self.conversations)
        self._open.callback(disk.close)
        return disk

    def _usable(self, disk: Disk) -> Disk | None:
        """The disk tier; where it cannot be used, the chat goes on without it and says so."""
        self.notices += disk.notices
        if disk.store is None:
            return None
        try:
            self._register(disk.store, self.namespace, self.kv_codec)
        except StoreError as error:
            self.notices.append(f"KV is not kept: {error}")
            return None
        return disk

    def _cost_label(self, kv_codec: str) -> str:
        """What people are told that rates are of."""
        device = self.engine.decoder.device.type
        of_codec = f", {kv_codec}" if kv_codec in CODECS[1:] else ""
        return f"{self.prepared.name}, {self.prepared.numbers}, {device}{of_codec}"

    def _cost_key(self, namespace: bytes) -> str:
        return cost_key(namespace, self.engine.decoder.device.type)

    def _register(self, store: BlockStore, namespace: bytes, kv_codec: str) -> None:
        """Say in the store what a namespace's KV is of."""
        about = {
            "model": self.prepared.name,
            "layout": self.layout.to_json(),
            "codec": codec_by_name(kv_codec).family,
        }
        store.register(namespace, about)

    def _template(self, began: float) -> ChatTemplate:
        """The model's chat template; to templates that write the date, it is always the day on
        which the session began, else tomorrow's rendering would differ from today's log."""
        day = datetime.fromtimestamp(began)
        template = ChatTemplate.from_prepared(self.prepared, self.tokenizer, lambda: day)
        if template.notice and template.notice not in self.notices:
            self.notices.append(template.notice)
        return template

    def _engine_on(self, device: torch.device, on_progress: Progress | None) -> Engine:
        config, weights = self.prepared.config, load_weights(self.prepared)
        if device.type == "cpu":
            dtype = TORCH_DTYPES[self.prepared.dtype]
            decoder = Decoder(
                config,
                weights,
                max_position=self._max_tokens(),
                on_progress=lambda *_: give_back(),  # layer by layer
                few_rows=MeasuredRows(self.folders.cache, dtype),
            )
            num_blocks = -(-self._memory_tokens() // BLOCK_TOKENS)
            engine = Engine(decoder, BlockPool(config, num_blocks, decoder.dtype, device))
            named = os.environ.get("CHATKV_MTP")
            foresight = find_foresight(named, self.prepared, decoder, weights)
            if foresight is not None:
                engine.predict_with(foresight)
            return engine

        def progress(done: int, total: int) -> None:
            if on_progress is not None:
                on_progress("loading the model to the GPU", done, total)

        gc.collect()  # a model that was here before may not be quite gone
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        most_tokens = config.max_position * POOL_CONVERSATIONS
        engine, self.ledger = engine_on(
            device, config, weights, free_bytes, most_tokens, DEVICE_BYTES, progress
        )
        return engine

    def _max_tokens(self) -> int:
        """The model's context, or what memory holds of it."""
        return min(self.prepared.config.max_position, self._memory_tokens())

    def _memory_tokens(self) -> int:
        """Tokens of KV that a quarter of the free memory holds, at most those of
        POOL_CONVERSATIONS whole contexts."""
        config = self.prepared.config
        bits = 4 if self.prepared.dtype == "float32" else 2
        per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * bits
        fits = self._memory_bytes // per_token // BLOCK_TOKENS * BLOCK_TOKENS
        if fits < BLOCK_TOKENS:
            raise ModelError(
                f"{self.prepared.name} needs {per_token} bytes of memory per token and only "
                f"{self._memory_bytes} bytes are to be had: close other programs or take a "
                "smaller model"
            )
        return min(config.max_position * POOL_CONVERSATIONS, fits)

    def _resumed_with(self, kv_codec: str) -> dict[str, Any]:
        """What a session goes on with, unless its user says otherwise. Dtype and weights are part
        of it: KV and rounding are theirs, and "auto" may choose others one day."""
        return {
            "model": self._portable_spec(),
            "dtype": self.prepared.dtype,
            "weights": self.prepared.stored,
            "kv_codec": kv_codec,
        }

    def _portable_spec(self) -> str | None:
        """The model as a later process, in another folder, will find it."""
        spec = self.model_spec
        return str(Path(spec).absolute()) if spec and Path(spec).exists() else spec

    def _tokenizer_digest(self) -> str:
        return hashlib.sha256(self.prepared.tokenizer_path.read_bytes()).hexdigest()[:32]


def _new_seed() -> int:
    return int.from_bytes(os.urandom(7), "big")
