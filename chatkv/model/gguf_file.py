"""Opening a GGUF file: its metadata as plain values, its tensors still packed.

The container is read by the `gguf` package, which is slow on large vocabularies (1.7 s for 49k
tokens); that is why a GGUF is prepared once (`prepared.py`) and not read again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatkv.errors import ModelError
from chatkv.model.one_line import one_line

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class GGUFFile:
    """`metadata`: key -> int, float, bool, str or a list of those. `tensors`: name -> the gguf
    package's ReaderTensor, whose `data` is mapped from the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def require(self, key: str) -> Any:
        """A metadata value that must be there."""
        if key not in self.metadata:
            raise ModelError(f"{self.path} lacks the GGUF metadata {key!r}")
        return self.metadata[key]


def open_gguf(path: Path) -> GGUFFile:
    """Read `path`'s header; ModelError where it is no GGUF, cut short or damaged."""
    try:
        with path.open("rb") as source:
            magic = source.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ModelError(f"{path} is no GGUF file (it does not begin with {_MAGIC.decode()!r})")

    import gguf

    # The reader has no error of its own: damage surfaces as whatever numpy or Python raise there.
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:
        raise ModelError(f"{path} is cut short or damaged: {one_line(error)}") from error
    if metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{path} is one of {metadata['split.count']} parts: join them with llama-gguf-split "
            "--merge first"
        )
    return GGUFFile(path, metadata, tensors)
