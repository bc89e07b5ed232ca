"""Benchmarks of scripts/ as modules, for what of them can be wrong where nothing is measured."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@contextmanager
def bench_script(name: str) -> Iterator[ModuleType]:
    """Loaded anew, with what it loads beside it; all of that is forgotten afterwards."""
    own = {path.stem for path in SCRIPTS.glob("*.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        for known in own & set(sys.modules):
            patch.delitem(sys.modules, known)
        try:
            yield importlib.import_module(name)
        finally:
            for loaded in own & set(sys.modules):
                del sys.modules[loaded]
