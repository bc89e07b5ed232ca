"""How a face reaches a conversation: which session, which model, and the runtime behind it.

Sessions and paths are looked up before torch is imported, so a wrong id or a wrong path is said
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chatkv.errors import UsageError
from chatkv.paths import Folders

if TYPE_CHECKING:
    from chatkv.runtime import Runtime
    from chatkv.session.conversation import Conversation
    from chatkv_store.conversations import Conversations, Session


# How KV is stored, smallest loss first; what each costs, `chatkv codec measure` tells.
KVCodec = Literal["lossless", "packed", "raw", "int8", "fp8", "int4"]


@dataclass(frozen=True)
class ChatRequest:
    """What a user asked to talk to. At most one of `resume` and `resume_last`."""

    model: str | None = None  # None: the session's own, else the embedded default
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    resume: str | None = None  # an id, a unique prefix of one, or a title
    resume_last: bool = False
    system: str | None = None
    seed: int | None = None
    kv_codec: KVCodec | None = None  # None: the session's own, else lossless


@dataclass(frozen=True)
class OpenChat:
    """A runtime and the conversation that it has open."""

    runtime: Runtime
    conversation: Conversation
    is_resumed: bool


@contextmanager
def open_chat(
    folders: Folders,
    request: ChatRequest,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Iterator[OpenChat]:
    """Embed a runtime in this process and open the conversation that `request` names.

    Leaving the context writes what is queued. Raises ChatkvError and StoreError.
    """
    from chatkv.model.catalog import find_model
    from chatkv_store.conversations import Conversations

    with suppress(OSError):  # nothing can be made on a full disk; who needs a folder will say so
        folders.make()
    with Conversations(folders.conversations, must_open=False) as conversations:
        session = _session(conversations, request)
        settings = session.settings if session else {}
        model = request.model or settings.get("model")
        find_model(model, folders.cache)
        dtype = request.dtype or settings.get("dtype") or "auto"
        kv_codec = request.kv_codec or settings.get("kv_codec") or "lossless"

        from chatkv.runtime import Runtime

        with Runtime(folders, conversations, model, dtype, on_progress, kv_codec) as runtime:
            resumed = session is not None
            if session is None:
                session = runtime.new_session(seed=request.seed)
            with runtime.open(session) as conversation:
                yield OpenChat(runtime, conversation, resumed)


def _session(conversations: Conversations, request: ChatRequest) -> Session | None:
    if request.resume is not None and request.resume_last:
        raise UsageError("give either --continue or --resume, not both")
    if request.resume is None and not request.resume_last:
        return None
    if conversations.refusal is not None and not conversations.list_sessions(limit=1):
        raise conversations.refusal  # the file cannot be opened, so nothing can be looked up
    session = (
        conversations.last_session()
        if request.resume is None
        else conversations.get_session(request.resume)
    )
    if session is None:
        raise UsageError("there is no session to continue yet: start one without --continue")
    if request.system is not None and session.num_turns:
        raise UsageError("--system can only begin a session, and this one has begun: leave it out")
    return session
