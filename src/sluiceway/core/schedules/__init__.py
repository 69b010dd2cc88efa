"""Schedules: which times an expression means, and which of them are to be fired."""
