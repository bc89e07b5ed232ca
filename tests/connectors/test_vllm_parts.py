"""The connector for vLLM without vLLM: what is found, loaded, saved and reported, on a real store.

Steps run as vLLM runs them: plan, load layer by layer, compute, save, report. `tests/connectors/
test_vllm.py` does the same with vLLM itself, where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatkv.connectors import vllm_memory
from chatkv.connectors.vllm_identity import Kept, keep, refuse_unknown
from chatkv.connectors.vllm_plan import Plan, Shard
from chatkv.connectors.vllm_rates import Rates
from chatkv.connectors.vllm_scheduler import SchedulerSide, shards_in_order
from chatkv.connectors.vllm_tensors import KVTensors
from chatkv.connectors.vllm_worker import WorkerSide
from chatkv.errors import ModelError, UsageError
from chatkv.restore.cost import CostFile
from chatkv_store.blocks import BlockStore
from chatkv_store.chain import NewBlock
from chatkv_store.keys import block_key
from chatkv_store.layout import KVLayout
from chatkv_store.tables import value_key
from chatkv_store.uses import Uses
from chatkv_store.writer import BlockWriter

LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(6)]
B, HEADS, WIDTH, BLOCKS = 32, 2, 16, 12
NAMESPACE = bytes(range(32))


def caches(dtype: torch.dtype = torch.float32, kind: str = "in one") -> dict[str, torch.Tensor]:
    """One tensor per layer: in one piece of memory, each in its own, or such that not even a block
    lies in one piece."""
    if kind == "in one":
        whole = torch.zeros(len(LAYERS), BLOCKS, HEADS, B, WIDTH, dtype=dtype)
        return dict(zip(LAYERS, whole, strict=True))
    step = 2 if kind == "scattered" else 1
    shape = (BLOCKS, HEADS, B * step, WIDTH)
    return {name: torch.zeros(shape, dtype=dtype)[:, :, ::step] for name in LAYERS}


def compute(kv: dict[str, torch.Tensor], ids: list[int], block_ids: list[int]) -> None:
    """KV that depends on the ids up to each token, as a model's does."""
    states = torch.tensor(list(accumulate(ids, lambda state, token: (state * 31 + token) % 8191)))
    place = torch.arange(HEADS * WIDTH).view(HEADS, 1, WIDTH)
    for layer, name in enumerate(LAYERS):
        for first, block in zip(range(0, len(ids), B), block_ids, strict=False):
            rows = place + states[first : first + B].view(1, -1, 1) + 100 * layer
            kv[name][block, :, : rows.shape[1]] = rows.to(kv[name].dtype)


