"""Connection balance: connections to one address spread evenly over the processes that accept them."""

from __future__ import annotations

import fcntl
import mmap
from collections.abc import Callable
from typing import BinaryIO, TypeVar

T = TypeVar("T")

_WIDTH = 8


class Seats:
    """Connection counts of `places` processes, in a file that all of them have open.

    Each process claims a place, which becomes free when it ends, however it does. Raises OSError.
    """

    def __init__(self, file: BinaryIO, places: int) -> None:
        file.truncate(places * _WIDTH)
        self._counts = memoryview(mmap.mmap(file.fileno(), places * _WIDTH)).cast("q")
        self._file = file
        self._place = next(place for place in range(places) if self._claim(place))
        self.note(0)

    def _claim(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def note(self, connections: int) -> None:
        """Record this process's number of connections."""
        self._counts[self._place] = connections

    def has_more_than_others(self) -> bool:
        """Whether another process has fewer, and should accept the next one. Only a hint: that process may have died."""
        return self._counts[self._place] > min(self._counts)


class Counted(set[T]):
    """Set that reports its size whenever that changes by one."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note = note

    def add(self, element: T) -> None:
        super().add(element)
        self._note(len(self))

    def discard(self, element: object) -> None:
        super().discard(element)
        self._note(len(self))

    def remove(self, element: T) -> None:
        super().remove(element)
        self._note(len(self))
