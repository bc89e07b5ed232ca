"""ChatGPT's export: `conversations.json`, a list of conversations, each a tree of messages.

The format has no published description; this reads what exports of 2023 to 2026 hold. A
conversation's `mapping` is {node: {"message", "parent", "children"}}; `current_node` is the end
that was looked at last. A turn is a message of the user with all that follows it up to the next
one: calls of tools and what they returned stand in the answer, as text. Every branch is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chatkv.formats.told import NotUnderstood, Told, ToldTurn, digest_of, epoch_s, fenced


def is_one(value: Any) -> bool:
    """Whether this is a conversation of ChatGPT's."""
    return isinstance(value, dict) and isinstance(value.get("mapping"), dict)


def read(value: dict[str, Any]) -> Told:
    """One conversation of the export. Raises NotUnderstood."""
    nodes = value["mapping"]
    if not all(isinstance(node, dict) for node in nodes.values()):
        raise NotUnderstood("its messages form no tree")
    name = value.get("conversation_id") or value.get("id")
    current = value.get("current_node")
    turns, head = _turns(nodes, current if isinstance(current, str) else "")
    models = [turn.model for turn in turns if turn.model]
    return Told(
        source=f"chatgpt:{name}" if name else digest_of("chatgpt", value),
        turns=turns,
        title=str(value.get("title") or ""),
        model=str(value.get("default_model_slug") or (models[-1] if models else "ChatGPT")),
        created_at=epoch_s(value.get("create_time")),
        updated_at=epoch_s(value.get("update_time")),
        head=head,
    )


@dataclass(frozen=True)
class _Open:
    """A turn that is being read: what was said since the last one ended."""

    parent: int | None = None
    system: tuple[str, ...] = ()
    user: tuple[str, ...] = ()
    reply: tuple[str, ...] = ()
    created_at: float | None = None
    model: str = ""
    is_asked: bool = False
    is_whole: bool = True
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def is_empty(self) -> bool:
        return not (self.user or self.reply)


def _turns(nodes: dict[str, Any], current: str) -> tuple[list[ToldTurn], int | None]:
    """All turns, each behind the one that it follows, and which of them holds `current`."""
    turns: list[ToldTurn] = []
    head: int | None = None
    on_way = _way_to(nodes, current)
    roots = [name for name, node in nodes.items() if node.get("parent") not in nodes]
    seen: set[str] = set()
    todo = [(name, _Open()) for name in reversed(roots)]
    while todo:
        name, open_turn = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        said = _Said.of(nodes[name].get("message"))
        children = [child for child in _names(nodes[name].get("children")) if child in nodes]
        if said is not None:
            open_turn = said.added_to(open_turn)
        asked = [child for child in children if _asks(nodes[child])]
        others = [child for child in children if child not in asked]
        following = open_turn
        if (asked and open_turn.is_asked) or not children:
            is_end = name in on_way and not any(child in on_way for child in others)
            following, head = _close(turns, open_turn, head, is_end)
        todo += [(child, following) for child in reversed(asked)]
        todo += [(child, open_turn) for child in reversed(others)]
    return turns, head


def _close(
    turns: list[ToldTurn], turn: _Open, head: int | None, is_end: bool
) -> tuple[_Open, int | None]:
    """Put a turn that has ended with the others; what follows it, and the head."""
    if turn.is_empty:
        return turn, turn.parent if is_end and turn.parent is not None else head
    turns.append(
        ToldTurn(
            user="\n".join(turn.user),
            reply="\n\n".join(turn.reply),
            parent=turn.parent,
            system="\n\n".join(turn.system) if turn.system and turn.parent is None else None,
            is_whole=turn.is_whole and bool(turn.reply),
            created_at=turn.created_at,
            model=turn.model,
            left_out=dict(turn.left_out),
        )
    )
    number = len(turns) - 1
    return _Open(parent=number), number if is_end else head


def _way_to(nodes: dict[str, Any], current: str) -> set[str]:
    """The nodes from a root to `current`, and from there to the end of what was said last."""
    way: set[str] = set()
    name = current
    while name in nodes and name not in way:
        way.add(name)
        name = nodes[name].get("parent") or ""
    while following := [n for n in _names(nodes.get(current, {}).get("children")) if n in nodes]:
        current = following[-1]
        if current in way:
            break
        way.add(current)
    return way


def _asks(node: dict[str, Any]) -> bool:
    """Whether a message begins a turn: the user's own, not the instructions in their name."""
    said = _Said.of(node.get("message"))
    return said is not None and said.role == "user"


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


