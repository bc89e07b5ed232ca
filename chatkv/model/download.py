"""Getting a model from the hub: what is wanted of a repository, checked before it is fetched.

The transfer itself is huggingface_hub's: it shows its progress, and goes on where it was broken
off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from shutil import disk_usage
from typing import Any

from chatkv.errors import ModelError
from chatkv.model.catalog import (
    HUB_PATTERNS,
    ModelFiles,
    downloads,
    find_model,
    hub_client,
    read_json,
    split_hub_file,
)
from chatkv.model.one_line import one_line
from chatkv.words import plural, size


@dataclass(frozen=True)
class Wanted:
    """What will be fetched: `spec` names the model to `find_model`."""

    spec: str
    num_files: int
    num_bytes: int


def on_this_machine(spec: str, cache: Path) -> ModelFiles | None:
    """The model's files where all of them are here already."""
    try:
        return find_model(spec, cache, may_download=False)
    except ModelError:
        return None


def pull(spec: str, cache: Path, on_wanted: Callable[[Wanted], None]) -> ModelFiles:
    """Fetch the model that `spec` names, "org/name" or "org/name/file.gguf", below `cache`.

    on_wanted hears what that is before it begins. Raises ModelError where the hub cannot be
    reached or has no such model, where chatkv could not run it, and where the disk has no room.
    """
    repository, file = split_hub_file(spec)
    hub = hub_client(spec)
    sizes = _sizes(hub, repository)
    if not file and "config.json" not in sizes:
        file = _only_gguf(repository, sizes)
    if file:
        if file not in sizes:
            raise ModelError(f"{repository} has no file {file}: {_ggufs(sizes)}")
        chosen = {file: sizes[file]}
    else:
        chosen = {
            name: num_bytes
            for name, num_bytes in sizes.items()
            if any(fnmatch(name, pattern) for pattern in HUB_PATTERNS)
        }
        _check_config(hub, repository, cache)
    wanted = Wanted(
        f"{repository}/{file}" if file else repository, len(chosen), sum(chosen.values())
    )
    _check_room(wanted, cache)
    on_wanted(wanted)
    return find_model(wanted.spec, cache)


def _sizes(hub: Any, repository: str) -> dict[str, int]:
    """Name -> bytes of every file in the repository."""
    try:
        info = hub.HfApi().model_info(repository, files_metadata=True)
    except hub.errors.GatedRepoError:
        raise ModelError(
            f"{repository} is open to those who accepted its terms on its page: do that, and log "
            "in with `hf auth login`"
        ) from None
    except hub.errors.RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {repository}, or not for you") from None
    except (OSError, ValueError, RuntimeError, hub.errors.HfHubHTTPError) as error:
        raise ModelError(f"cannot ask the hub for {repository}: {one_line(error)}") from error
    except Exception as error:  # its HTTP client's own, of whichever library that is
        raise ModelError(f"cannot reach the hub for {repository}: {one_line(error)}") from error
    return {one.rfilename: one.size or 0 for one in info.siblings or ()}


def _only_gguf(repository: str, sizes: dict[str, int]) -> str:
    found = [name for name in sizes if name.lower().endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelError(f"{repository} holds no model that chatkv runs: no config.json, no .gguf")
    raise ModelError(
        f"{repository} holds several models, name one, as {repository}/{found[0]}: {_ggufs(sizes)}"
    )


def _ggufs(sizes: dict[str, int]) -> str:
    """What there is to choose from."""
    found = [f"{name} ({size(n)})" for name, n in sizes.items() if name.lower().endswith(".gguf")]
    return "there are " + ", ".join(found) if found else "it has no .gguf file"


def _check_config(hub: Any, repository: str, cache: Path) -> None:
    """Refuse a model that could not be run, before gigabytes of it are fetched."""
    from chatkv.model.hf_config import config_from_hf

    try:
        path = hub.hf_hub_download(repository, "config.json", cache_dir=downloads(cache))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise ModelError(f"cannot get {repository} from the hub: {one_line(error)}") from error
    config_from_hf(read_json(Path(path)), repository)


def _check_room(wanted: Wanted, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    free = disk_usage(cache).free
    if wanted.num_bytes > free:
        raise ModelError(
            f"{wanted.spec} takes {size(wanted.num_bytes)} in {plural(wanted.num_files, 'file')}, "
            f"and {size(free)} are free in {cache}"
        )
