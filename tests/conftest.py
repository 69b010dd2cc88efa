"""What every test shares. Markers are declared in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline per example would measure the machine, not the code. The same examples in every run, so that a change is judged by what it
# changed; `make explore` tries new ones.
settings.register_profile("sluiceway", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sluiceway"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
