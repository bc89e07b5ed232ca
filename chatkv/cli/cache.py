"""`chatkv cache`: what the KV cache holds, whether it is sound, and making it smaller.

Needs no model, no torch. Everything here may be deleted without losing a word of any conversation.
The verbs live in files by what they do; each is imported when it is called.
"""

from __future__ import annotations

import click

from chatkv.cli.lazy import LazyGroup
from chatkv.paths import folders

# name -> (where it is, what it does)
VERBS = {
    "ls": ("chatkv.cli.cache_usage:ls", "List what is stored for each conversation."),
    "show": ("chatkv.cli.cache_usage:show", "Show what is stored for one conversation."),
    "explain": (
        "chatkv.cli.cache_explain:explain",
        "Explain what of one is stored, what not, and why.",
    ),
    "du": ("chatkv.cli.cache_du:du", "Show how much disk the cache takes, by model."),
    "stats": ("chatkv.cli.cache_stats:stats", "Show how often the cache helped, and how much."),
    "verify": ("chatkv.cli.cache_verify:verify", "Check every block against its digests."),
    "warm": ("chatkv.cli.cache_warm:warm", "Bring the KV of conversations into memory."),
    "prune": ("chatkv.cli.cache_remove:prune", "Delete KV by age, model, use or size."),
    "rm": ("chatkv.cli.cache_remove:rm", "Delete the KV of conversations."),
    "clear": ("chatkv.cli.cache_remove:clear", "Delete all KV."),
    "pin": ("chatkv.cli.cache_pin:pin", "Never evict the KV of these conversations."),
    "unpin": ("chatkv.cli.cache_pin:unpin", "Let the KV of these conversations be evicted."),
    "export": ("chatkv.cli.cache_transfer:export", "Write a conversation with its KV to a file."),
    "import": ("chatkv.cli.cache_transfer:import_", "Take a conversation from such a file."),
    "compact": ("chatkv.cli.cache_check:compact", "Give free pages back to the disk."),
    "readers": ("chatkv.cli.cache_check:readers", "List who is reading the cache."),
    "dir": ("chatkv.cli.cache:dir", "Print the folder of the cache."),
}


@click.group(cls=LazyGroup, commands_at=VERBS)
def cache() -> None:
    """Look into the KV cache, check it and make it smaller.

    The cache is what models have read of your conversations. Losing it costs time, never words.
    """


@click.command()
def dir() -> None:
    """Print the folder of the cache."""
    click.echo(folders().cache)
