"""Floor 8: the HTTP face of a service."""
