"""Campaign on upgrades: `make test-upgrade`."""
