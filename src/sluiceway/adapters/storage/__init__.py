"""PartitionStore implementations."""
