"""A conversation with the runtime embedded in this process.

Sessions and paths are looked up before torch is imported, so a wrong id or a wrong path is said
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatkv.paths import Folders
from chatkv.session.request import ChatRequest, find

if TYPE_CHECKING:
    from chatkv.runtime import Runtime
    from chatkv.session.conversation import Conversation


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
        found = find(conversations, request)
        find_model(found.model, folders.cache)

        from chatkv.runtime import Runtime

        with Runtime(
            folders,
            conversations,
            found.model,
            found.dtype,
            on_progress,
            found.kv_codec,
            weights=found.weights,
        ) as runtime:
            session = found.session or runtime.new_session(seed=request.seed)
            with runtime.open(session) as conversation:
                yield OpenChat(runtime, conversation, found.session is not None)
