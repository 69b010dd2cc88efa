"""The judge of the cluster: real processes, cut lines and a ledger outside. `make test-cluster` runs it."""

from __future__ import annotations
