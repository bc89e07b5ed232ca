"""The models that other programs' clients may ask for: those that `chatkv serve` was given.

A request names one of them and nothing else: what comes over the network opens no path and
downloads nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from chatkv.errors import ModelError
from chatkv.model.catalog import find_model
from chatkv.paths import Folders


@dataclass(frozen=True)
class OfferedModel:
    """`spec` is what it was named with; `num_bytes` and `changed_at` are its files'."""

    name: str
    spec: str | None
    num_bytes: int
    changed_at: float
    digest: str


class NoSuchModel(ModelError):
    """A request names a model that is not offered."""


class Offered:
    """The models by name; the first one is the default. Raises ModelError for one that is not
    there."""

    def __init__(self, folders: Folders, specs: Sequence[str | None]) -> None:
        self.models: dict[str, OfferedModel] = {}
        for spec in specs:
            files = find_model(spec, folders.cache)
            facts = [file.stat() for file in files.files]
            about = f"{files.files} {[(one.st_size, one.st_mtime) for one in facts]}"
            self.models[files.name] = OfferedModel(
                files.name,
                spec,
                sum(one.st_size for one in facts),
                max(one.st_mtime for one in facts),
                hashlib.sha256(about.encode()).hexdigest(),
            )

    def spec_of(self, name: str) -> str | None:
        return self.find(name).spec

    def find(self, name: str) -> OfferedModel:
        """Ollama's clients put ":latest" behind a name; none at all is the default."""
        if name in ("", "default"):
            return next(iter(self.models.values()))
        found = self.models.get(name) or self.models.get(name.removesuffix(":latest"))
        if found is None:
            known = ", ".join(self.models)
            raise NoSuchModel(f"there is no model {name[:200]!r} here, but: {known}")
        return found
