"""The memory of the process, as the C library manages it."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = 32 << 20
"""Bytes. What is larger gets pages of its own, as ever; glibc takes no more than this."""
_SPARE = 64 << 20
"""Bytes that may lie unused at the end of a heap. A thread may have a heap of its own, which is no larger than this."""


def keep_memory() -> None:
    """Let bodies and blobs be put where those before them were.

    It holds for the whole process. Where the C library is not glibc, nothing changes. glibc otherwise gives their memory back to the
    system each time, which has to clear each page for the next: of a commit of 1 MB that was more than half, beside the sync.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _SPARE)
