"""Which weights these are: a digest of their bytes, remembered while the files stay as they are.

The digest is part of every KV block's key, so two models under one name never share KV, and one
model under two names does.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from chatkv.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, bytes done, bytes in all)."""

_PIECE_BYTES = 8 << 20
# A file written this recently could be written again within the same clock tick, with the same
# size and time stamps: its digest is right, but not remembered.
_SETTLED_NS = 20_000_000


def weights_digest(files: Sequence[Path], cache: Path, progress: Progress | None = None) -> bytes:
    """32 bytes: SHA-256 over the contents of the weight files, in the order given.

    The digest of each file is remembered below `cache` under the file's path, and used while its
    size, inode and both time stamps are the same. Raises ModelError where a file cannot be read.
    """
    total = hashlib.sha256(b"chatkv weights")
    for file in files:
        total.update(_file_digest(file, cache, progress))
    return total.digest()


def remembered_digest(files: Sequence[Path], cache: Path) -> bytes | None:
    """What `weights_digest` would return, None where a file would have to be read for it."""
    total = hashlib.sha256(b"chatkv weights")
    for file in files:
        try:
            digest = _recall(_note(file, cache), _state(file))
        except OSError:
            return None
        if digest is None:
            return None
        total.update(digest)
    return total.digest()


def remembered_files(cache: Path) -> list[Path]:
    """Every file whose digest is remembered, whether it is still there or not."""
    found = []
    for note in sorted((cache / "digests").glob("*.json")):
        try:
            path = json.loads(note.read_bytes())["state"][0]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue
        if isinstance(path, str):
            found.append(Path(path))
    return found


def forget_digest(file: Path, cache: Path) -> None:
    """Remember a file's digest no longer. Raises OSError."""
    _note(file, cache).unlink(missing_ok=True)


def _note(file: Path, cache: Path) -> Path:
    return cache / "digests" / f"{hashlib.sha256(os.fsencode(file)).hexdigest()[:32]}.json"


def _file_digest(file: Path, cache: Path, progress: Progress | None) -> bytes:
    note = _note(file, cache)
    try:
        state = _state(file)
        remembered = _recall(note, state)
        if remembered is None:
            remembered = _hash(file, progress)
            if _state(file) != state:
                raise ModelError(f"{file} changed while it was read: try again")
            if time.time_ns() - file.stat().st_mtime_ns > _SETTLED_NS:
                _remember(note, state, remembered)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    return remembered


def _state(file: Path) -> list[int | str]:
    """What changes whenever a file's contents do."""
    stat = file.stat()
    return [os.fspath(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _hash(file: Path, progress: Progress | None) -> bytes:
    digest = hashlib.sha256()
    size, done = file.stat().st_size, 0
    with file.open("rb", buffering=0) as source:
        while piece := source.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            if progress:
                progress("reading the model", done, size)
    return digest.digest()


def _recall(note: Path, state: list[int | str]) -> bytes | None:
    try:
        fields = json.loads(note.read_bytes())
        digest = bytes.fromhex(fields["digest"])
        return digest if fields["state"] == state and len(digest) == 32 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(note: Path, state: list[int | str], digest: bytes) -> None:
    """Write the note whole or not at all; a cache that cannot be written only costs time."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=note.parent, prefix=".note-")
        with open(handle, "w") as out:
            json.dump({"state": state, "digest": digest.hex()}, out)
        os.replace(name, note)
    except OSError:
        return
