"""Sync logs, elections and position stores for groups of tasks."""

from __future__ import annotations
