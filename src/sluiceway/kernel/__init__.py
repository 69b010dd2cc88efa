"""Floor 0: what everything else stands on. Imports nothing of the project."""
