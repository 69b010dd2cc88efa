"""The log of a worker: lines on stderr."""

from __future__ import annotations

import logging


def configure_logs(level: str, prefix: str = "") -> None:
    """Log to stderr from `level` on, unless the handler's module has set up logging by itself."""
    form = "%(asctime)s %(levelname)s " + prefix.replace("%", "%%") + "%(message)s"
    logging.basicConfig(level=level.upper(), format=form, datefmt="%H:%M:%S")
    # One line for each call is too much.
    logging.getLogger("httpx").setLevel(logging.WARNING)
