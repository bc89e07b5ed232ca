"""Folders, disks and both stores: whether what is said and computed can be kept."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from chatkv.cli.checks.finding import Finding, note, ok, problem
from chatkv.paths import Folders
from chatkv.words import plural, size
from chatkv_store.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreLocked,
    StoreVersionError,
)

if TYPE_CHECKING:
    from chatkv_store.blocks import BlockStore

# Below this, conversations will soon not be saved any more.
LEAST_DISK_BYTES = 200 << 20
# Above this, SQLite's quick check takes seconds.
MOST_CHECKED_BYTES = 256 << 20
# Where more of the cap is pinned, new KV hardly finds room.
MOST_PINNED = 0.8
# LMDB maps its file, and locks of both stores are the kernel's.
REMOTE = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "afs", "ceph", "glusterfs", "lustre")


def folders(place: Folders) -> Iterator[Finding]:
    """They exist or can be made, are this user's, and nobody else reads them."""
    is_sound = True
    for name in ("data", "cache", "config", "runtime"):
        for finding in _folder(name, getattr(place, name)):
            is_sound = False
            yield finding
    if is_sound:
        yield ok("folders", f"{place.data}, {place.cache}, {place.config}, {place.runtime}")


def _folder(name: str, path: Path) -> Iterator[Finding]:
    area = f"{name} folder"
    above = path
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        yield problem(area, f"{above} is no folder", "move it away")
        return
    if not os.access(above, os.W_OK | os.X_OK):
        yield problem(area, f"{above} cannot be written to", _how_to_write(above))
    if above != path:
        return  # it is made when it is needed
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield note(area, f"{path} belongs to user {status.st_uid}, and you are {os.geteuid()}")
    if mode := stat.S_IMODE(status.st_mode) & 0o077:
        yield problem(area, f"others may open {path} ({mode:o})", f"chmod 700 {path}")


def _how_to_write(path: Path) -> str:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "its file system is mounted read-only: let CHATKV_HOME name another folder"
    return f"chmod u+rwx {path}, or let CHATKV_HOME name another folder"


def disk(place: Folders) -> Iterator[Finding]:
    """Room for conversations and for KV, and on what kind of disk."""
    from chatkv_store.budget import default_budget, disk_free_bytes

    budget, free = default_budget(place.kv), disk_free_bytes(place.cache)
    cap = "no cap" if budget.max_bytes is None else f"{size(budget.max_bytes)} at most for KV"
    text = f"{size(free)} free; {cap}, and {size(budget.min_free_bytes)} stay free"
    if free < budget.min_free_bytes:
        yield problem("disk", f"{text}: no KV is stored", "free some, or lower cache.min-free")
    else:
        yield ok("disk", text)
    if disk_free_bytes(place.data) < LEAST_DISK_BYTES:
        left = size(disk_free_bytes(place.data))
        yield problem("disk", f"{left} free for conversations in {place.data}", "free some")
    for name, path in (("data", place.data), ("cache", place.cache)):
        kind = _kind(path)
        if kind.startswith(REMOTE):
            advice = "locks do not hold there: let CHATKV_HOME name a folder on a local disk"
            yield problem("disk", f"the {name} folder lies on {kind}", advice)
        elif name == "data" and kind in ("tmpfs", "ramfs"):
            yield note("disk", "conversations lie in memory, and are gone after a restart")


