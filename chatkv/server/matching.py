"""Which conversation a request means that brings all of its messages along.

A client may name its session; what is said in it decides nevertheless. The messages that were said
here before are found by their digests (in the session that was named also by comparing them; and
where that ends early, by the text that the model would read), and stand for the exact tokens that
they had here. What is left is added: answers from elsewhere as
text, then the new words. The log of a session is never written anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from chatkv.errors import UsageError
from chatkv.runtime import Runtime
from chatkv.server.asked import Asked
from chatkv.server.hub import Held, Hub
from chatkv.server.named import Names
from chatkv.server.parts import opens_thoughts, said_in, written
from chatkv.server.rendered import Rendered
from chatkv.session.conversation import text_of
from chatkv.session.messages import Known, Message, digests_of, find_known, seed_of
from chatkv.session.request import ChatRequest
from chatkv_store.conversations import Conversations, Session, Turn
from chatkv_store.errors import SessionNotFound, StoreBusy, StoreError

Hit = Literal["chain", "bytes", "adopted", "none"]


@dataclass(frozen=True)
class Exchange:
    """What was asked and answered; `end` counts the messages up to the answer."""

    asked: tuple[Message, ...]
    answer: Message
    end: int


@dataclass(frozen=True)
class Split:
    """A request's messages: the system's, whole exchanges, and what is to be answered."""

    system: str | None
    exchanges: tuple[Exchange, ...]
    said: tuple[Message, ...]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Split:
        start = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        system = "\n".join(m["content"] for m in messages[:start]) if start else None
        exchanges: list[Exchange] = []
        asked: list[Message] = []
        for index, message in enumerate(messages[start:], start):
            if message["role"] == "assistant":
                exchanges.append(Exchange(tuple(asked), message, index + 1))
                asked = []
            else:
                asked.append(message)
        return cls(system, tuple(exchanges), tuple(asked))


@dataclass(frozen=True)
class Place:
    """The conversation, at the point where `split.said` follows. `diverged_at` is the first message
    that was not said here, where an answer is among those."""

    held: Held
    split: Split
    hit: Hit
    diverged_at: int | None


class Matching:
    """Finds the place of a request, and notes its answer for the next one. `recent` holds which
    session clients have named lately, by the digest of the name."""

    def __init__(self, hub: Hub, runtime: Runtime, asked: Asked, recent: dict[bytes, str]) -> None:
        self._hub, self._runtime, self._asked = hub, runtime, asked
        self._store: Conversations = hub.conversations
        namespace = runtime.namespace_of("lossless", asked.owner)
        self._seed = seed_of(namespace, runtime.prepared.template, asked.tools)
        self._names = Names(hub.conversations, asked, self._seed, recent)
        parts = runtime.scratch_parts(asked.owner)
        template = parts.template.with_tools(asked.tools)
        self._rendered = Rendered(parts.tokenizer, template, namespace.hex())

    @contextmanager
    def place(self, cancel: threading.Event) -> Iterator[Place]:
        """Where the answer goes, alone; opened, and moved there. StoreBusy where a session that
        was named is answering; one that was not is forked."""
        messages, split = self._asked.messages, Split.of(self._asked.messages)
        known, is_read = self._known(split)
        num_known = len(messages) - len(known.new) if known.turn is not None else 0
        if not split.said and (not split.exchanges or num_known < len(messages)):
            raise UsageError(
                "the last message must be the user's, or an answer that was cut off here and is to "
                "be gone on with"
            )
        with ExitStack() as open:
            held, num_used = self._held(open, split, known.turn, num_known, cancel)
            is_read, num_known = is_read and num_used == num_known, num_used
            self._names.remember(held.session_id)
            conversation = held.conversation
            template = conversation.model.template.with_tools(self._asked.tools)
            conversation.use_template(template)
            left = [one for one in split.exchanges if one.end > num_known]
            found: Hit = "bytes" if is_read else "chain"
            hit: Hit = "adopted" if left and not num_known else found if num_known else "none"
            diverged_at = num_known if left else None
            system = split.system if not conversation.turns else None
            if left:
                first = len(conversation.turns)
                conversation.adopt([(one.asked, written(one.answer)) for one in left], system)
                digests = digests_of(self._seed, messages)
                turns = conversation.turns[first:]
                self._note(
                    (digests[one.end - 1], turn.id) for one, turn in zip(left, turns, strict=True)
                )
            yield Place(held, split, hit, diverged_at)

    def note(self, place: Place, answer: Message) -> None:
        """Let the next request find the conversation's newest turn."""
        turn = place.held.conversation.turns[-1]
        asked = self._asked.messages if place.split.said else self._asked.messages[:-1]
        digest = digests_of(self._seed, [*asked, answer])[-1]
        read = self._rendered.digest(place.held.conversation)
        digests = [digest, *self._names.digests(), *([read] if read is not None else [])]
        self._note((digest, turn.id) for digest in digests)

    # --- inside -----------------------------------------------------------------------------------

    def _known(self, split: Split) -> tuple[Known, bool]:
        """The turn behind which the request goes on; and whether its text told that, where messages
        tell less."""
        messages = self._asked.messages
        known = find_known(self._store, self._seed, messages)
        last = split.exchanges[-1].end if split.exchanges else 0
        if known.turn is not None and len(messages) - len(known.new) >= last:
            return known, False
        read = self._rendered.find(self._store, messages)
        if read is None or (known.turn is not None and len(read.new) >= len(known.new)):
            return known, False
        return read, True

    def _held(
        self,
        open: ExitStack,
        split: Split,
        known: Turn | None,
        num_known: int,
        cancel: threading.Event,
    ) -> tuple[Held, int]:
        """The conversation, and how many of the messages are its log."""
        named = self._names.session()
        if named is not None:
            found = self._in_named(open, named, split, known, num_known, cancel)
            if found is not None:
                return found
        if known is not None:
            with suppress(StoreBusy, SessionNotFound), ExitStack() as attempt:
                held = attempt.enter_context(self._use(known.session_id, cancel))
                if _head(held) == known.id:
                    open.push(attempt.pop_all())
                    return held, num_known
            fork = self._store.fork_from(known.id)
            return open.enter_context(self._use(fork.id, cancel)), num_known
        request = ChatRequest(self._runtime.model_spec, owner=self._asked.owner)
        new = self._hub.open(request)
        return open.enter_context(self._hub.use(new.session_id, cancel)), 0

    def _in_named(
        self,
        open: ExitStack,
        named: Session,
        split: Split,
        known: Turn | None,
        num_known: int,
        cancel: threading.Event,
    ) -> tuple[Held, int] | None:
        """The session that was named, moved to where the messages part from it."""
        attempt = open.enter_context(ExitStack())
        held = attempt.enter_context(self._use(named.id, cancel))
        conversation = held.conversation
        num_turns, num_alike = self._alike(held, split)
        tree = {turn.id for turn in self._store.tree(named.id)} if known is not None else set()
        if known is not None and known.id in tree and num_known > num_alike:
            if _head(held) != known.id:
                conversation.switch(known.id)
            return held, num_known
        kind = self._asked.carriers.keys[0][0] if self._asked.carriers.keys else ""
        is_weak = self._asked.carriers.session is None and (known is not None or kind == "user")
        if not num_turns and conversation.turns and is_weak:
            attempt.close()
            return None
        conversation.rewind(num_turns)
        return held, num_alike

    def _alike(self, held: Held, split: Split) -> tuple[int, int]:
        """How many turns of a conversation the exchanges repeat, and how many messages that is."""
        has_tools = bool(self._asked.tools)
        is_thinking = opens_thoughts(held.conversation.model.template)
        turns = held.conversation.turns
        if turns and (turns[0].system_text or None) != (split.system or None):
            return 0, 0
        num_messages = 0
        for index, (turn, one) in enumerate(zip(turns, split.exchanges, strict=False)):
            said = turn.stats.get("said") or [{"role": "user", "content": turn.user_text}]
            mine = [*said, said_in(turn.reply_text, has_tools, is_thinking).message()]
            if digests_of("", mine)[-1] != digests_of("", [*one.asked, one.answer])[-1]:
                return index, num_messages
            num_messages = one.end
        return min(len(turns), len(split.exchanges)), num_messages

    def _use(self, session_id: str, cancel: threading.Event) -> AbstractContextManager[Held]:
        self._hub.open(ChatRequest(self._runtime.model_spec, resume=session_id))
        return self._hub.use(session_id, cancel)

    def _note(self, noted: Iterator[tuple[bytes, str]]) -> None:
        with suppress(StoreError):  # the next request then finds less
            self._store.note_messages(noted)


def _head(held: Held) -> str | None:
    turns = held.conversation.turns
    return turns[-1].id if turns else None


def said_as_text(said: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """What `Conversation.send` is to be given: one message of the user is text alone."""
    if len(said) == 1 and said[0]["role"] == "user":
        return said[0]["content"], ()
    return text_of(said), tuple(said)
