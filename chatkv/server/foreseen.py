"""What a request that brings its whole conversation along would find here, without asking it.

The steps of `matching`, in its order, for a client that names no session and has no token; nothing
is computed, opened or written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chatkv.errors import UsageError
from chatkv.model.prepared import PreparedModel
from chatkv.model.template import ChatTemplate
from chatkv.model.tokenizer import Tokenizer
from chatkv.restore.names import layout_of, namespace_of
from chatkv.server.asked import messages_of, tools_of
from chatkv.server.rendered import Rendered
from chatkv.session.messages import Message, find_known, seed_of
from chatkv_store.blocks import BlockStore
from chatkv_store.conversations import Conversations, Turn

# How the conversation was found: by its messages, by the text that the model reads, not at all but
# others begin with the same tokens, or nothing of it is known.
Hit = Literal["chain", "bytes", "blocks", "none"]


@dataclass(frozen=True)
class Foreseen:
    """`num_known` messages are the conversation up to `turn`, whose exact tokens stand for them;
    the others are new, to it. `others`: what was said there instead, where somebody went on."""

    hit: Hit
    num_known: int
    turn: Turn | None
    num_tokens: int  # of the request: known ones, and new ones as the template writes them
    num_stored: int  # ... whose KV is on the disk
    others: tuple[str, ...]


def read_request(path: Path) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """Messages and tools of a file: a request's body, or a list of messages. UsageError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    body = value if isinstance(value, dict) else {"messages": value}
    try:
        return messages_of(body.get("messages")), tools_of(body.get("tools"))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def foresee(
    model: PreparedModel,
    conversations: Conversations,
    blocks: BlockStore | None,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    kv_codec: str = "lossless",
) -> Foreseen:
    """What the request would find. kv_codec: of conversations that are new."""
    tokenizer = Tokenizer.from_prepared(model)
    template = ChatTemplate.from_prepared(model, tokenizer).with_tools(tuple(tools))
    exact = namespace_of(model, "lossless")
    hit: Hit = "chain"
    known = find_known(conversations, seed_of(exact, model.template, tools), messages)
    answers = [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    if answers and len(messages) - len(known.new) < answers[-1]:
        read = Rendered(tokenizer, template, exact.hex()).find(conversations, messages)
        if read is not None and (known.turn is None or len(read.new) < len(known.new)):
            hit, known = "bytes", read
    others: tuple[str, ...] = ()
    space = namespace_of(model, kv_codec)
    if known.turn is None:
        rendered = template.render(list(messages), add_generation_prompt=True)
        ids = tokenizer.encode_rendered(rendered.text, rendered.content_spans)
    else:
        session = conversations.get_session(known.turn.session_id)
        space = bytes.fromhex(session.namespace or space.hex())
        log = _log(conversations, known.turn)
        # Answers from elsewhere that follow are text, as what is asked is.
        text = template.continuation(_as_answered(messages, known.new)).text
        if tokenizer.stop_ids.intersection(log[-1:]):  # the log has the end of the answer already
            text = text.removeprefix(tokenizer.decode(log[-1:], skip_special=False))
        ids = [*log, *tokenizer.encode_rendered(text)]
        others = tuple(
            turn.user_text
            for turn in conversations.tree(session.id)
            if turn.parent_id == known.turn.id
        )
    num_stored = 0
    if blocks is not None:
        num_stored = blocks.match(space, ids, layout_of(model)).num_tokens
    if known.turn is None:
        hit = "blocks" if num_stored else "none"
    num_known = len(messages) - len(known.new)
    return Foreseen(hit, num_known, known.turn, len(ids), num_stored, others)


def _as_answered(messages: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """With the last of the known messages as the last answer: those of others become questions,
    which are as long."""
    known = messages[: len(messages) - len(new)]
    return [*known, *(one | {"role": "user"} if one["role"] == "assistant" else one for one in new)]


def _log(conversations: Conversations, turn: Turn) -> list[int]:
    """The token ids of a conversation up to and with a turn."""
    ids: list[int] = []
    last: Turn | None = turn
    while last is not None:
        ids[:0] = [*last.prompt_ids, *last.reply_ids]
        last = conversations.get_turn(last.parent_id) if last.parent_id is not None else None
    return ids
