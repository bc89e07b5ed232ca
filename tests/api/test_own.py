"""/status, /cache and /metrics: what is there, and that each sees its own of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from chatkv.server.listen import Access
from engines import eventually
from served import Answer, ask, chat, served, user

LONG = "the history is not read again and the session holds many blocks " * 6
ANNA, BERT = "anna-secret", "bert-secret"


@pytest.fixture(scope="module")
def guarded(own_home: Path, model: str) -> Iterator[str]:
    with served(model, access=Access((ANNA, BERT))) as url:
        yield url


def look(url: str, path: str, token: str) -> Answer:
    return ask(url, path, Authorization=f"Bearer {token}")


def session_of(url: str, token: str, text: str) -> str:
    got = chat(url, [user(text)], headers={"Authorization": f"Bearer {token}"})
    return got.headers["x-chatkv-session"]


def test_each_token_sees_what_is_its_own(guarded: str) -> None:
    annas = session_of(guarded, ANNA, f"Anna. {LONG}")
    berts = session_of(guarded, BERT, f"Bert. {LONG}")

    def stored(token: str) -> dict[str, Any]:
        rows = look(guarded, "/cache/sessions", token).json["sessions"]
        return {row["session"]: row for row in rows}

    eventually(lambda: stored(ANNA)[annas]["bytes"] and stored(BERT)[berts]["bytes"])
    assert set(stored(ANNA)) == {annas} and set(stored(BERT)) == {berts}

    def is_all_of_it() -> bool:
        total, row = look(guarded, "/cache", ANNA).json, stored(ANNA)[annas]
        num_bytes = total["unique_bytes"] + total["shared_bytes"]
        found = num_bytes, total["sessions"], total["stored_tokens"]
        return bool(found == (row["bytes"], 1, row["stored_tokens"]))

    eventually(is_all_of_it)  # between the two questions another block may have been written
    total = look(guarded, "/cache", ANNA).json
    # The machine as a whole is nobody's with a token.
    assert not {"file_bytes", "disk_free_bytes", "written_bytes"} & total.keys()
    stats = look(guarded, "/cache/stats", BERT).json
    assert stats["turns"] == 1 and "written_bytes" not in stats
    status = look(guarded, "/status", ANNA).json
    assert set(status["open_sessions"]) == {annas} and "memory_bytes" not in status
    assert not {"spec", "gpu_bytes"} & status["models"][0].keys()
    for path in ("/status", "/cache", "/cache/sessions", "/cache/stats", "/metrics"):
        assert ask(guarded, path).status == 401
        assert berts not in look(guarded, path, ANNA).body.decode()
        foreign = ask(guarded, path, Authorization=f"Bearer {ANNA}", Origin="tauri://localhost")
        assert foreign.status == (200 if path == "/metrics" else 403)


def test_without_a_token_all_is_seen(
    own_home: Path, model: str, guarded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHATKV_HOME", str(tmp_path))
    with served(model) as url:
        messages = [user(LONG)]
        session = chat(url, messages).headers["x-chatkv-session"]
        for path in ("/status", "/cache", "/cache/sessions", "/cache/stats"):
            assert ask(url, path).status == 200, path

        def stored() -> list[dict[str, Any]]:
            return ask(url, "/cache/sessions?limit=5").json["sessions"]

        # Blocks are written one after another: one of them is not yet the whole history.
        eventually(lambda: sum(row["stored_tokens"] for row in stored()) > 64)
        total = ask(url, "/cache").json
        assert total["file_bytes"] >= total["used_bytes"] > 0 and total["max_bytes"] > 0
        (row,) = stored()
        assert row["session"] == session and row["stored_tokens"] > 64
        assert ask(url, "/cache/stats").json["turns"] == 1
        assert ask(url, "/status").json["memory_bytes"] > 1 << 20
        for wrong in ("0", "-1", "x", "1001", "9" * 30, "²"):
            got = ask(url, f"/cache/sessions?limit={quote(wrong)}")
            assert got.status == 400, wrong
        assert ask(url, "/cache", b"{}").status == 405  # nothing here changes anything
        counted = ask(url, "/metrics").body.decode()
    lines = [line for line in counted.splitlines() if not line.startswith("#")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert values["chatkv_disk_written_blocks_total"] >= 1
    assert values["chatkv_prompt_computed_tokens_count"] == 1
    assert values['chatkv_prompt_computed_tokens_bucket{le="0"}'] == 0
    assert values['chatkv_prompt_computed_tokens_bucket{le="+Inf"}'] == 1
    assert values["chatkv_models_loaded"] == 1 and values["chatkv_memory_bytes"] > 1 << 20
    total_kv = next(v for k, v in values.items() if k.startswith("chatkv_kv_bytes"))
    assert total_kv > 0
    described = {line.split()[2] for line in counted.splitlines() if line.startswith("# TYPE")}
    bases = {name.partition("{")[0] for name in values}
    ends = ("_bucket", "_sum", "_count")
    assert all(
        base in described
        or base.removesuffix(next((e for e in ends if base.endswith(e)), "")) in described
        for base in bases
    )
