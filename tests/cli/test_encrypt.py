"""`chatkv encrypt`, and a chat whose cache is locked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv_store.encryption import KEY_FILE_VARIABLE
from program import Ran

pytest.importorskip("cryptography")


def test_on_status_off(
    home: Path, tmp_path: Path, program: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(program("encrypt", "status", "--json").out)["kv"] is False
    refused = program("encrypt", "on", "-y")
    assert refused.code == 2 and KEY_FILE_VARIABLE in refused.err
    key = tmp_path / "key"
    key.write_text("secret")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    assert program("encrypt", "on").code == 2, "never without being asked"
    done = program("encrypt", "on", "-y")
    assert done.code == 0 and "conversations themselves are not encrypted" in done.err
    assert json.loads(program("encrypt", "status", "--json").out) == {
        "kv": True,
        "conversations": False,
        "locked": None,
    }
    key.write_text("another")
    locked = json.loads(program("encrypt", "status", "--json").out)
    assert locked["kv"] is True and "wrong passphrase" in locked["locked"]
    assert program("cache", "ls").err.startswith("chatkv: wrong passphrase")
    assert program("encrypt", "off", "-y").code == 0
    assert json.loads(program("encrypt", "status", "--json").out)["kv"] is False


def test_a_chat_with_an_encrypted_cache_resumes_and_a_locked_one_goes_on(
    home: Path,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    program: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(key))
    assert program("encrypt", "on", "-y").code == 0
    ask = ("ask", "-m", str(tiny_checkpoint("llama3")), "--max-tokens", "4", "--json")
    assert program(*ask, "word " * 60).code == 0
    again = program(*ask, "-c", "and?", "--restore", "reload")
    assert json.loads(again.out)["tokens"]["loaded"] > 60, again.err
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    locked = program(*ask, "-c", "and now?")
    assert locked.code == 0 and "KV is not kept" in locked.err and "is encrypted" in locked.err
    assert json.loads(locked.out)["tokens"]["loaded"] == 0
