"""Campaign on groups of many members: `make test-members`."""
