"""A model made ready to run: what a start needs, in the form that a start reads fastest.

A GGUF is converted once: dequantised, renamed, its tokenizer rebuilt, all written to one folder
below `models_dir` that later starts only map (SmolLM2: 4 s once, under 1 ms from then on).
A Hugging Face checkpoint already has that form and is read where it lies. Where weights are to be
quantised, or others have quantised them, that too is done once and written, a checkpoint's as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.identity import Progress, weights_digest
from chatkv.model.prepared_folder import (
    FORMAT,
    TOKENIZER,
    WEIGHTS,
    Record,
    make_once,
    read_record,
    recorded,
)

if TYPE_CHECKING:
    from chatkv.model.published.scheme import Scheme
    from chatkv.model.tensor_file import TensorSource

Dtype = Literal["bfloat16", "float16", "float32"]
Quantised = Literal["own", "fp16", "int8", "fp8", "int4"]
Stored = Literal["full", "own", "fp16", "int8", "fp8", "int4"]


@dataclass(frozen=True)
class PreparedModel:
    """Everything about a model but its tensors.

    `weights_digest` names the weights as they are computed with: files, conversion, dtype and
    quantisation. `quantised` says how projections are stored, None where they are of the dtype;
    "own": as their file stores them, of the dtype where no kernel takes that.
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
    files_digest: bytes = b""  # of the weights as they were published, whatever is made of them

    @property
    def stored(self) -> Stored:
        """How projections are stored: "full" is in the dtype."""
        return self.quantised or "full"

    @property
    def numbers(self) -> str:
        """What it computes with, as people read it: "bfloat16", "bfloat16 with int4 weights"."""
        if self.quantised is None:
            return self.dtype
        kind = "the file's own" if self.quantised == "own" else self.quantised
        return f"{self.dtype} with {kind} weights"


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
    if files.kind == "hf":
        return _prepare_checkpoint(files, files_digest, dtype, models_dir, progress, quantised)
    stored = dtype if quantised is None else f"{dtype}-{quantised}"
    digest = hashlib.sha256(f"{files.kind}:{FORMAT}:{stored}:".encode() + files_digest).digest()
    folder = models_dir / f"{files_digest.hex()[:32]}-{stored}"

    def convert(made: Path) -> Record:
        return _convert_gguf(files, dtype, quantised, made, progress)

    record = read_record(folder) or make_once(files.name, folder, convert)
    return PreparedModel(
        name=files.name,
        folder=folder,
        dtype=dtype,
        config=ModelConfig.from_json(record.config),
        weights_digest=digest,
        weights=(folder / WEIGHTS,),
        tokenizer_path=folder / TOKENIZER,
        template=record.template,
        special_tokens=record.special_tokens,
        eos_ids=tuple(record.eos_ids),
        quantised=quantised,
        files_digest=files_digest,
    )


def _prepare_checkpoint(
    files: ModelFiles,
    files_digest: bytes,
    dtype: Dtype,
    models_dir: Path,
    progress: Progress | None,
    quantised: Quantised | None,
) -> PreparedModel:
    from chatkv.model.hf_checkpoint import read_checkpoint, read_scheme

    scheme = read_scheme(files.path)
    if scheme is None and quantised == "own":
        quantised = None
    stored = dtype if quantised is None else f"{dtype}-{quantised}"
    # The same tensors mean other weights under another scheme.
    meaning = b"" if scheme is None else scheme.digest()
    named = f"hf:{FORMAT}:{stored}:".encode() + files_digest + meaning
    plain = PreparedModel(
        name=files.name,
        files_digest=files_digest,
        folder=files.path,
        dtype=dtype,
        weights_digest=hashlib.sha256(named).digest(),
        weights=files.files,
        **read_checkpoint(files.path),
    )
    if scheme is None and quantised is None:
        return plain
    folder = models_dir / f"{files_digest.hex()[:32]}-{stored}"

    def make(made: Path) -> Record:
        _write_weights(made, _checkpoint_sources(plain, scheme), dtype, quantised, progress)
        eos_ids = list(plain.eos_ids)
        return recorded(made, plain.config, plain.template, plain.special_tokens, eos_ids, meaning)

    if read_record(folder, meaning) is None:
        make_once(files.name, folder, make, meaning)
    return replace(plain, folder=folder, weights=(folder / WEIGHTS,), quantised=quantised)


def _checkpoint_sources(checkpoint: PreparedModel, scheme: Scheme | None) -> list[TensorSource]:
    if scheme is not None:
        from chatkv.model.published.sources import published_sources

        return published_sources(checkpoint.weights, checkpoint.config, scheme)
    from chatkv.model.tensor_file import TensorSource
    from chatkv.model.weights import dense_weight, expected_shapes, load_weights

    shapes = expected_shapes(checkpoint.config)
    return [
        TensorSource(name, shapes[name], partial(dense_weight, tensor))
        for name, tensor in load_weights(checkpoint).items()
    ]


def _convert_gguf(
    files: ModelFiles,
    dtype: Dtype,
    quantised: Quantised | None,
    folder: Path,
    progress: Progress | None,
) -> Record:
    from chatkv.model.gguf_config import config_from_gguf
    from chatkv.model.gguf_file import open_gguf
    from chatkv.model.gguf_tokenizer import tokenizer_from_gguf
    from chatkv.model.gguf_weights import tensor_sources

    file = open_gguf(files.path)
    config = config_from_gguf(file)
    sources = tensor_sources(file, config)
    tokenizer = tokenizer_from_gguf(file)
    (folder / TOKENIZER).write_text(tokenizer.to_str(), encoding="utf-8")
    _write_weights(folder, sources, dtype, quantised, progress)

    template = file.metadata.get("tokenizer.chat_template")
    return recorded(
        folder,
        config,
        template if isinstance(template, str) and template.strip() else None,
        _special_tokens(file.metadata),
        _eos_ids(file.metadata),
    )


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
    write_safetensors(folder / WEIGHTS, sources, TORCH_DTYPES[dtype], written)


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
