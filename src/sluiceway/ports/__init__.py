"""Floor 2: what the core asks of the world, as Protocols whose docstrings state the guarantee."""
