"""Digests of weights: of contents alone, and computed once per state of a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from chatkv.errors import ModelError
from chatkv.model import identity
from chatkv.model.identity import weights_digest


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose contents were read, in order; every file counts as written long ago."""
    read: list[Path] = []
    original = identity._hash

    def hash_and_note(file: Path, progress: identity.Progress | None) -> bytes:
        read.append(file)
        return original(file, progress)

    monkeypatch.setattr(identity, "_hash", hash_and_note)
    monkeypatch.setattr(identity, "_SETTLED_NS", -1)
    return read


def _file(path: Path, content: bytes = b"weights") -> Path:
    path.write_bytes(content)
    return path


def test_contents_count_and_names_do_not(tmp_path: Path) -> None:
    one, same = _file(tmp_path / "a"), _file(tmp_path / "b")
    other = _file(tmp_path / "c", b"other")
    digests = [weights_digest([file], tmp_path / "cache") for file in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 32
    both = weights_digest([one, other], tmp_path / "cache")
    assert both != weights_digest([other, one], tmp_path / "cache")
    assert both != digests[0]


def test_pieces_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path / "a", os.urandom(5000))
    whole = weights_digest([file], tmp_path / "one")
    monkeypatch.setattr(identity, "_PIECE_BYTES", 7)
    steps: list[tuple[str, int, int]] = []
    assert weights_digest([file], tmp_path / "two", lambda *step: steps.append(step)) == whole
    assert steps[0] == ("reading the model", 7, 5000)
    assert steps[-1] == ("reading the model", 5000, 5000)


def test_an_unchanged_file_is_read_once(tmp_path: Path, hashed: list[Path]) -> None:
    file = _file(tmp_path / "a")
    first = weights_digest([file], tmp_path / "cache")
    assert weights_digest([file], tmp_path / "cache") == first
    assert hashed == [file]


def test_a_changed_file_is_read_again(tmp_path: Path, hashed: list[Path]) -> None:
    """Also one of the same size whose time of change was set back, or that was swapped for
    another."""
    file = _file(tmp_path / "a")
    before = file.stat()
    first = weights_digest([file], tmp_path / "cache")
    time.sleep(0.02)  # more than the clock tick of file systems
    _file(file, b"WEIGHTS")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_digest([file], tmp_path / "cache") != first

    other = _file(tmp_path / "b")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    assert weights_digest([file], tmp_path / "cache") == first
    assert len(hashed) == 3


def test_a_file_just_written_is_not_remembered(
    tmp_path: Path, hashed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_SETTLED_NS", 10**12)
    file = _file(tmp_path / "a")
    weights_digest([file], tmp_path / "cache")
    weights_digest([file], tmp_path / "cache")
    assert hashed == [file, file]


def test_notes_that_cannot_be_read_or_written_cost_time_only(
    tmp_path: Path, hashed: list[Path]
) -> None:
    file = _file(tmp_path / "a")
    first = weights_digest([file], tmp_path / "cache")
    (note,) = (tmp_path / "cache" / "digests").iterdir()
    for content in (b"", b"{", b"[]", b'{"digest": "00", "state": []}', b"\xff\xfe"):
        note.write_bytes(content)
        assert weights_digest([file], tmp_path / "cache") == first
    blocked = _file(tmp_path / "no-folder")
    assert weights_digest([file], blocked) == first
    assert len(hashed) == 7


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _file(tmp_path / "a")
    monkeypatch.setattr(identity, "_hash", lambda *_: (_file(file, b"longer now"), b"x" * 32)[1])
    with pytest.raises(ModelError, match="changed while it was read"):
        weights_digest([file], tmp_path / "cache")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*missing"):
        weights_digest([tmp_path / "missing"], tmp_path / "cache")
