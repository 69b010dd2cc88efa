"""Partitions in a bucket: the entries of journals, a partition's head, and the state that they add up to."""
