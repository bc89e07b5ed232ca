"""A cache that is not what it should be costs time, never a conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from chatkv.restore import disk
from chatkv.restore.restorer import Restorer
from chatkv_store.errors import StoreFull
from turns import run_turns

NOTES = ("costs.json", "dtype.json")


def _cache_is_a_file(home: Path) -> None:
    (home / "cache").write_text("in the way")


def _home_is_a_file(home: Path) -> None:
    home.rmdir()
    home.write_text("in the way")


def _notes_are_folders(home: Path) -> None:
    for name in NOTES:
        (home / "cache" / name / "in the way").mkdir(parents=True)
    (home / "cache" / "kv").write_text("in the way")


def _notes_are_nonsense(home: Path) -> None:
    (home / "cache" / "kv").parent.mkdir()
    (home / "cache" / "kv").write_text("in the way")
    for name in NOTES:
        (home / "cache" / name).write_bytes(b"\xff\x00{")


@pytest.mark.parametrize(
    "spoil", [_cache_is_a_file, _home_is_a_file, _notes_are_folders, _notes_are_nonsense]
)
def test_a_turn_goes_through(
    spoil: Callable[[Path], None],
    home: Path,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CHATKV_CALIBRATE", raising=False)  # as a user has it
    spoil(home)
    results = run_turns(["hello", "more"], model=str(tiny_checkpoint("llama3")), dtype="auto")
    assert [turn["turn"] for turn in results] == [1, 2]
    assert any("KV is not kept" in line for line in results[0]["runtime_notices"])


def test_a_disk_without_room_to_measure_in(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFull("the disk is full")

    monkeypatch.delenv("CHATKV_CALIBRATE", raising=False)
    monkeypatch.setattr(Restorer, "calibrate", full)
    assert run_turns(["hello"], model=str(tiny_checkpoint("llama3")))[0]["turn"] == 1


def test_a_cache_that_may_not_be_looked_into(
    home: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even to see how large its disk is; simulated, since root may look into everything."""

    def forbidden(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(disk, "default_budget", forbidden)
    result = run_turns(["hello"], model=str(tiny_checkpoint("llama3")))[0]
    assert any("Permission denied" in line for line in result["runtime_notices"])
