"""What codes a model's own files hold, told from their headers."""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.hf_checkpoint import read_scheme
from chatkv.model.quantise import Layout, layout_as
from chatkv.model.tensor_file import TensorSource


def coded_sources(files: ModelFiles, config: ModelConfig) -> Sequence[TensorSource]:
    """The tensors of files that hold codes, of which those are `CodedSource`; none of a checkpoint
    that nobody has quantised. Raises ModelError."""
    if files.kind == "gguf":
        from chatkv.model.gguf_file import open_gguf
        from chatkv.model.gguf_weights import tensor_sources

        return tensor_sources(open_gguf(files.path), config)
    scheme = read_scheme(files.path)
    if scheme is None:
        return []
    from chatkv.model.published.sources import published_sources

    return published_sources(files.files, config, scheme)


def own_layouts(files: ModelFiles, config: ModelConfig) -> dict[str, Layout]:
    """How `prepare` stores what it takes over as "own", by name. Raises ModelError."""
    layouts = {source.name: layout_as(source, "own") for source in coded_sources(files, config)}
    return {name: layout for name, layout in layouts.items() if layout is not None}
