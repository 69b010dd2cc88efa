"""Floor 1: the words as data. Items, queues, leases, requests, outcomes."""
