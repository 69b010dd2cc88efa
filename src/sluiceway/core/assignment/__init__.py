"""Who owns what: protocols by which the members of a group divide the items of a resource, as pure machines."""
