"""Partitions in a bucket: the entries of a partition's log, and the state that they add up to."""
