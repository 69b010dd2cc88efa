"""Bundles: what is to be done about one, from its record and the counts of its items."""
