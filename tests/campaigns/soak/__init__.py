"""The soak: a server under half of its load for long, with random faults, and what it takes of the machine over time. It imports nothing of
the product: only HTTP, and what the system says of processes and files."""
