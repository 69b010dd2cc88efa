"""Engines that `make test-engines` installs, and `make test` does without."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def engine(name: str) -> ModuleType:
    """The module. Without it the file's tests are skipped, and say so, but for those of the engines in SLUICEWAY_TEST_ENGINES."""
    if name in os.environ.get("SLUICEWAY_TEST_ENGINES", "").split(","):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name, reason=f"{name} is not installed: make test-engines")
    return module
