"""Floor 0: foundations of the project. Imports nothing of it."""
