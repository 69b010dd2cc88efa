"""Floor 11: the commands that need the server on the machine. They are not in the client's distribution."""
