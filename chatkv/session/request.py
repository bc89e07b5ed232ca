"""What a user asked to talk to, and which session that is. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from chatkv.errors import UsageError

if TYPE_CHECKING:
    from chatkv_store.conversations import Conversations, Session

# How KV is stored, smallest loss first; what each costs, `chatkv codec measure` tells.
KVCodec = Literal["lossless", "packed", "raw", "int8", "fp8", "int4"]
WantedDtype = Literal["auto", "bfloat16", "float16", "float32"]
# What a server does: answer as a whole, or compute prompts for others, or have them computed.
Role = Literal["both", "prefill", "decode"]
WantedWeights = Literal["auto", "full", "own", "fp16", "int8", "fp8", "int4"]


@dataclass(frozen=True)
class ChatRequest:
    """What a user asked to talk to. At most one of `resume` and `resume_last`."""

    model: str | None = None  # None: the session's own, else the embedded default
    dtype: WantedDtype | None = None
    resume: str | None = None  # an id, a unique prefix of one, or a title
    resume_last: bool = False
    system: str | None = None
    seed: int | None = None
    kv_codec: KVCodec | None = None  # None: the session's own, else lossless
    weights: WantedWeights | None = None  # None: the session's own, else "auto"
    owner: str = ""  # of a new session, where several share the machine


@dataclass(frozen=True)
class Found:
    """The session that a request names, None for a new one, and what it is held with."""

    session: Session | None
    model: str | None
    dtype: WantedDtype
    weights: WantedWeights
    kv_codec: KVCodec


def find(conversations: Conversations, request: ChatRequest) -> Found:
    """Look up what `request` names. Raises UsageError, SessionNotFound and StoreError."""
    session = _session(conversations, request)
    settings = session.settings if session else {}
    return Found(
        session,
        request.model or settings.get("model"),
        request.dtype or settings.get("dtype") or "auto",
        # A session that was begun before there was a choice has KV of full weights.
        request.weights or settings.get("weights") or ("full" if "dtype" in settings else "auto"),
        request.kv_codec or settings.get("kv_codec") or "lossless",
    )


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
