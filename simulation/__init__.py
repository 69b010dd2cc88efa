"""Deterministic simulator: the real state machines in virtual time, over failing stores, with a ledger that finds every broken promise."""
