"""What KV codecs cost a model, as measured on this machine: one JSON file beside the models.

    {namespace: {"model": name, "dtype": dtype, "codecs": {codec: the fields of CodecQuality}}}

Imports no torch: listing a cache shows it too. The file is cache and may be deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_NAME = "codec_quality.json"


@dataclass(frozen=True)
class CodecQuality:
    """How one codec did on one text. All means are over `num_tokens` predictions."""

    codec: str
    ratio: float  # bytes of KV in memory to bytes of payload, full blocks
    perplexity: float
    exact_perplexity: float  # with KV as it was computed
    kl: float  # KL(exact || codec) of the next token's distribution, in nats
    top1_agreement: float  # how often both find the same token likeliest
    num_tokens: int
    is_bit_exact: bool  # what was decoded equals what was encoded

    @property
    def perplexity_change(self) -> float:
        """0.01: one percent higher with the codec."""
        return self.perplexity / self.exact_perplexity - 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"perplexity_change": self.perplexity_change}


def known_qualities(models: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By namespace (hex), then by codec: what was measured; empty where nothing was."""
    return {space: entry["codecs"] for space, entry in _entries(models).items()}


def ratios(models: Path, model: str, dtype: str) -> dict[str, float]:
    """Codec -> how much smaller it made KV of this model, where that was measured."""
    return {
        codec: float(quality["ratio"])
        for entry in _entries(models).values()
        if (entry.get("model"), entry.get("dtype")) == (model, dtype)
        for codec, quality in entry["codecs"].items()
    }


def remember(
    models: Path,
    model: str,
    dtype: str,
    qualities: Sequence[CodecQuality],
    namespace_of: Callable[[str], bytes],
) -> None:
    """Store `qualities` with the record of their model; raises OSError."""
    entries = _entries(models)
    for quality in qualities:
        entry = entries.setdefault(namespace_of(quality.codec).hex(), {"codecs": {}})
        entry |= {"model": model, "dtype": dtype}
        entry["codecs"][quality.codec] = quality.to_json()
    scratch = models / f"{FILE_NAME}.{os.getpid()}.tmp"
    try:
        scratch.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        os.replace(scratch, models / FILE_NAME)
    finally:
        scratch.unlink(missing_ok=True)


def percent(share: float) -> str:
    """A signed share for people: "+0.08%", "0%"."""
    return f"{100 * share:+.2f}%" if share else "0%"


def summary(models: Path) -> list[tuple[str, str]]:
    """Of every model that was measured, what its codecs save and cost: name and text of a field.

    "codecs", "Tiny, bfloat16: int4 3.51x, perplexity +0.08%, KL 0.006; packed 1.42x"
    """
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in _entries(models).values():
        by_model.setdefault(f"{entry.get('model')}, {entry.get('dtype')}", {}).update(
            entry["codecs"]
        )
    return [("codecs", f"{model}: {_one_line(codecs)}") for model, codecs in by_model.items()]


def _one_line(codecs: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, quality in sorted(codecs.items(), key=lambda item: -item[1]["ratio"]):
        part = f"{name} {quality['ratio']:.2f}x"
        if not quality["is_bit_exact"]:
            change = percent(quality["perplexity_change"])
            part += f", perplexity {change}, KL {quality['kl']:.2g}"
        if name != "raw":
            parts.append(part)
    return "; ".join(parts)


def _entries(models: Path) -> dict[str, dict[str, Any]]:
    try:
        entries = json.loads((models / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {
        space: entry
        for space, entry in entries.items()
        if isinstance(entry, dict) and isinstance(entry.get("codecs"), dict)
    }
