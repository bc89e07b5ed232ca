"""Text to token ids and back, with control tokens only where the chat template put them.

A user may type `<|im_end|>`; it must reach the model as the ten characters it is. So a rendered
conversation comes with the places of the messages' contents, and special tokens are recognised
outside those alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from chatkv.errors import ModelError
from chatkv.model.detokenizer import Detokenizer, TextStream
from chatkv.model.one_line import one_line
from chatkv.model.template import CHATML

if TYPE_CHECKING:
    from chatkv.model.prepared import PreparedModel

Span = tuple[int, int]
"""Start and end, in characters, of a message's content within rendered text."""

# Ends of a turn and of a text by their usual names. A model that knows one as a special token stops
# there: at the second kind always, at the first where its chat template uses it.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")


class Tokenizer:
    """Thread-safe. Ids are those that Hugging Face's tokenizer gives for the same text."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: Iterable[int] = (),
        template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = {token.content: id for id, token in added.items() if token.special}
        self._added = {token.content: token for token in added.values() if token.special}
        self.stop_ids = self._find_stop_ids(eos_ids, template or "")
        self._special = re.compile(
            "|".join(re.escape(t) for t in sorted(self.special_ids, key=len, reverse=True) if t)
            or r"(?!)"
        )

    @classmethod
    def from_file(
        cls, path: Path, eos_ids: Iterable[int] = (), template: str | None = None
    ) -> Tokenizer:
        """From a `tokenizer.json`; `eos_ids` and the ends of turn in `template` stop a reply.

        Raises ModelError where the file is missing or damaged.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"cannot read the tokenizer {path}: {one_line(error)}") from error
        return cls(backend, eos_ids, template)

    @classmethod
    def from_prepared(cls, prepared: PreparedModel) -> Tokenizer:
        template = prepared.template or CHATML
        tokenizer = cls.from_file(prepared.tokenizer_path, prepared.eos_ids, template)
        eos = tokenizer.special_ids.get(prepared.special_tokens.get("eos_token", ""))
        if eos is not None:
            tokenizer.stop_ids |= {eos}
        return tokenizer

    # -- text to ids ---------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of `text` on its own, all of it ordinary: no special token comes out."""
        return self._plain(self._backend, text)

    def encode_rendered(self, text: str, content_spans: Sequence[Span] = ()) -> list[int]:
        """Ids of a whole rendered conversation, from its first character.

        Where no content looks like a special token these are the ids of `text` encoded in one go;
        else the text is cut at the template's own special tokens, and the pieces are ordinary.
        """
        if not self._holds_special(text, content_spans):
            return self._ids(self._backend, text)
        return self._pieces(text, content_spans, first=self._backend)

    def encode_continuation(
        self, text: str, content_spans: Sequence[Span] = (), last_id: int | None = None
    ) -> list[int]:
        """Ids of rendered text that goes on where a token log ends, with `last_id`.

        As `encode_rendered`, but the text's beginning is no beginning of a text: tokenizers that
        mark that with a space put none here. (Some mark it after each special token too; so
        `last_id` matters where it may be one.)
        """
        if not self._prefixes and not self._holds_special(text, content_spans):
            return self._ids(self._backend, text)
        after_special = last_id in self.special_ids.values()
        first = self._after_special if after_special else self._without_prefix
        return self._pieces(text, content_spans, first)

    def _pieces(
        self, text: str, content_spans: Sequence[Span], first: tokenizers.Tokenizer
    ) -> list[int]:
        """Encode, cut at the special tokens outside `content_spans`; `first` does the first."""
        ids: list[int] = []
        end = 0
        for match in self._template_specials(text, content_spans):
            token = self._added[match.group()]
            piece = text[end : match.start()]
            piece = piece.rstrip() if token.lstrip else piece
            ids += self._plain(self._after_special if end else first, piece)
            ids.append(self.special_ids[token.content])
            end = match.end()
            if token.rstrip:
                end += len(text[end:]) - len(text[end:].lstrip())
        return ids + self._plain(self._after_special if end else first, text[end:])

    def _template_specials(self, text: str, content_spans: Sequence[Span]) -> list[re.Match[str]]:
        """Occurrences of special tokens that touch no content."""
        found: list[re.Match[str]] = []
        gap = 0
        for start, end in [*sorted(content_spans), (len(text), len(text))]:
            found += self._special.finditer(text, gap, start)
            gap = max(gap, end)
        return found

    def _holds_special(self, text: str, content_spans: Sequence[Span]) -> bool:
        """Whether a special token's text reaches into a message's content."""
        own = [match.span() for match in self._template_specials(text, content_spans)]
        return own != [match.span() for match in self._special.finditer(text)]

    def _plain(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Ids of `text` with every special token in it as ordinary characters."""
        if not text:
            return []
        typed = list(self._special.finditer(text))
        if not typed:
            return self._ids(backend, text)
        first = self._literal if backend is self._backend else self._literal_without_prefix
        ids = self._ids(first, text)
        if {self.special_ids[match.group()] for match in typed}.isdisjoint(ids):
            return ids
        # This vocabulary's merges spell the token: keep its first character from the others.
        cuts = [match.start() + 1 for match in typed]
        ids = self._ids(first, text[: cuts[0]])
        for start, end in pairwise([*cuts, len(text)]):
            ids += self._ids(self._literal_without_prefix, text[start:end])
        return ids

    @staticmethod
    def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    # -- ids to text ---------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream(skip_special)
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    def stream(self, skip_special: bool = True) -> TextStream:
        """A decoder that takes one id at a time; its pieces add up to `decode` of them all."""
        return TextStream(self._detokenizer, skip_special)

    @property
    def num_ids(self) -> int:
        """Every id is below this."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def bytes_of(self, id: int) -> bytes:
        """The bytes that `id` adds to a text."""
        return self._detokenizer.token_bytes(id)

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(
            self._backend,
            self._parts["decoder"],
            set(self.special_ids.values()),
            prefix_after_special=bool(self._prefixes) and not self._prefixes_text_only,
        )

    # -- variants of the backend, built when first needed --------------------------------------

    @cached_property
    def _parts(self) -> dict[str, Any]:
        """How the backend normalises, splits and decodes, as in tokenizer.json."""

        def state(part: Any) -> Any:
            return json.loads(part.__getstate__()) if part is not None else None

        backend = self._backend
        return {
            "normalizer": state(backend.normalizer),
            "pre_tokenizer": state(backend.pre_tokenizer),
            "decoder": state(backend.decoder),
        }

    @cached_property
    def _prefixes(self) -> list[dict[str, Any]]:
        """The steps that put a space before a text."""
        steps = _steps(self._parts["normalizer"]) + _steps(self._parts["pre_tokenizer"])
        return [step for step in steps if _adds_prefix(step)]

    @cached_property
    def _prefixes_text_only(self) -> bool:
        """Whether a space is put before the whole text, and not after each special token too."""
        return any(step.get("prepend_scheme") == "first" for step in self._prefixes)

    @property
    def _after_special(self) -> tokenizers.Tokenizer:
        """What encodes the text after a special token."""
        return self._without_prefix if self._prefixes_text_only else self._backend

    @cached_property
    def _without_prefix(self) -> tokenizers.Tokenizer:
        return self._variant(prefix=False) if self._prefixes else self._backend

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        literal = self._variant(prefix=True)
        literal.encode_special_tokens = True
        return literal

    @cached_property
    def _literal_without_prefix(self) -> tokenizers.Tokenizer:
        if not self._prefixes:
            return self._literal
        literal = self._variant(prefix=False)
        literal.encode_special_tokens = True
        return literal

    def _variant(self, prefix: bool) -> tokenizers.Tokenizer:
        """A copy of the backend, with or without the steps that put a space before a text."""
        text = self._backend.to_str()
        if not prefix:
            whole = json.loads(text)
            for part in ("normalizer", "pre_tokenizer"):
                for step in _steps(whole[part]):
                    if _adds_prefix(step):
                        _drop_prefix(step)
            text = json.dumps(whole)
        return tokenizers.Tokenizer.from_str(text)

    def _find_stop_ids(self, eos_ids: Iterable[int], template: str) -> frozenset[int]:
        names = [name for name in _END_OF_TURN if name in template] + list(_END_OF_TEXT)
        return frozenset(eos_ids) | {
            self.special_ids[name] for name in names if name in self.special_ids
        }


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The innermost steps of a normaliser or pre-tokeniser, either of which may be nested."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [step for child in inner for step in _steps(child)] if inner else [part]


def _adds_prefix(step: dict[str, Any]) -> bool:
    return (
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        or (step["type"] == "ByteLevel" and step.get("add_prefix_space", False))
    )


def _drop_prefix(step: dict[str, Any]) -> None:
    """Make a step that puts a space before a text do everything but that."""
    if step["type"] == "Prepend":
        step["prepend"] = ""
    elif step["type"] == "Metaspace":
        step["prepend_scheme"] = "never"
        step.pop("add_prefix_space", None)
    else:
        step["add_prefix_space"] = False