@dataclass(frozen=True)
class _Said:
    """What one message says, as text, and what of it cannot be kept."""

    role: str
    texts: tuple[str, ...]
    left_out: Counter[str]
    created_at: float | None
    model: str
    is_whole: bool

    @classmethod
    def of(cls, message: Any) -> _Said | None:
        """None: nothing."""
        if not isinstance(message, dict):
            return None
        about = message.get("metadata")
        about = about if isinstance(about, dict) else {}
        author = message.get("author")
        author = author if isinstance(author, dict) else {}
        content = message.get("content")
        content = content if isinstance(content, dict) else {"content_type": "nothing"}
        left_out: Counter[str] = Counter()
        role, texts = str(author.get("role") or ""), _texts(content, left_out)
        if content.get("content_type") == "user_editable_context" or (
            role == "user" and about.get("is_visually_hidden_from_conversation")
        ):
            role = "system"
        if role == "user":
            texts += _attached(about, content, left_out)
        elif role == "tool":
            texts = _labelled(f"[result of {author.get('name') or 'a tool'}]", texts)
        elif role == "assistant" and message.get("recipient") not in (None, "", "all"):
            texts = _labelled(f"[to {message['recipient']}]", texts)
        if not any(texts) and not left_out:
            return None
        model = about.get("model_slug")
        return cls(
            role if role in ("user", "system") else "assistant",
            tuple(text for text in texts if text),
            left_out,
            epoch_s(message.get("create_time")),
            model if isinstance(model, str) else "",
            message.get("status") != "in_progress",
        )

    def added_to(self, turn: _Open) -> _Open:
        """The turn with this in it."""
        begun = turn.created_at if turn.created_at is not None else self.created_at
        left_out = turn.left_out + self.left_out
        turn = replace(turn, created_at=begun, left_out=left_out, is_whole=self.is_whole)
        if self.role == "system" and (turn.parent is not None or turn.is_asked):
            return replace(turn, left_out=turn.left_out + Counter({"later system message": 1}))
        if self.role == "system":
            return replace(turn, system=turn.system + self.texts)
        if self.role == "user":
            return replace(turn, user=turn.user + self.texts, is_asked=True)
        return replace(
            turn, reply=turn.reply + self.texts, is_asked=True, model=self.model or turn.model
        )


def _labelled(label: str, texts: Sequence[str]) -> list[str]:
    whole = "\n".join(text for text in texts if text)
    return [f"{label}\n{fenced(whole)}"] if whole else []


def _attached(about: dict[str, Any], content: dict[str, Any], left_out: Counter[str]) -> list[str]:
    """Files that came with a message; images stand in its parts too, and are counted there."""
    listed = about.get("attachments")
    shown = str(content.get("parts"))
    texts = []
    for file in listed if isinstance(listed, list) else []:
        if isinstance(file, dict) and str(file.get("id") or "\0") not in shown:
            left_out["file"] += 1
            texts.append(f"[file {file.get('name') or file.get('id') or 'without a name'}]")
    return texts


def _texts(content: dict[str, Any], left_out: Counter[str]) -> list[str]:
    """The text of a message's content, by its type."""
    kind = content.get("content_type")
    if kind in ("text", "multimodal_text"):
        parts = content.get("parts")
        return [_part(part, left_out) for part in (parts if isinstance(parts, list) else [])]
    if kind == "code":
        language = content.get("language")
        known = language if isinstance(language, str) and language != "unknown" else ""
        text = _string(content, "text")
        return [fenced(text, known) if known else text]
    if kind == "execution_output":
        return [_string(content, "text")]
    if kind == "tether_quote":
        return [_string(content, name) for name in ("title", "url", "text")]
    if kind == "tether_browsing_display":
        return [_string(content, "summary"), _string(content, "result")]
    if kind == "system_error":
        return [f"[error] {_string(content, 'name')}: {_string(content, 'text')}"]
    if kind == "user_editable_context":
        return [_string(content, "user_profile"), _string(content, "user_instructions")]
    if kind in ("thoughts", "reasoning_recap"):
        left_out["reasoning"] += 1
        return []
    if kind == "model_editable_context":
        if content.get("model_set_context"):
            left_out["memory"] += 1
        return []
    if kind == "nothing":
        return []
    left_out[str(kind)] += 1  # a kind of a later day: its text is kept where there is any
    parts = content.get("parts")
    texts = [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else []
    return [*texts, _string(content, "text")] if texts or content.get("text") else [f"[{kind}]"]


def _part(part: Any, left_out: Counter[str]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    kind = str(part.get("content_type") or "part")
    if kind == "audio_transcription":
        return _string(part, "text")
    name = "image" if "image" in kind else "audio" if "audio" in kind else kind
    left_out[name] += 1
    pointer = str(part.get("asset_pointer") or "").rpartition("/")[2]
    return f"[{name} {pointer}]" if pointer else f"[{name}]"


def _string(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""
