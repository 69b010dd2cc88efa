"""Conformance suites, one per port: an adapter is correct when it passes. They need pytest, which nothing else here does.

Subclass the suite under a name that begins with `Test` and override its `open_store` fixture.
"""

from __future__ import annotations

import pytest

# So that a failing assert of a suite shows its values, as in any test file.
pytest.register_assert_rewrite("sluiceway.testing.partition_store_suite", "sluiceway.testing.meta_store_suite")
