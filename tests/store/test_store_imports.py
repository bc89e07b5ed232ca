"""What an import of the store costs, and that every name it offers is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import chatkv_store

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", chatkv_store.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(chatkv_store, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Blocks"):
        _ = chatkv_store.Blocks


def test_inspecting_a_store_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys; from chatkv_store import BlockStore\n"
        "with BlockStore(sys.argv[1]) as store:\n"
        "    store.register(b'n' * 32, {}); store.namespaces(); store.usage(); store.verify()\n"
        "heavy = {'torch', 'numpy', 'zstandard', 'chatkv', 'sqlite3'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "kv")],
        env={"PYTHONPATH": str(ROOT / "store")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_folder_is_no_package() -> None:
    """A top-level package `store` would stand in the way of others of that name."""
    assert not (ROOT / "store" / "__init__.py").exists()
