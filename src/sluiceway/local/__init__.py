"""An instance's own partitions: queue drivers, backends, rows. Never asks other instances."""

from __future__ import annotations
