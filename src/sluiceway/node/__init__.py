"""Floor 4: the instance. Drivers feed the machines of the core and carry out their effects."""
