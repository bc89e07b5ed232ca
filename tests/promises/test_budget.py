"""A chat whose KV no longer fits goes on all the same, and its files keep to their cap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv_store import BlockStore
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
