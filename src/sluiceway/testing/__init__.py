"""For your own tests: `server()`, an in-memory server within the process, whose time can be moved ahead (docs/guides/testing.md).

Also the conformance suites of the ports: a store that passes is correct. Subclass a suite under a name that begins with `Test` and
override its fixture, such as `open_store`. Only the suites need pytest.
"""

from __future__ import annotations

import contextlib

from sluiceway.testing.memory_server import TestClock, TestServer, server

__all__ = ["TestClock", "TestServer", "server"]

with contextlib.suppress(ImportError):
    import pytest

    # Makes a failing assert of a suite show its values, as in any test file.
    for suite in ("partition_store", "meta_store", "sync_log", "position_store"):
        pytest.register_assert_rewrite(f"sluiceway.testing.{suite}_suite")
