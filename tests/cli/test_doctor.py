"""`chatkv doctor`: what is broken is found and told with what to do, and nothing stops it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatkv.cli.checks import computing, keeping, surroundings
from chatkv.cli.checks.finding import Finding
from chatkv.paths import folders
from chatkv_store.blocks import BlockStore
from chatkv_store.environment import DATA_FILE
from program import Ran

Program = Callable[..., Ran]


@pytest.fixture
def model(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A model to be held conversations with, whatever is installed here."""
    found = tiny_checkpoint("llama2")
    monkeypatch.setenv("CHATKV_MODEL", str(found))
    return found


def _found(done: Ran) -> dict[str, list[dict[str, str]]]:
    by_area: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(done.out):
        by_area.setdefault(one["area"], []).append(one)
    return by_area


def _states(found: dict[str, list[dict[str, str]]]) -> set[str]:
    return {area for area, all in found.items() if any(one["state"] == "problem" for one in all)}


def test_a_sound_machine(process: Program, model: Path, talk: Callable[..., object]) -> None:
    talk("A talk", [("q", "a")])
    done = process("doctor", "--json")
    found = _found(done)
    assert done.code == bool(_states(found)) and done.err == ""
    assert _states(found) <= {"memory", "disk"}, "of a small machine"
    assert {"python", "torch", "gpu", "folders", "engine", "model"} <= set(found)
    assert "threads on" in found["torch"][0]["text"]
    assert found["conversations"][0]["text"].startswith("1 session, ")


