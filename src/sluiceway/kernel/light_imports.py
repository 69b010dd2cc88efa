"""Keeping libraries from loading what is not used here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast


@contextmanager
def without(module: str) -> Iterator[None]:
    """Inside, an import of `module` fails as if it were not installed, unless it is loaded already."""
    hidden = module not in sys.modules
    if hidden:
        sys.modules[module] = cast(ModuleType, None)
    try:
        yield
    finally:
        if hidden:
            del sys.modules[module]
