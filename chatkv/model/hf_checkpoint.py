"""What a Hugging Face checkpoint's folder says beside its weights: config, tokenizer, template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatkv.errors import ModelError
from chatkv.model.catalog import read_json
from chatkv.model.hf_config import config_from_hf
from chatkv.model.one_line import one_line
from chatkv.model.published.scheme import Scheme, scheme_of


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """The fields of PreparedModel that come from `folder`'s JSON files. Raises ModelError."""
    config_path = folder / "config.json"
    config = read_json(config_path)
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json: save the checkpoint's fast tokenizer into it"
        )
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    return {
        "config": config_from_hf(config, str(config_path)),
        "tokenizer_path": tokenizer_path,
        "template": _template(folder, tokenizer_config),
        "special_tokens": _special_tokens(folder, tokenizer_config),
        "eos_ids": _eos_ids(folder, config),
    }


def read_scheme(folder: Path) -> Scheme | None:
    """How others have quantised the weights in `folder`; None where they are as computed with.
    Raises ModelError."""
    path = folder / "config.json"
    return scheme_of(read_json(path), str(path))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """From `chat_template.jinja`, else `tokenizer_config.json`: a string, or named ones of which
    "default" counts; older still, `chat_template.json`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read {path}: {one_line(error)}") from error
    found = tokenizer_config.get("chat_template")
    if found is None:
        found = _optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        if found is None:
            names = ", ".join(sorted(str(name) for name in named))
            raise ModelError(f"{folder}: none of its chat templates is the default ({names})")
    return found if isinstance(found, str) and found.strip() else None


def _special_tokens(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, each given as a string or as an object with its `content`."""
    given = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
    tokens = {}
    for name, value in given.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Where replies end, by generation_config.json and config.json: each one id or several."""
    ids: set[int] = set()
    for fields in (_optional_json(folder / "generation_config.json"), config):
        value = fields.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
