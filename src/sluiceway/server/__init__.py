"""Floor 5: the HTTP face of a service."""
