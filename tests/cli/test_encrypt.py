"""`chatkv encrypt`, and a chat whose cache is locked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatkv_store.encryption import KEY_FILE_VARIABLE
from program import PYTHONPATH, Ran

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


KEYRING = """
import os, pathlib
_kept = pathlib.Path(os.environ["KEYRING_FILE"])

def get_password(service, user):
    assert (service, user) == ("chatkv", "kv-cache")
    if _kept.is_dir():
        raise RuntimeError("the keyring is locked")
    return _kept.read_text() if _kept.exists() else None

def set_password(service, user, password):
    assert (service, user) == ("chatkv", "kv-cache")
    if _kept.is_dir():
        raise RuntimeError("the keyring is locked")
    _kept.write_text(password)
"""


@pytest.fixture
def keyring(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Where a keyring keeps its one password, and the variables with which the program finds it.

    The library is the system's edge: a module of its name with the two functions that are used.
    """
    kept = tmp_path / "kept-by-keyring"
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "keyring.py").write_text(KEYRING)
    path = os.pathsep.join([str(tmp_path / "libraries"), PYTHONPATH])
    return kept, {"PYTHONPATH": path, "KEYRING_FILE": str(kept)}


def test_a_passphrase_is_left_with_the_keyring_and_found_there(
    terminal: Callable[..., Ran],
    process: Callable[..., Ran],
    keyring: tuple[Path, dict[str, str]],
    tmp_path: Path,
) -> None:
    kept, variables = keyring

    def state(**more: str) -> Any:
        return json.loads(process("encrypt", "status", "--json", **{**variables, **more}).out)

    def on(*answers: tuple[str, str]) -> Ran:
        return terminal("encrypt", "on", answers=answers, **variables)

    first, again, sure = "Passphrase: ", "Repeat for confirmation: ", "Go on? [y/N]: "
    declined = on((first, "geheim"), (again, "geheim"), (sure, "n"))
    assert declined.code == 1 and not kept.exists() and not state()["kv"]
    done = on(
        (first, "geheim"), (again, "other"), (first, "gehéim"), (again, "gehéim"), (sure, "y")
    )
    assert done.code == 0 and "encrypted from now on" in done.out, done.out
    assert "geh" not in done.out, "a passphrase is not shown"
    assert kept.read_text() == "gehéim"
    assert state() == {"kv": True, "conversations": False, "locked": None}
    kept.write_text("another")
    assert "wrong passphrase" in state()["locked"]
    (tmp_path / "key").write_text("gehéim")
    named = state(**{KEY_FILE_VARIABLE: str(tmp_path / "key")})
    assert named["locked"] is None, "the file comes first"
    kept.unlink()
    assert KEY_FILE_VARIABLE in state()["locked"]
    kept.mkdir()
    assert KEY_FILE_VARIABLE in state()["locked"], "a keyring that fails is one that has nothing"
    assert process("cache", "ls", **variables).err.count("\n") == 1


@pytest.mark.parametrize("keeps", ["locked", "nothing"])
def test_a_keyring_that_keeps_nothing_is_said_before_anything_is_emptied(
    terminal: Callable[..., Ran], keyring: tuple[Path, dict[str, str]], home: Path, keeps: str
) -> None:
    kept, variables = keyring
    if keeps == "locked":
        kept.mkdir()
    else:
        variables["KEYRING_FILE"] = os.devnull
    answers = (
        ("Passphrase: ", "geheim"),
        ("Repeat for confirmation: ", "geheim"),
        ("Go on? [y/N]: ", "y"),
    )
    refused = terminal("encrypt", "on", answers=answers, **variables)
    assert refused.code == 2 and "does not keep the passphrase" in refused.out, refused.out
    assert ("the keyring is locked" in refused.out) == (keeps == "locked")
    assert KEY_FILE_VARIABLE in refused.out and "Traceback" not in refused.out
    assert not (home / "cache" / "kv").exists()


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
