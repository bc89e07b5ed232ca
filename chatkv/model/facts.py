"""What a model is, told without loading it: its config, template and number of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from chatkv.model.catalog import ModelFiles
from chatkv.model.config import ModelConfig
from chatkv.model.inventory import KnownModel, prepared_record


@dataclass(frozen=True)
class Facts:
    """`template` is the chat template's source, None where the model has none."""

    config: ModelConfig
    template: str | None
    num_parameters: int


def facts(files: ModelFiles, known: KnownModel | None = None) -> Facts:
    """Of the model in `files`; a GGUF's come from a copy of it that is prepared, where one is.

    Raises ModelError for a model that cannot be read or is not supported.
    """
    config, template = _described(files, known)
    from chatkv.model.weights import expected_shapes

    return Facts(config, template, sum(map(prod, expected_shapes(config).values())))


def _described(files: ModelFiles, known: KnownModel | None) -> tuple[ModelConfig, str | None]:
    if files.kind == "hf":
        from chatkv.model.hf_checkpoint import read_checkpoint

        checkpoint = read_checkpoint(files.path)
        return checkpoint["config"], checkpoint["template"]
    for copy in known.copies if known is not None else ():
        record = prepared_record(copy)
        try:
            return ModelConfig.from_json(record["config"]), record.get("template")
        except (KeyError, TypeError, ValueError):
            continue
    from chatkv.model.gguf_config import config_from_gguf
    from chatkv.model.gguf_file import open_gguf

    file = open_gguf(files.path)
    template = file.metadata.get("tokenizer.chat_template")
    return config_from_gguf(file), template if isinstance(template, str) else None
