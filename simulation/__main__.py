"""`python -m simulation`. All code is in `runner`, because a worker process cannot import a `__main__`."""

from __future__ import annotations

import sys

from simulation.runner import main

if __name__ == "__main__":
    sys.exit(main())
