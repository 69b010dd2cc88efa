"""The judge of rebalances: real processes, two kinds of storage, load, kills at every step, a ledger outside. `make test-rebalance`."""

from __future__ import annotations
