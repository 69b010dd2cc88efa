"""PartitionStores."""
