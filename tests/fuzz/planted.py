"""Decoders with planted faults, which the fuzzer must find: one input in ten kills the process, another one raises what it should not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from random import Random

from tests.fuzz import decoders


def attempt(chance: Random) -> Callable[[], None]:
    number = chance.randrange(10)

    def decode() -> None:
        if number == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        if number == 1:
            raise KeyError("planted")

    return decode


if __name__ == "__main__":
    decoders.FORMATS["planted"] = attempt
    decoders.main()
