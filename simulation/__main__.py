"""`python -m simulation`; a worker process of it cannot import a `__main__`, so all of it is in `runner`."""

from __future__ import annotations

import sys

from simulation.runner import main

if __name__ == "__main__":
    sys.exit(main())
