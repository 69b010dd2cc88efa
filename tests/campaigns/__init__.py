"""Campaigns: long runs against real processes. Their ledgers count attempts on plain queues, as most tests do (tests/conftest.py)."""

from __future__ import annotations

import os

os.environ["SLUICEWAY_SERVER__NEW_QUEUES"] = "plain"