class Request(SimpleNamespace):
    """What the scheduler's side asks of vLLM's requests."""

    def __init__(self, name: str, ids: list[int], **other: Any) -> None:
        super().__init__(request_id=name, all_token_ids=list(ids), num_computed_tokens=0)
        self.status = SimpleNamespace(name="RUNNING")
        self.lora_request = self.prompt_embeds = self.pooling_params = self.cache_salt = None
        self.mm_features: list[object] = []
        self.num_in_flight_tokens = 0
        self.__dict__.update(other)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Engine:
    """A vLLM of one worker: both sides over one store, and KV tensors between them."""

    def __init__(
        self, path: Path, dtype: torch.dtype = torch.float32, kind: str = "in one", **limits: int
    ) -> None:
        self.store = BlockStore(path)
        self.writer = BlockWriter(self.store, **limits)
        self.kv = caches(dtype, kind)
        tensors = KVTensors(self.kv, LAYERS, B)
        self.layout = tensors.layout
        space = NAMESPACE
        about = {"model": "tiny (vLLM)", "layout": self.layout.to_json(), "codec": "lossless"}
        self.costs = path.parent / "costs.json"
        self.rates = Rates(self.costs, "key", "tiny (vLLM)")
        kept = Kept(space, about, "vLLM", "lossless")
        self.worker = WorkerSide(self.store, self.writer, tensors, kept, self.rates)
        self.scheduler = SchedulerSide(self.store, B, costs=self.costs)
        self.scheduler.set_shards([Shard(space, self.layout.to_json(), "here", "key")])

    def run(self, request: Request, block_ids: list[int], replies: int = 0) -> tuple[int, Plan]:
        """A request from admission to end; tokens loaded, and the plan of its first step."""
        external = self.scheduler.matched(request, 0)
        self.scheduler.admitted(request, external)
        request.num_computed_tokens = external
        plan = self._step(request, block_ids)
        failed = self.worker.take_failed()
        if failed:
            first = min(block_ids.index(one) for one in failed)
            request.num_computed_tokens = first * B
            self.scheduler.failed()
            self._step(request, block_ids)
            assert self.worker.take_failed() == set()
        compute(self.kv, request.all_token_ids, block_ids)
        request.num_computed_tokens = request.num_tokens
        for reply in range(replies):
            request.all_token_ids.append(reply % 7)
            self._step(request, block_ids)
            compute(self.kv, request.all_token_ids, block_ids)
            request.num_computed_tokens = request.num_tokens
        request.all_token_ids.append(99)  # the last token has no KV
        if self.scheduler.finished(request, block_ids[: -(-request.num_computed_tokens // B)]):
            self.worker.save(self.scheduler.plan(lambda _: None))
            self.writer.flush()
            assert self.worker.take_finished() == {request.request_id}
        self.writer.flush()
        assert self.writer.stats().error is None
        return external, plan

    def _step(self, request: Request, block_ids: list[int]) -> Plan:
        plan = self.scheduler.plan(lambda name: block_ids if name == request.request_id else None)
        self.worker.start(plan)
        for name in LAYERS:
            self.worker.wait_for(name)
        self.worker.save(plan)
        return plan

    def close(self) -> None:
        self.writer.close()
        self.store.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "kv")
    yield engine
    engine.close()


def ids_of(seed: int, count: int) -> list[int]:
    return [(seed * 37 + index * index) % 251 for index in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["in one", "apart", "scattered"])
def test_what_was_computed_is_loaded_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    ids = ids_of(1, 4 * B + 5)
    first = Engine(tmp_path / "kv", dtype, kind)
    assert first.run(Request("a", ids), [3, 1, 7, 0, 9, 2, 8], replies=2 * B)[0] == 0
    first.close()
    again = Engine(tmp_path / "kv", dtype, kind)
    # The reply is there too: 4 blocks and 5 tokens of prompt, and 2 blocks of reply.
    whole = ids + [reply % 7 for reply in range(2 * B)]
    external = again.scheduler.matched(Request("b", [*whole, 99]), 0)
    assert external == 6 * B
    request = Request("c", [*whole, 99])
    again.scheduler.admitted(request, again.scheduler.matched(request, 0))
    into = [5, 6, 8, 10, 11, 4, 0]
    request.num_computed_tokens = external
    again._step(request, into)
    assert again.worker.take_failed() == set()
    wanted = caches(dtype)
    compute(wanted, whole[:external], into)
    for name in LAYERS:
        assert torch.equal(again.kv[name], wanted[name]), name
    again.close()


def test_nothing_is_saved_before_its_step_is_known_to_be_right(engine: Engine) -> None:
    request = Request("a", ids_of(1, 3 * B))
    engine.scheduler.admitted(request, engine.scheduler.matched(request, 0))
    assert engine.scheduler.plan(lambda _: [0, 1, 2, 3]).saves == []
    request.num_computed_tokens = 2 * B  # the first step has come back
    (save,) = engine.scheduler.plan(lambda _: [0, 1, 2, 3]).saves
    assert (save.first, save.block_ids, len(save.ids)) == (0, [0, 1], 2 * B)
    ahead = SchedulerSide(engine.store, B, steps_ahead=2)
    ahead.set_shards([Shard(NAMESPACE, engine.layout.to_json(), "here")])
    ahead.admitted(request, ahead.matched(request, 0))
    assert [len(ahead.plan(lambda _: [0, 1, 2, 3]).saves) for _ in range(3)] == [0, 0, 1]


def test_a_damaged_block_is_reported_with_what_follows_and_written_anew(engine: Engine) -> None:
    ids = ids_of(1, 5 * B + 3)
    engine.run(Request("a", ids), [0, 1, 2, 3, 4, 5])
    keys = [one.key for one in engine.store.match(NAMESPACE, ids, engine.layout).blocks]

    def flip(txn: Any) -> None:
        at = value_key(keys[2], engine.layout.num_values - 1)
        stored = bytearray(txn.get(at, db=engine.store.db["values"]))
        stored[-1] ^= 1
        txn.put(at, bytes(stored), db=engine.store.db["values"])

    engine.store.env.write(flip)
    for tensor in engine.kv.values():
        tensor.zero_()
    request = Request("b", ids)
    engine.scheduler.admitted(request, engine.scheduler.matched(request, 0))
    request.num_computed_tokens = 5 * B
    engine._step(request, [11, 10, 9, 8, 7, 6])
    assert engine.worker.take_failed() == {9, 8, 7}
    engine.writer.flush()
    assert engine.store.match(NAMESPACE, ids, engine.layout).num_tokens == 2 * B
    # vLLM sets the request back, and computes from there.
    request.num_computed_tokens = 2 * B
    engine.scheduler.failed()
    engine._step(request, [11, 10, 9, 8, 7, 6])
    compute(engine.kv, ids, [11, 10, 9, 8, 7, 6])
    request.num_computed_tokens = len(ids)
    request.all_token_ids.append(1)
    engine._step(request, [11, 10, 9, 8, 7, 6])
    engine.writer.flush()
    assert engine.store.match(NAMESPACE, ids, engine.layout).num_tokens == 5 * B
    assert engine.store.verify() == []


def test_what_the_writer_had_to_drop_is_written_when_the_request_has_ended(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", max_queued_bytes=1)
    ids = ids_of(1, 4 * B)
    engine.run(Request("a", ids), [0, 1, 2, 3, 4], replies=2)
    assert engine.writer.stats().dropped == 4
    assert engine.store.match(NAMESPACE, ids, engine.layout).num_tokens == 4 * B
    engine.close()


def test_blocks_that_have_gone_meanwhile_are_reported(engine: Engine) -> None:
    ids = ids_of(1, 4 * B)
    engine.run(Request("a", ids), [0, 1, 2, 3])
    request = Request("b", [*ids, 1])
    engine.scheduler.admitted(request, engine.scheduler.matched(request, 0))
    engine.store.remove([one.key for one in engine.store.headers()])
    engine._step(request, [8, 9, 10, 11, 7])
    assert engine.worker.take_failed() == {8, 9, 10, 11}


def test_only_what_vllm_does_not_have_is_loaded(engine: Engine) -> None:
    ids = ids_of(1, 4 * B)
    engine.run(Request("a", ids), [0, 1, 2, 3])
    request = Request("b", [*ids, 1])
    assert engine.scheduler.matched(request, 2 * B) == 2 * B
    engine.scheduler.admitted(request, 2 * B)
    (load,) = engine.scheduler.plan(lambda _: [8, 9, 10, 11, 7]).loads
    assert (load.first, load.block_ids) == (2, [10, 11])
    assert engine.scheduler.matched(Request("c", ids), 0) == 3 * B  # the last token is computed


def test_who_asks_with_a_salt_shares_with_nobody_else(engine: Engine) -> None:
    ids = ids_of(1, 3 * B + 1)
    engine.run(Request("a", ids, cache_salt="one"), [0, 1, 2, 3])
    found = [
        engine.scheduler.matched(Request("b", ids, cache_salt=salt), 0)
        for salt in (None, "two", "one")
    ]
    assert found == [0, 0, 3 * B]


@pytest.mark.parametrize(
    "other",
    [
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"prompt_embeds": object()},
        {"pooling_params": object()},
    ],
    ids=lambda other: next(iter(other)),
)
def test_kv_of_more_than_ids_is_left_alone(engine: Engine, other: dict[str, Any]) -> None:
    ids = ids_of(1, 3 * B + 1)
    engine.run(Request("a", ids), [0, 1, 2, 3])
    assert engine.scheduler.matched(Request("b", ids, **other), 0) == 0
    assert engine.run(Request("c", ids_of(2, 3 * B), **other), [4, 5, 6])[0] == 0
    assert len(list(engine.store.headers())) == 3


def test_what_is_slower_to_load_is_computed_until_it_is_tried_again(engine: Engine) -> None:
    """Never before both were measured; and never, where everything is to be loaded."""
    ids = ids_of(1, 4 * B + 1)
    engine.run(Request("a", ids), [0, 1, 2, 3, 4])
    engine.rates.loaded(1000, 2.0)
    assert engine.scheduler.matched(Request("b", ids), 0) == 4 * B
    engine.rates.computed(0, 1000, 1.9)
    for _ in range(2):  # vLLM may look several times before there is room
        assert engine.scheduler.matched(Request("c", ids), 0) == 0
    loads = []
    for number in range(20):
        request = Request(f"d{number}", ids)
        external, plan = engine.run(request, [0, 1, 2, 3, 4])
        assert bool(plan.loads) == (external > 0)
        assert not any(save.block_ids for save in plan.saves)  # they are stored
        loads.append(external)
    assert loads[0] == 0 and 4 * B in loads
    always = SchedulerSide(engine.store, B)
    always.set_shards([Shard(NAMESPACE, engine.layout.to_json(), "here", "key")])
    assert always.matched(Request("e", ids), 0) == 4 * B


def test_steps_of_one_prompt_alone_are_measured(engine: Engine) -> None:
    request, other = Request("a", ids_of(1, 4 * B)), Request("b", ids_of(2, 4 * B))
    for one in (request, other):
        engine.scheduler.admitted(one, 0)
    request.num_computed_tokens = B

    def computes(**scheduled: int) -> tuple[int, int] | None:
        plan = engine.scheduler.plan(lambda name: None, scheduled)
        engine.worker.begin()
        engine.worker.save(plan)
        return plan.computes

    assert computes(a=3 * B, b=1) is None and computes(c=3 * B) is None
    engine.worker.begin()
    engine.writer.flush()
    assert engine.rates.cost.prefill_error is None
    assert computes(a=3 * B) == (B, 4 * B)
    engine.worker.begin()
    engine.writer.flush()
    assert engine.rates.cost.prefill_error is not None
    assert CostFile(engine.costs).entries()["key"][0] == "tiny (vLLM)"


def test_an_abandoned_request_keeps_what_was_certain(engine: Engine) -> None:
    request = Request("a", ids_of(1, 3 * B))
    engine.scheduler.admitted(request, engine.scheduler.matched(request, 0))
    engine._step(request, [0, 1, 2])
    request.num_computed_tokens = 3 * B
    request.status.name = "FINISHED_ABORTED"
    assert not engine.scheduler.finished(request, [0, 1, 2])


@pytest.mark.parametrize("kind", ["in one", "apart"])
def test_memory_is_asked_for_and_left_as_it_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_memory, "_AT_ONCE", 1)
    kv = caches(kind=kind)
    compute(kv, ids_of(1, 5 * B), [3, 1, 7, 0, 9])
    before = {name: tensor.clone() for name, tensor in kv.items()}
    layers = list(kv.values())
    vllm_memory.have(layers).join(60)
    assert all(torch.equal(kv[name], before[name]) for name in LAYERS)
    covered = sorted(vllm_memory._pieces(layers))
    assert sum(size for _, size in covered) == sum(one.nbytes for one in layers)
    wanted = [one.data_ptr() + b * one[0].nbytes for one in layers for b in range(BLOCKS)]
    assert [address for address, _ in covered] == sorted(wanted)


def test_requests_are_uses_of_the_cache(engine: Engine) -> None:
    ids = ids_of(1, 3 * B + 1)
    engine.run(Request("a", ids), [0, 1, 2, 3])
    engine.run(Request("b", [*ids, *ids_of(2, B)]), [0, 1, 2, 3, 4])
    (use,) = Uses(engine.store).every()
    assert (use.title, use.model, use.num_tokens) == ("vLLM a", "tiny (vLLM)", 4 * B)
    assert use.num_requests == 2


def test_all_workers_must_have_a_block(engine: Engine) -> None:
    ids = ids_of(1, 4 * B + 1)
    engine.run(Request("a", ids), [0, 1, 2, 3, 4])
    layout, other = engine.layout, bytes(32)
    both = [Shard(space, layout.to_json(), "here") for space in (other, NAMESPACE)]
    engine.scheduler.set_shards(both)
    assert engine.scheduler.matched(Request("b", ids), 0) == 0
    tensors = KVTensors(engine.kv, LAYERS, B)
    blocks, parent = [], other
    for index, values in enumerate(tensors.take([0, 1])):
        block = NewBlock(parent, ids[index * B : (index + 1) * B], values)
        parent = block_key(parent, block.token_ids)
        blocks.append(block)
    engine.store.put(other, layout, blocks)
    assert engine.scheduler.matched(Request("b", ids), 0) == 2 * B


def test_workers_on_other_machines_have_other_stores() -> None:
    here, there = Shard(b"1", "{}", "here"), Shard(b"2", "{}", "there")
    assert shards_in_order({(0, 1): here, (0, 0): here}, "here") == [here, here]
    assert shards_in_order({(0, 0): here, (0, 1): there}, "here") == []


# --- names ----------------------------------------------------------------------------------------


class FullAttentionSpec:
    """vLLM's is known by its name."""


def config_of(folder: Path, **other: Any) -> Any:
    text = SimpleNamespace(to_dict=lambda: {"hidden_size": 64, "rope_theta": 1e4})
    model = SimpleNamespace(
        model=str(folder),
        served_model_name="chat",
        dtype="float32",
        quantization=None,
        hf_text_config=text,
        max_model_len=1024,
        use_mla=False,
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        tensor_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    for name, value in other.items():
        part, _, field = name.partition("__")
        if field:
            setattr(getattr(config, part), field, value)
        else:
            setattr(config, part, value)
    return config


def checkpoint(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_name_changes_with_all_that_kv_depends_on(tmp_path: Path) -> None:
    layout = KVLayout(2, 2, 8, "float32", B)
    one = checkpoint(tmp_path / "one" / "model", b"weights")
    same_name = checkpoint(tmp_path / "two" / "model", b"other weights")
    copied = checkpoint(tmp_path / "three" / "model", b"weights")
    scaled = SimpleNamespace(to_dict=lambda: {"hidden_size": 64, "rope_theta": 5e4})

    def name(
        folder: Path = one,
        *,
        version: str = "1",
        isa: str = "vec",
        rank: int = 0,
        codec: str = "lossless",
        **other: Any,
    ) -> bytes:
        config, kernels = config_of(folder, **other), {"instructions": isa}
        return keep(config, layout, (0, rank), kernels, codec, tmp_path, version).namespace

    assert name() == name(copied) == name(codec="raw") == name(codec="auto")
    different = [
        name(same_name),
        name(version="2"),
        name(isa="amx"),
        name(rank=1),
        name(model_config__dtype="bfloat16"),
        name(model_config__quantization="fp8"),
        name(model_config__hf_text_config=scaled),
        name(parallel_config__tensor_parallel_size=2),
    ]
    assert len({name(), *different}) == 1 + len(different)
    with pytest.raises(UsageError, match="take a lossless one"):
        name(codec="int4")
    with pytest.raises(ModelError):
        name(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"model_config__use_mla": True}, "latent attention"),
        ({"load_config__load_format": "dummy"}, "in no file"),
        ({"cache_config__cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "eagle"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_what_would_not_be_kept_right_is_refused(
    tmp_path: Path, other: dict[str, Any], why: str
) -> None:
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
    refuse_unknown(config_of(tmp_path), SimpleNamespace(kv_cache_groups=[group]))
    with pytest.raises(UsageError, match=why):
        refuse_unknown(config_of(tmp_path, **other), SimpleNamespace(kv_cache_groups=[group]))
    with pytest.raises(UsageError, match="full attention"):
        refuse_unknown(config_of(tmp_path), SimpleNamespace(kv_cache_groups=[group, group]))
