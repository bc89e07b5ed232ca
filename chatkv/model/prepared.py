"""A model made ready to run: what a start needs, in the form that a start reads fastest.

A GGUF is converted once: dequantised, renamed, its tokenizer rebuilt, all written to one folder
below `models_dir` that later starts only map (SmolLM2: 4 s once, under 1 ms from then on).
A Hugging Face checkpoint already has that form and is read where it lies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from chatkv.errors import ModelError
from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.identity import Progress, weights_digest

Dtype = Literal["bfloat16", "float16", "float32"]

# Raised whenever what is written, or how it is converted, changes; older folders are made anew.
FORMAT = 1

_RECORD, _TOKENIZER, _WEIGHTS = "prepared.json", "tokenizer.json", "model.safetensors"


@dataclass(frozen=True)
class PreparedModel:
    """Everything about a model but its tensors.

    `weights_digest` names the weights as they are computed with: files, conversion and dtype.
    `special_tokens`: "bos_token", "eos_token", ... -> text, as chat templates use them.
    `template` is the chat template's source, None where the model has none.
    """

    name: str
    folder: Path
    dtype: Dtype
    config: ModelConfig
    weights_digest: bytes
    weights: tuple[Path, ...]
    tokenizer_path: Path
    template: str | None
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Record:
    """`prepared.json`: what a folder holds, and how large its other files must be."""

    format: int
    config: dict[str, Any]
    template: str | None
    special_tokens: dict[str, str]
    eos_ids: list[int]
    file_sizes: dict[str, int] = field(default_factory=dict)


def prepare(
    files: ModelFiles, dtype: Dtype, models_dir: Path, progress: Progress | None = None
) -> PreparedModel:
    """The model in `files`, ready to run in `dtype`; converted first where that was not done yet.

    Several processes may prepare one model at a time: one converts, the others wait for it.
    Raises ModelError for a model that cannot be read or is not supported, and for a full disk.
    """
    files_digest = weights_digest(files.files, models_dir, progress)
    digest = hashlib.sha256(f"{files.kind}:{FORMAT}:{dtype}:".encode() + files_digest).digest()
    if files.kind == "hf":
        from chatkv.model.hf_checkpoint import read_checkpoint

        checkpoint = read_checkpoint(files.path)
        return PreparedModel(
            name=files.name,
            folder=files.path,
            dtype=dtype,
            weights_digest=digest,
            weights=files.files,
            **checkpoint,
        )

    folder = models_dir / f"{files_digest.hex()[:32]}-{dtype}"
    record = _read_record(folder)
    if record is None:
        record = _convert_once(files, dtype, folder, progress)
    return PreparedModel(
        name=files.name,
        folder=folder,
        dtype=dtype,
        config=ModelConfig.from_json(record.config),
        weights_digest=digest,
        weights=(folder / _WEIGHTS,),
        tokenizer_path=folder / _TOKENIZER,
        template=record.template,
        special_tokens=record.special_tokens,
        eos_ids=tuple(record.eos_ids),
    )


def _read_record(folder: Path) -> _Record | None:
    """The record of a sound folder of this format; None where it must be made (anew)."""
    try:
        fields = json.loads((folder / _RECORD).read_bytes())
        if fields.get("format") != FORMAT:
            return None
        record = _Record(**fields)
        ModelConfig.from_json(record.config)
        sizes = {name: (folder / name).stat().st_size for name in (_TOKENIZER, _WEIGHTS)}
        return record if sizes == record.file_sizes else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _convert_once(
    files: ModelFiles, dtype: Dtype, folder: Path, progress: Progress | None
) -> _Record:
    """Convert into a temporary folder, renamed to `folder`, unless another process just has."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if record := _read_record(folder):
                return record
            # Whoever left these died in the middle: the lock says nobody is at work on them.
            for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
            try:
                record = _convert_gguf(files, dtype, temporary, progress)
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
            f"cannot prepare {files.name} in {folder.parent}: {error.strerror or error}"
        ) from error
    return record


def _convert_gguf(
    files: ModelFiles, dtype: Dtype, folder: Path, progress: Progress | None
) -> _Record:
    from chatkv.model.gguf_config import config_from_gguf
    from chatkv.model.gguf_file import open_gguf
    from chatkv.model.gguf_tokenizer import tokenizer_from_gguf
    from chatkv.model.gguf_weights import tensor_sources
    from chatkv.model.tensor_file import write_safetensors
    from chatkv.model.weights import TORCH_DTYPES

    def written(done: int, total: int) -> None:
        if progress:
            progress("preparing the model", done, total)

    written(0, 1)
    file = open_gguf(files.path)
    config = config_from_gguf(file)
    sources = tensor_sources(file, config)
    tokenizer = tokenizer_from_gguf(file)
    (folder / _TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    write_safetensors(folder / _WEIGHTS, sources, TORCH_DTYPES[dtype], written)

    template = file.metadata.get("tokenizer.chat_template")
    record = _Record(
        format=FORMAT,
        config=config.to_json(),
        template=template if isinstance(template, str) and template.strip() else None,
        special_tokens=_special_tokens(file.metadata),
        eos_ids=_eos_ids(file.metadata),
        file_sizes={name: (folder / name).stat().st_size for name in (_TOKENIZER, _WEIGHTS)},
    )
    with (folder / _RECORD).open("w", encoding="utf-8") as out:
        json.dump(asdict(record), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    _sync(folder)
    return record


def _special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {
        f"{name}_token": metadata.get(f"tokenizer.ggml.{key}_token_id")
        for key, name in names.items()
    }
    return {name: tokens[id] for name, id in found.items() if id is not None and id < len(tokens)}


def _eos_ids(metadata: dict[str, Any]) -> list[int]:
    """Ends of text, of turn and of message."""
    ids = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    return sorted(id for id in ids if id is not None)


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