def test_everything_broken_at_once_is_told(process: Program, home: Path, tmp_path: Path) -> None:
    """No torch, damaged stores, settings that make no sense, a model that is gone."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is not\\nhere')")
    (home / "cache" / "kv").mkdir(parents=True)
    (home / "cache" / "kv" / DATA_FILE).write_bytes(b"no LMDB" * 10_000)
    (home / "data").mkdir()
    (home / "data" / "conversations.sqlite3").write_bytes(b"no database" * 1000)
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text("model = 'x/y'\ntemperatur = 1\n")
    (home / "run").write_text("no folder")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONIOENCODING": "latin-1", "CHATKV_TEMPERATUR": "1"}
    done = process("doctor", "--json", PYTHONPATH=f"{path}{os.pathsep}{_packages()}", **variables)
    assert done.code == 1 and "Traceback" not in done.err
    found = _found(done)
    assert {"torch", "KV cache", "conversations", "settings", "locale"} <= _states(found)
    assert "runtime folder" in _states(found)
    assert "libtorch" in found["torch"][0]["text"] or "here" in found["torch"][0]["text"]
    assert "verify --repair" in found["KV cache"][0]["advice"]
    assert "line 2: there is no setting temperatur" in found["settings"][0]["text"]
    assert all(one["advice"] for all in found.values() for one in all if one["state"] == "problem")

    human = process("doctor", PYTHONPATH=f"{path}{os.pathsep}{_packages()}", **variables)
    assert human.code == 1 and "problem  torch" in human.out and "-> " in human.out
    assert "problems" in human.err


def _packages() -> str:
    from program import PYTHONPATH

    return PYTHONPATH


def _texts(findings: Any) -> list[tuple[str, str]]:
    return [(one.area, one.state) for one in findings]


def test_folders_that_others_may_open_or_nobody_may_write(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folders().make()
    assert _texts(keeping.folders(place)) == [("folders", "ok")]
    place.cache.chmod(0o750)
    (found,) = keeping.folders(place)
    assert found.state == "problem" and found.advice == f"chmod 700 {place.cache}"
    place.cache.chmod(0o700)
    refused = {place.data}
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, how: path not in refused and access(path, how))
    (found,) = keeping.folders(place)
    assert (found.area, found.state) == ("data folder", "problem")
    assert "CHATKV_HOME" in found.advice


def test_disks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folders().make()
    monkeypatch.setenv("CHATKV_KV_MIN_FREE_BYTES", "1000TiB")
    assert ("disk", "problem") in _texts(keeping.disk(place))
    monkeypatch.setenv("CHATKV_KV_MIN_FREE_BYTES", "1kB")
    monkeypatch.setattr(keeping, "_kind", lambda path: "nfs4")
    found = list(keeping.disk(place))
    assert [one for one in found if "lies on nfs4" in one.text and one.state == "problem"]


def test_pinned_kv_that_leaves_no_room(
    home: Path, talk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    BlockStore(folders().make().kv).close()
    monkeypatch.setattr(keeping, "_pinned_bytes", lambda place, store: 900)
    monkeypatch.setenv("CHATKV_KV_MAX_BYTES", "1000")
    assert _texts(keeping.kv(folders())) == [("KV cache", "ok"), ("pinned KV", "problem")]
    monkeypatch.setenv("CHATKV_KV_MAX_BYTES", "10000")
    assert _texts(keeping.kv(folders())) == [("KV cache", "ok"), ("pinned KV", "ok")]


def test_conversations_whose_pages_are_damaged(home: Path, talk: Callable[..., object]) -> None:
    talk("long", [("q" * 5000, "word " * 20_000)])
    path = folders().conversations
    assert [one.state for one in keeping.conversations(folders())] == ["ok"]
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(b"\xff" * (path.stat().st_size - 8192))
    (found,) = keeping.conversations(folders())
    assert found.state == "problem" and "damaged" in found.text and found.advice


def test_models_that_are_gone_or_left_over(home: Path, model: Path) -> None:
    place = folders().make()
    assert next(keeping.models(place, str(model))).state == "ok"
    (found, *_) = keeping.models(place, "org/none")
    assert found.state == "problem" and "`chatkv models pull org/none`" in found.advice
    copy = place.models / ("0" * 32 + "-float32")
    copy.mkdir(parents=True)
    (copy / "model.safetensors").write_bytes(b"x" * 2048)
    assert [one.text for one in keeping.models(place, str(model)) if one.state == "note"] == [
        "1 prepared copy of files that are gone take 2.00 KiB"
    ]


@pytest.mark.parametrize(
    ("change", "states"),
    [
        ({"gpu": {"capability": [9, 0]}}, {"gpu": "ok", "triton": "ok"}),
        ({"gpu": {"capability": [7, 5]}}, {"gpu": "note"}),
        ({"gpu": {"capability": [8, 0]}, "triton": False}, {"gpu": "ok", "triton": "problem"}),
        ({"version": "2.4.1"}, {"torch": "problem"}),
        ({"threads": 1}, {"torch": "note"}),
    ],
)
def test_torch_and_its_gpu(
    change: dict[str, Any], states: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's machine would report."""
    report: dict[str, Any] = {
        "version": "2.11.0+cu130",
        "threads": 2,
        "capability": "AVX512",
        "bfloat16": True,
        "cuda_build": "13.0",
        "triton": True,
        "gpu": None,
    } | change
    if report["gpu"] is not None:
        report["gpu"] |= {"name": "H200", "free_bytes": 1 << 34, "total_bytes": 1 << 35}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    answer = SimpleNamespace(communicate=lambda timeout: (json.dumps(report), ""), returncode=0)
    monkeypatch.setattr(computing.subprocess, "Popen", lambda *_, **__: answer)
    found: dict[str, Finding] = {one.area: one for one in computing.Torch().checks()}
    assert {area: found[area].state for area in states} == states
    assert all(one.advice for one in found.values() if one.state == "problem")


def test_a_setting_that_asks_for_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATKV_DEVICE", "cuda")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    (found,) = computing._gpu({"gpu": None, "cuda_build": None})
    assert found.state == "problem"


def test_an_engine_that_does_not_answer(home: Path) -> None:
    import fcntl

    place = folders().make()
    assert [one.state for one in surroundings.engine(place)] == ["ok"]
    with place.engine_lock.open("w+") as lock:
        lock.write(str(os.getpid()))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        (found,) = surroundings.engine(place)
    assert found.state == "problem" and f"process {os.getpid()} holds it" in found.text


def test_it_changes_nothing(
    program: Program, home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = SimpleNamespace(communicate=lambda timeout: ("", "no torch"), returncode=1)
    monkeypatch.setattr(computing.subprocess, "Popen", lambda *_, **__: answer)
    before = dict(os.environ)
    assert "torch" in program("doctor", "-q").out.splitlines()
    assert list(home.iterdir()) == [] and dict(os.environ) == before
    shutil.rmtree(home)
    assert program("doctor", "-q").code == 1 and not home.exists()
