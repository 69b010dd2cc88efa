"""Logical queues: they choose the partition for each request, and the ready items for each lease."""

from __future__ import annotations
