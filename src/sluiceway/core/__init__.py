"""Floor 2: the decisions, as pure machines: no clock, no I/O, no randomness, no asyncio."""
