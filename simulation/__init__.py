"""The simulated world: real machines in virtual time, over stores that fail, with a ledger that finds every broken promise."""
