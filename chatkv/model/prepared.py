"""A model made ready to run: what a start needs, in the form that a start reads fastest.

A GGUF is converted once: dequantised, renamed, its tokenizer rebuilt, all written to one folder
below `models_dir` that later starts only map (SmolLM2: 4 s once, under 1 ms from then on).
A Hugging Face checkpoint already has that form and is read where it lies. Where weights are to be
quantised, that too is done once and written, the checkpoint's as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chatkv.errors import ModelError
from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.identity import Progress, weights_digest

if TYPE_CHECKING:
    from chatkv.model.tensor_file import TensorSource

Dtype = Literal["bfloat16", "float16", "float32"]
Quantised = Literal["int8", "fp8", "int4"]
Stored = Literal["full", "int8", "fp8", "int4"]

# Raised whenever what is written, or how it is converted, changes; older folders are made anew.
FORMAT = 1

_RECORD, _TOKENIZER, _WEIGHTS = "prepared.json", "tokenizer.json", "model.safetensors"


@dataclass(frozen=True)
class PreparedModel:
    """Everything about a model but its tensors.

    `weights_digest` names the weights as they are computed with: files, conversion, dtype and
    quantisation. `quantised` says how projections are stored, None where they are of the dtype.
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
    quantised: Quantised | None = None

    @property
    def stored(self) -> Stored:
        """How projections are stored: "full" is in the dtype."""
        return self.quantised or "full"

    @property
    def numbers(self) -> str:
        """What it computes with, as people read it: "bfloat16", "bfloat16 with int4 weights"."""
        return (
            self.dtype if self.quantised is None else f"{self.dtype} with {self.quantised} weights"
        )


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
    files: ModelFiles,
    dtype: Dtype,
    models_dir: Path,
    progress: Progress | None = None,
    quantised: Quantised | None = None,
) -> PreparedModel:
    """The model in `files`, ready to run in `dtype`; converted first where that was not done yet.

    Several processes may prepare one model at a time: one converts, the others wait for it.
    Raises ModelError for a model that cannot be read or is not supported, and for a full disk.
    """
    files_digest = weights_digest(files.files, models_dir, progress)
    stored = dtype if quantised is None else f"{dtype}-{quantised}"
    digest = hashlib.sha256(f"{files.kind}:{FORMAT}:{stored}:".encode() + files_digest).digest()
    folder = models_dir / f"{files_digest.hex()[:32]}-{stored}"
    if files.kind == "hf":
        from chatkv.model.hf_checkpoint import read_checkpoint

        prepared = PreparedModel(
            name=files.name,
            folder=files.path,
            dtype=dtype,
            weights_digest=digest,
            weights=files.files,
            **read_checkpoint(files.path),
        )
        if quantised is None:
            return prepared
        return _quantised_once(prepared, quantised, folder, progress)

    def convert(made: Path) -> _Record:
        return _convert_gguf(files, dtype, quantised, made, progress)

    record = _read_record(folder) or _make_once(files.name, folder, convert)
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
        quantised=quantised,
    )


def _read_record(folder: Path) -> _Record | None:
    """The record of a sound folder of this format; None where it must be made (anew)."""
    try:
        fields = json.loads((folder / _RECORD).read_bytes())
        if fields.get("format") != FORMAT:
            return None
        record = _Record(**fields)
        ModelConfig.from_json(record.config)
        is_whole = _WEIGHTS in record.file_sizes and all(
            (folder / name).stat().st_size == size for name, size in record.file_sizes.items()
        )
        return record if is_whole else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _make_once(name: str, folder: Path, make: Callable[[Path], _Record]) -> _Record:
    """Make a temporary folder, renamed to `folder`, unless another process just has."""
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


def _convert_gguf(
    files: ModelFiles,
    dtype: Dtype,
    quantised: Quantised | None,
    folder: Path,
    progress: Progress | None,
) -> _Record:
    from chatkv.model.gguf_config import config_from_gguf
    from chatkv.model.gguf_file import open_gguf
    from chatkv.model.gguf_tokenizer import tokenizer_from_gguf
    from chatkv.model.gguf_weights import tensor_sources

    file = open_gguf(files.path)
    config = config_from_gguf(file)
    sources = tensor_sources(file, config)
    tokenizer = tokenizer_from_gguf(file)
    (folder / _TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    _write_weights(folder, sources, dtype, quantised, progress)

    template = file.metadata.get("tokenizer.chat_template")
    return _recorded(
        folder,
        config,
        template if isinstance(template, str) and template.strip() else None,
        _special_tokens(file.metadata),
        _eos_ids(file.metadata),
    )


def _quantised_once(
    dense: PreparedModel, quantised: Quantised, folder: Path, progress: Progress | None
) -> PreparedModel:
    """A checkpoint whose projections are quantised into `folder`, where they are not yet."""

    def make(made: Path) -> _Record:
        from chatkv.model.tensor_file import TensorSource
        from chatkv.model.weights import dense_weight, expected_shapes, load_weights

        shapes = expected_shapes(dense.config)
        sources = [
            TensorSource(name, shapes[name], partial(dense_weight, tensor))
            for name, tensor in load_weights(dense).items()
        ]
        _write_weights(made, sources, dense.dtype, quantised, progress)
        return _recorded(
            made, dense.config, dense.template, dense.special_tokens, list(dense.eos_ids)
        )

    if _read_record(folder) is None:
        _make_once(dense.name, folder, make)
    return replace(dense, folder=folder, weights=(folder / _WEIGHTS,), quantised=quantised)


def _write_weights(
    folder: Path,
    sources: Sequence[TensorSource],
    dtype: Dtype,
    quantised: Quantised | None,
    progress: Progress | None,
) -> None:
    from chatkv.model.quantise import quantised_sources
    from chatkv.model.tensor_file import write_safetensors
    from chatkv.model.weights import TORCH_DTYPES

    def written(done: int, total: int) -> None:
        if progress:
            progress("preparing the model", done, total)

    written(0, 1)
    if quantised is not None:
        sources = quantised_sources(sources, quantised)
    write_safetensors(folder / _WEIGHTS, sources, TORCH_DTYPES[dtype], written)


def _recorded(
    folder: Path,
    config: ModelConfig,
    template: str | None,
    special_tokens: dict[str, str],
    eos_ids: list[int],
) -> _Record:
    """Write the record of a folder whose other files are all there."""
    record = _Record(
        format=FORMAT,
        config=config.to_json(),
        template=template,
        special_tokens=special_tokens,
        eos_ids=eos_ids,
        file_sizes={file.name: file.stat().st_size for file in folder.iterdir()},
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
