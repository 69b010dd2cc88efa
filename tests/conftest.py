"""What every test shares. Markers are declared in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# A deadline per example would measure the machine, not the code.
settings.register_profile("sluiceway", deadline=None, print_blob=True)
settings.load_profile("sluiceway")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
