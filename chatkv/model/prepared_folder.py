"""A folder that a model is prepared in: made whole or not at all, once for all processes, and known
by its record."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chatkv.errors import ModelError
from chatkv.model.config import ModelConfig

# Raised whenever what is written, or how it is converted, changes; older folders are made anew.
FORMAT = 1

RECORD, TOKENIZER, WEIGHTS = "prepared.json", "tokenizer.json", "model.safetensors"


@dataclass(frozen=True)
class Record:
    """`prepared.json`: what a folder holds, and how large its other files must be. `scheme`: the
    digest of what the checkpoint's config says of quantised weights."""

    format: int
    config: dict[str, Any]
    template: str | None
    special_tokens: dict[str, str]
    eos_ids: list[int]
    file_sizes: dict[str, int] = field(default_factory=dict)
    scheme: str = ""


def read_record(folder: Path, scheme: bytes = b"") -> Record | None:
    """The record of a sound folder of this format, made by `scheme`; None where it must be made
    (anew)."""
    try:
        fields = json.loads((folder / RECORD).read_bytes())
        if fields.get("format") != FORMAT:
            return None
        record = Record(**fields)
        if record.scheme != scheme.hex():
            return None
        ModelConfig.from_json(record.config)
        is_whole = WEIGHTS in record.file_sizes and all(
            (folder / name).stat().st_size == size for name, size in record.file_sizes.items()
        )
        return record if is_whole else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def make_once(
    name: str, folder: Path, make: Callable[[Path], Record], scheme: bytes = b""
) -> Record:
    """Make a temporary folder, renamed to `folder`, unless another process just has."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if record := read_record(folder, scheme):
                return record
            # Whoever left these died in the middle: the lock says nobody is at work on them.
            for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
            try:
                record = make(temporary)
                if folder.exists():
                    # Moved aside first: a process that runs on it keeps its mapping.
                    folder.rename(temporary / "replaced")
                temporary.rename(folder)
                shutil.rmtree(folder / "replaced", ignore_errors=True)
                _sync(folder.parent)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise ModelError(
            f"cannot prepare {name} in {folder.parent}: {error.strerror or error}"
        ) from error
    return record


def recorded(
    folder: Path,
    config: ModelConfig,
    template: str | None,
    special_tokens: dict[str, str],
    eos_ids: list[int],
    scheme: bytes = b"",
) -> Record:
    """Write the record of a folder whose other files are all there."""
    record = Record(
        format=FORMAT,
        config=config.to_json(),
        template=template,
        special_tokens=special_tokens,
        eos_ids=eos_ids,
        file_sizes={file.name: file.stat().st_size for file in folder.iterdir()},
        scheme=scheme.hex(),
    )
    with (folder / RECORD).open("w", encoding="utf-8") as out:
        json.dump(asdict(record), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    _sync(folder)
    return record


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which ends with the process whatever becomes of it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Make renames in `folder` outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
