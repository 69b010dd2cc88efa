"""MetaStore implementations."""
