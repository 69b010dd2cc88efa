"""The judge of captures: simulated schedules, real streams, real kills, a ledger outside. `make test-tasks` runs it."""

from __future__ import annotations
