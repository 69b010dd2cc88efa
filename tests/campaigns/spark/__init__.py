"""What `make test-spark` runs: drivers, executors and servers that are killed at chosen points, with a ledger over the sinks."""

from __future__ import annotations
