"""Floor 1: the domain as data. Items, queues, leases, requests, outcomes."""
