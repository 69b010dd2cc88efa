"""What every campaign is made of: servers to kill, load on them, a ledger of what they have answered, and the command line."""

from __future__ import annotations
