"""The peers, each as a `System` (`sluiceway.bench.systems`)."""

from __future__ import annotations
