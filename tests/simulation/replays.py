"""Histories that are lived through again in another process."""

from __future__ import annotations

import os
import subprocess
import sys


def replayed(*arguments: str) -> str:
    """What `python -m simulation` prints with these arguments, in a process with another hash seed than this one: sets of names have
    another order there."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
