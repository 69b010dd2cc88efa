"""The black-box campaign: workloads over HTTP, faults of processes, and checkers over the history of all calls. It imports nothing of the
product, so no mistake of the product can hide in it."""
