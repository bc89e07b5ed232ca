"""How a face reaches a conversation: in the engine's process, or with a runtime in its own."""

from chatkv.client.chat import Chat, TurnText, connect, resolved
from chatkv.client.local import OpenChat, open_chat
from chatkv.session.ready import Ready
from chatkv.session.request import ChatRequest, KVCodec

__all__ = [
    "Chat",
    "ChatRequest",
    "KVCodec",
    "OpenChat",
    "Ready",
    "TurnText",
    "connect",
    "open_chat",
    "resolved",
]
