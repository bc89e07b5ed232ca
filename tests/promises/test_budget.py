"""A chat whose KV no longer fits goes on all the same, and its files keep to their cap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.client import ChatRequest, open_chat
from chatkv.paths import folders
from chatkv.restore.cost import CostFile, CostModel, cost_key
from chatkv_store import BlockStore
from chatkv_store.eviction import DEFAULT_RATES
from turns import run_turns


def test_a_chat_never_notices_that_the_cache_is_full(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cap = 600_000
    monkeypatch.setenv("CHATKV_KV_MAX_BYTES", str(cap))
    options = {"model": str(tiny_checkpoint("llama3")), "dtype": "bfloat16", "max_tokens": 100}
    for number in range(4):
        texts = [f"{number}: tell me something long " * 8]
        (turn,) = run_turns(texts, **options)
        assert turn["text"] and turn["notices"] == [] and turn["runtime_notices"] == []
        files = [path for path in (home / "cache" / "kv").iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= cap
    with BlockStore(home / "cache" / "kv", read_only=True) as store:
        counters = store.counters()
        assert store.verify() == []
    assert counters["evicted_blocks"] + counters["refused_blocks"] > 0, counters
    monkeypatch.setenv("CHATKV_KV_MAX_BYTES", "rather little")
    (turn,) = run_turns(["Hello"], **options)
    assert turn["text"], "a setting that makes no sense costs persistence of KV, not the chat"
    assert any("CHATKV_KV_MAX_BYTES" in notice for notice in turn["runtime_notices"])


def test_what_is_kept_goes_by_what_this_machine_was_measured_to_take(
    home: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """Also after the store was opened: rates follow the turns."""
    request = ChatRequest(str(tiny_checkpoint("llama3")), "float32")
    with open_chat(folders(), request) as chat:
        disk = chat.runtime.restorer.disk
        assert disk is not None and disk.store.prefill_rates is not None
        assert disk.store.prefill_rates(disk.namespace) == DEFAULT_RATES
        key = cost_key(disk.namespace, chat.runtime.engine.decoder.device.type)
        measured = CostModel(
            prefill_s_per_token=0.02, prefill_s_per_token_pair=1e-6, num_observations=1
        )
        CostFile(folders().costs).save(key, "tiny", measured)
        assert disk.store.prefill_rates(disk.namespace) == (0.02, 1e-6)
        assert disk.store.prefill_rates(bytes(32)) == DEFAULT_RATES, "of a model never measured"
