"""Connections to one address, divided among the processes that accept them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

from sluiceway.server.connection_balance import Counted

PLACES = 2
CHILD = f"""
import os, sys
from sluiceway.server.connection_balance import Seats
seats = Seats(os.fdopen(int(sys.argv[1]), "r+b"), {PLACES})
for line in sys.stdin:
    if line.strip() != "?":
        seats.note(int(line))
    print(seats.has_more_than_others(), flush=True)
"""


class Process:
    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child

    def has_more(self, connections: int | None = None) -> bool:
        """With so many now, or with as many as before."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("?\n" if connections is None else f"{connections}\n")
        self.child.stdin.flush()
        return self.child.stdout.readline() == "True\n"


@contextmanager
def process(file: BinaryIO) -> Iterator[Process]:
    number = file.fileno()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(number)], pass_fds=[number], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        yield Process(child)
        child.kill()


def test_who_has_more_than_another_leaves_the_next_to_it() -> None:
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.TemporaryFile())
        one, other = (stack.enter_context(process(file)) for _ in range(PLACES))
        assert not one.has_more(0)
        assert not other.has_more(0)
        assert one.has_more(1)
        assert not other.has_more()
        assert not other.has_more(1)
        assert not one.has_more()
        assert not one.has_more(0)
        assert other.has_more()


def test_the_place_of_a_process_that_was_killed_is_free_again() -> None:
    with tempfile.TemporaryFile() as file, process(file) as stays:
        stays.has_more(1)
        with process(file) as dies:
            assert dies.has_more(5)
        assert not stays.has_more()
        with process(file) as comes:
            # At its place it begins with none.
            assert not comes.has_more()
            assert stays.has_more()


def test_a_counted_set_tells_its_size() -> None:
    told: list[int] = []
    counted: Counted[str] = Counted(told.append)
    counted.add("a")
    counted.add("b")
    counted.discard("a")
    counted.discard("a")
    counted.remove("b")
    assert told == [1, 2, 1, 1, 0]
