"""Token ids to text, one at a time, never half a character.

Every token stands for some bytes; the text is those bytes as UTF-8. A byte-level token spells its
bytes in GPT-2's printable alphabet; a SentencePiece token is text with "▁" for a space, or one byte
as `<0xE2>`. Bytes that are no UTF-8 become U+FFFD, as SentencePiece's own decoder has it.
"""

from __future__ import annotations

import codecs
import re
from typing import Any

import tokenizers

from chatkv.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """What each token of a vocabulary stands for, looked up once per token."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        decoder: dict[str, Any] | None,
        special_ids: set[int],
        prefix_after_special: bool = False,
    ) -> None:
        """`decoder` as in tokenizer.json; `prefix_after_special` where the tokenizer puts a space
        after each special token, not only before the text. ModelError for an unknown decoder.
        """
        self.special_ids = special_ids
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        steps = {step["type"]: step for step in _steps(decoder)}
        self._byte_level = "ByteLevel" in steps
        if not self._byte_level and not steps.keys() & {"Metaspace", "Replace"}:
            raise ModelError(f"the tokenizer's decoder is not supported: {sorted(steps) or None}")
        # SentencePiece marks the beginning of a text with a space that is no part of it.
        metaspace = steps.get("Metaspace", {"prepend_scheme": "never"})
        self.strips_first_space = not self._byte_level and (
            "Strip" in steps or metaspace.get("prepend_scheme", "always") != "never"
        )
        self.strips_after_special = self.strips_first_space and prefix_after_special

    def token_bytes(self, id: int) -> bytes:
        """The bytes that `id` adds to a text; none for an id outside the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._spell(self._backend.id_to_token(id) or "")
        return known

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()


class TextStream:
    """Text that grows token by token. Whole characters only: bytes wait for the rest of theirs."""

    def __init__(self, detokenizer: Detokenizer, skip_special: bool) -> None:
        self._detokenizer = detokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = detokenizer.strips_first_space

    def push(self, id: int) -> str:
        """The text that `id` completes; "" while a character is unfinished."""
        if id in self._detokenizer.special_ids:
            # Whether what follows begins with a space of the tokenizer's own making.
            self._strip_next = self._detokenizer.strips_after_special
            if self._skip_special:
                return ""
            return self._decoder.decode(self._detokenizer.token_bytes(id))
        data = self._detokenizer.token_bytes(id)
        if self._strip_next and data:
            self._strip_next = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for child in part["decoders"] for step in _steps(child)]
    return [part]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet, character -> byte: printable Latin-1 is itself, the other 68 bytes follow
    from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