def _kind(path: Path) -> str:
    """The type of the file system that holds `path`, or would; "" where nothing tells."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found, length = "", -1
    for line in mounts.splitlines():
        _, at, kind, *_ = line.split(" ")
        at = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), at)
        if len(at) >= length and path.resolve().is_relative_to(at):
            found, length = kind, len(at)
    return found


def conversations(place: Folders) -> Iterator[Finding]:
    from chatkv_store.conversations import Conversations
    from chatkv_store.health import conversations_damage

    path, area = place.conversations, "conversations"
    if not path.exists():
        yield ok(area, "none yet")
        return
    advice = "put a copy back, or move it away to begin anew; its words may still be saved"
    try:
        with Conversations(path) as store:
            number, refusal = len(store.list_sessions()), store.refusal
    except StoreVersionError as error:
        yield problem(area, str(error), "update chatkv")
        return
    except StoreBusy as error:
        yield note(area, str(error), "try again when it is done")
        return
    except StoreError as error:
        yield problem(area, str(error), advice)
        return
    damage = conversations_damage(path) if path.stat().st_size <= MOST_CHECKED_BYTES else None
    if damage is not None:
        yield problem(area, f"{path} is damaged: {damage}", advice)
    elif refusal is not None:
        yield problem(area, f"{refusal}: nothing new is saved", f"let {path} be written to")
    else:
        yield ok(area, f"{plural(number, 'session')}, {size(path.stat().st_size)}, sound")


def kv(place: Folders) -> Iterator[Finding]:
    """A quick look: LMDB's trees are walked, values are not read."""
    from chatkv_store.blocks import BlockStore
    from chatkv_store.budget import default_budget
    from chatkv_store.environment import DATA_FILE

    area = "KV cache"
    if not (place.kv / DATA_FILE).is_file():
        yield ok(area, "empty: it fills as you chat")
        return
    try:
        with BlockStore(place.kv, read_only=True) as store:
            stats, pinned = store.stats(), _pinned_bytes(place, store)
    except StoreLocked as error:
        yield problem(area, str(error), "set cache.key-file, or CHATKV_KEY_FILE")
    except StoreVersionError as error:
        yield problem(area, str(error), "update chatkv, or `chatkv cache clear`")
    except StoreBusy as error:
        yield note(area, str(error))
    except StoreDamaged as error:
        advice = "`chatkv cache verify --repair` begins it anew; no word is lost"
        yield problem(area, str(error), advice)
    except StoreError as error:
        yield problem(area, str(error), "chats go on without it, and compute again")
    else:
        blocks = plural(stats["blocks"], "block")
        used, file = size(stats["used_bytes"]), size(stats["file_bytes"])
        yield ok(area, f"{blocks}, {used} in a file of {file}; `chatkv cache verify` reads all")
        cap = default_budget(place.kv).max_bytes
        if cap is not None and pinned > MOST_PINNED * cap:
            text = f"pinned conversations take {size(pinned)} of {size(cap)}"
            yield problem("pinned KV", text, "`chatkv cache unpin` some, or raise cache.max-size")
        elif pinned:
            yield ok("pinned KV", f"{size(pinned)} are never evicted")


def _pinned_bytes(place: Folders, blocks: BlockStore) -> int:
    """What conversations that are never evicted keep of the cap."""
    from chatkv_store.conversations import Conversations
    from chatkv_store.sharing import usage

    try:
        with Conversations(place.conversations, must_open=False) as store:
            pinned = [session for session in store.list_sessions() if session.pinned]
            shares = usage(blocks, store, pinned).sessions if pinned else []
    except StoreError:  # which is told of the conversations
        return 0
    return sum(share.num_bytes for share in shares)


def models(place: Folders, wanted: str | None) -> Iterator[Finding]:
    """The model that a new conversation is held with, and what else there is."""
    from chatkv.errors import ChatkvError
    from chatkv.model.catalog import find_model
    from chatkv.model.inventory import inventory

    try:
        files = find_model(wanted, place.cache, may_download=False)
        for file in files.files:
            with file.open("rb") as source:
                source.read(1)
    except ChatkvError as error:
        if wanted is not None:
            advice = f"`chatkv models pull {wanted}`, or set model to another"
        else:
            advice = "or `chatkv models pull ORG/NAME`"
        yield problem("model", str(error), advice)
    except OSError as error:
        yield problem("model", f"{error.filename}: {error.strerror}", "let it be read")
    else:
        num_bytes = sum(file.stat().st_size for file in files.files)
        yield ok("model", f"{files.name}, {size(num_bytes)}")
    found = inventory(place.cache, place.models)
    for model in found.models:
        if model.problem is not None and model.origin != "shared":
            yield note("model", f"{model.name}: {model.problem}")
    if found.orphans:
        taken = size(sum(copy.num_bytes for copy in found.orphans))
        copies = plural(len(found.orphans), "prepared copy", "prepared copies")
        text = f"{copies} of files that are gone take {taken}"
        yield note("model", text, "`chatkv models rm --orphans` deletes them")
