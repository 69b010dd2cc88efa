"""Floor 2: interfaces of the core to the outside world, as Protocols whose docstrings state the guarantees."""
