"""What the server and its clients agree on: fields, settings, answers. Each is said once, and both sides are built from it."""
