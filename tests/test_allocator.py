"""Memory that was used for something large is used again, and not asked for anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

LARGE = """
import resource, sys
from sluiceway.adapters.allocator import keep_memory

def use():
    blobs = [b"x" * (1 << 20) for _ in range(4)]

if sys.argv[1] == "kept":
    keep_memory()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """How many pages the process was given while it used the same 4 MiB twenty times."""
    return int(subprocess.run([sys.executable, "-c", LARGE, way], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_memory_of_large_bodies_is_not_asked_for_anew() -> None:
    given_back, kept = faults("given back"), faults("kept")
    assert kept < given_back / 10
