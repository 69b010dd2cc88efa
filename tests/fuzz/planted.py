"""Decoders with planted faults, which the fuzzers must find: one input in ten kills the process, another one raises what it should not; and
one fault lies behind four comparisons.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from random import Random

from tests.fuzz import decoders
from tests.fuzz.targets import Target


def attempt(chance: Random) -> Callable[[], None]:
    number = chance.randrange(10)

    def decode() -> None:
        if number == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 1:
            raise KeyError("planted")

    return decode


def _behind_comparisons(data: bytes) -> None:
    """Only what has passed one of them is near the next."""
    if data[:1] == b"S" and data[1:2] == b"l" and data[2:3] == b"u" and data[3:4] == b"i":
        raise ZeroDivisionError("planted")


TARGETS = {"planted": Target(_behind_comparisons, lambda: [b"", b"sluice", b"xxxx"])}


if __name__ == "__main__":
    decoders.FORMATS["planted"] = attempt
    decoders.main()
