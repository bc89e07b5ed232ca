"""This project's store behind vLLM: KV that it has computed outlives it, replies included.

    vllm serve ... --kv-transfer-config '{"kv_connector": "ChatkvConnector",
        "kv_connector_module_path": "chatkv.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute"}'

A connector for vLLM's interface (`KVConnectorBase_V1`), made once in the scheduler's process and
once in each worker's. It only wires: `vllm_scheduler` decides, `vllm_worker` loads and saves. Where
the store cannot be used, vLLM goes on without it and its log says why. docs/vllm.md tells how it is
started and what is kept.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from chatkv.connectors.shared_disk import SharedDisk, folders_of
from chatkv.connectors.vllm_identity import keep, refuse_unknown
from chatkv.connectors.vllm_kernels import kernels_of
from chatkv.connectors.vllm_memory import have
from chatkv.connectors.vllm_plan import Plan, Shard
from chatkv.connectors.vllm_rates import Rates
from chatkv.connectors.vllm_scheduler import SchedulerSide, shards_in_order
from chatkv.connectors.vllm_tensors import KVTensors
from chatkv.connectors.vllm_worker import WorkerSide
from chatkv.errors import ChatkvError, UsageError
from chatkv.restore.cost import cost_key
from chatkv_store.errors import StoreError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.chatkv")


@dataclass
class PlanMetadata(KVConnectorMetadata):
    plan: Plan


@dataclass
class ShardMetadata(KVConnectorHandshakeMetadata):
    shard: Shard


class ChatkvConnector(KVConnectorBase_V1):
    """`kv_connector_extra_config` may hold "home" (as CHATKV_HOME), "kv_codec" and "load".

    Raises UsageError where vLLM runs in a way that this connector would not keep right.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        if unknown := set(options) - {"home", "kv_codec", "load"}:
            raise UsageError(f"kv_connector_extra_config: unknown {', '.join(sorted(unknown))}")
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise UsageError('set "kv_load_failure_policy": "recompute": a block may be missing')
        if options.get("load", "auto") not in ("auto", "always"):
            raise UsageError(f'load: "auto" or "always", not {options["load"]!r}')
        refuse_unknown(vllm_config, kv_cache_config)
        self._codec = options.get("kv_codec", "auto")
        self._folders = folders_of(options.get("home"))
        self._disk = SharedDisk(self._folders)
        for notice in self._disk.notices:
            log.warning("chatkv: %s", notice)
        (group,) = kv_cache_config.kv_cache_groups
        self._layer_names = group.layer_names
        self._block_tokens = group.kv_cache_spec.block_size
        self._shard: Shard | None = None
        self._worker: WorkerSide | None = None
        self._scheduler = SchedulerSide(
            self._disk.store,
            self._block_tokens,
            vllm_config.max_concurrent_batches,
            None if options.get("load") == "always" else self._folders.costs,
        )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # layers are waited for one by one, which no graph can do

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that was not saved costs time, once

    # --- in the scheduler -------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        shards = {
            rank: one.shard for rank, one in metadata.items() if isinstance(one, ShardMetadata)
        }
        in_order = shards_in_order(shards, machine())
        if len(in_order) < len(metadata):
            log.warning("chatkv: KV is not kept: workers on other machines have other stores")
            in_order = []
        self._scheduler.set_shards(in_order)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.admitted(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        state = scheduler_output.kv_connector_block_state

        def block_ids(request_id: str) -> list[int] | None:
            found = None if state is None else state.get_block_ids(request_id)
            return None if found is None else found[0]

        return PlanMetadata(self._scheduler.plan(block_ids, scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.invalid_block_ids:
            self._scheduler.failed()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), None

    # --- in a worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        disk = self._disk
        if disk.store is None or disk.writer is None:
            return
        try:
            tensors = KVTensors(kv_caches, self._layer_names, self._block_tokens)
            kept = keep(
                self._vllm_config,
                tensors.layout,
                ranks(),
                kernels_of(self._vllm_config, self._layer_names, tensors),
                self._codec,
                self._folders.cache,
                vllm.__version__,
            )
        except (ChatkvError, StoreError) as error:
            log.warning("chatkv: KV is not kept: %s", error)
            return
        key = cost_key(kept.namespace, tensors.layers[0].device.type)
        self._shard = Shard(kept.namespace, tensors.layout.to_json(), machine(), key)
        rates = Rates(self._folders.costs, key, kept.about["model"])
        self._worker = WorkerSide(disk.store, disk.writer, tensors, kept, rates)
        if tensors.is_in_memory:
            have(tensors.layers)
        log.info("chatkv: KV of %s is kept in %s", kept.about["model"], self._folders.kv)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._shard is None else ShardMetadata(self._shard)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin()  # before vLLM computes, which it may do before loads are started

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.wait_for(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return  # blocks are saved whole, in a later step

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        finished = self._worker.take_finished() if self._worker is not None else set()
        return finished or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def shutdown(self) -> None:
        self._disk.close()

    def _plan(self) -> Plan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata)
        return metadata.plan


def ranks() -> tuple[int, int]:
    """This worker's place among the stages of the pipeline, and in its stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, get_tp_group().rank_in_group


def machine() -> str:
    return socket.gethostname()
