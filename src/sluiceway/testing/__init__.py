"""For your own tests: `server()`, an in-memory server within the process, whose time can be moved ahead (docs/testing.md).

Beside it, the conformance suites of the ports: a store is correct when it passes. Subclass a suite under a name that begins with
`Test` and override its `open_store` fixture. Only the suites need pytest.
"""

from __future__ import annotations

import contextlib

from sluiceway.testing.memory_server import TestClock, TestServer, server

__all__ = ["TestClock", "TestServer", "server"]

with contextlib.suppress(ImportError):
    import pytest

    # So that a failing assert of a suite shows its values, as in any test file.
    pytest.register_assert_rewrite("sluiceway.testing.partition_store_suite", "sluiceway.testing.meta_store_suite")
