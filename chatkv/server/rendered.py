"""The second way to find a conversation: by the text that the model would have before it.

Clients cut the same conversation into other messages than those that it was held with: thoughts
come back inside of an answer, calls as text. Where the chat template makes the same text of it as
the log has, it is the same to the model, and the log's exact tokens stand for it.

What was typed and looks like a control token reads the same in a text, and is not; conversations
with such words are found by their messages alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv.errors import ModelError
from chatkv.session.messages import Known, Message

if TYPE_CHECKING:
    from chatkv.model.template import ChatTemplate
    from chatkv.model.tokenizer import Tokenizer
    from chatkv.session.conversation import Conversation
    from chatkv_store.conversations import Conversations


@dataclass(frozen=True)
class Rendered:
    """Texts of one model, as `template` writes them. `seed`: what else an answer depends on."""

    tokenizer: Tokenizer
    template: ChatTemplate
    seed: str

    def find(self, conversations: Conversations, messages: Sequence[Message]) -> Known | None:
        """The longest beginning of `messages` whose text was the log of a turn here. Renders once,
        and once more for each answer that is looked at when something is found."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or any(self._is_doubtful(str(message)) for message in messages):
            return None
        whole = self._text(messages[: answers[-1] + 1])
        if whole is None:
            return None
        for end, digest in reversed(list(self._ends(whole))):
            turn = conversations.turn_of_messages(digest)
            if turn is None:
                continue
            for index in reversed(answers):
                text = self._text(messages[: index + 1])
                if text is not None and self._less_end(text) == whole[:end]:
                    return Known(turn, tuple(messages[index + 1 :]))
        return None

    def digest(self, conversation: Conversation) -> bytes | None:
        """Under which the newest turn is to be noted, None where it cannot be found so."""
        if conversation.window is not None:
            return None  # what left the context is in no text
        texts = [str(message) for message in conversation.messages()]
        if any(self._is_doubtful(text) for text in texts):
            return None
        log = self.tokenizer.decode(conversation.log, skip_special=False)
        whole = self._less_end(log)
        return self._hash(whole).digest()

    def _text(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.template.render(messages, add_generation_prompt=False).text
        except ModelError:  # what it refuses is not in a log
            return None

    def _ends(self, text: str) -> Iterator[tuple[int, bytes]]:
        """Wherever an answer may end in `text`: there, and the digest of what is before it."""
        hashed, done = self._hash(""), 0
        for match in [*self._stops.finditer(text), None]:
            end = len(text[: match.start() if match else None].rstrip())
            if end > done:
                hashed.update(text[done:end].encode("utf-8", "replace"))
                done = end
                yield end, hashed.digest()

    def _less_end(self, text: str) -> str:
        """`text` less the token that ends an answer, and white space before it."""
        text = text.rstrip()
        for match in self._stops.finditer(text):
            if match.end() == len(text):
                return text[: match.start()].rstrip()
        return text

    def _hash(self, text: str) -> hashlib._Hash:
        start = f"rendered\0{self.seed}\0".encode()
        return hashlib.sha256(start + text.encode("utf-8", "replace"))

    @property
    def _stops(self) -> re.Pattern[str]:
        ids = self.tokenizer.stop_ids
        names = [self.tokenizer.decode([id], skip_special=False) for id in ids]
        return re.compile("|".join(re.escape(name) for name in names if name) or r"(?!)")

    def _is_doubtful(self, text: str) -> bool:
        return any(name in text for name in self.tokenizer.special_ids if name)
