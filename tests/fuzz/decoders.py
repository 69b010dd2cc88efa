"""Damaged JSON, Arrow and protobuf bodies, and peers' messages, for every decoder: each is refused by an error of ours, or accepted and
good for what follows.

The inputs go through a child process, so that a crash is seen as a signal and not as the end of the tests. An input is made from the
format, the seed and its number alone: `python -m tests.fuzz.decoders 100000 --seed 1` does 100,000 of each format, and `--one arrow 1 77`
repeats a single one.
"""

from __future__ import annotations

import argparse
import mmap
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from sluiceway.kernel.errors import SluicewayError
from sluiceway.wire import answers
from tests.fuzz import arrow_bodies, json_bodies, peer_bodies, protobuf_bodies

FORMATS: Final[dict[str, Callable[[Random], Callable[[], None]]]] = {
    "json": json_bodies.attempt,
    "arrow": arrow_bodies.attempt,
    "protobuf": protobuf_bodies.attempt,
    "peer": peer_bodies.attempt,
}
"""By format: makes an input, and returns what puts it through its decoder."""
_LONGEST_ERROR: Final = 4_000


class Findings(NamedTuple):
    """What became of the inputs of one format: how often each end was met, and what must not happen, with how to repeat it."""

    ends: Counter[str]
    faults: list[str]


def attack(kind: str, seed: int, count: int, most_faults: int = 5, program: str = "tests.fuzz.decoders") -> Findings:
    """Put inputs 0 to `count` through a child process, and what is left through another one after a crash, up to so many faults."""
    findings = Findings(Counter(), [])
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"
        while first < count and len(findings.faults) < most_faults:
            place.write_bytes(bytes(8))
            child = [sys.executable, "-m", program, "--child", kind, str(seed), str(first), str(count), str(place)]
            done = subprocess.run(child, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=False)
            for line in done.stdout.splitlines():
                end, _, times = line.rpartition(" ")
                if end == "fault":
                    findings.faults.append(f"{kind} {seed} {times}")
                else:
                    findings.ends[end] += int(times)
            if done.returncode == 0:
                return findings
            at = int.from_bytes(place.read_bytes())
            name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit {done.returncode}"
            findings.ends[name] += 1
            findings.faults.append(f"{kind} {seed} {at}: {name}")
            first = at + 1
    return findings


def child(kind: str, seed: int, first: int, count: int, place: Path) -> None:
    """Prints how often each end was met. `place` has the number of the input at hand, also after a crash."""
    ends: Counter[str] = Counter()
    with place.open("r+b") as file, mmap.mmap(file.fileno(), 8) as shown:
        for number in range(first, count):
            shown[:] = number.to_bytes(8)
            try:
                ends[one(kind, seed, number)] += 1
            except Exception as error:
                print(f"{type(error).__name__} at {kind} {seed} {number}: {error}"[:500], file=sys.stderr)
                print(f"fault {number}", flush=True)
    for end, times in ends.items():
        print(f"{end} {times}")


def one(kind: str, seed: int, number: int) -> str:
    """`accepted`, or the code of the refusal. Raises what must not happen."""
    try:
        FORMATS[kind](Random(f"{kind} {seed} {number}"))()
    except SluicewayError as error:
        # Every refusal can be answered, and does not send back all that came.
        assert len(answers.problem(error, "r-1")) < _LONGEST_ERROR, "a very long error"
        assert error.kind.status < 500, error.code
        return error.code
    return "accepted"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.decoders")
    parser.add_argument("count", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--one", nargs=3, metavar=("FORMAT", "SEED", "NUMBER"))
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        kind, seed, first, count, place = given.child
        child(kind, int(seed), int(first), int(count), Path(place))
        return
    if given.one:
        kind, seed, number = given.one
        print(one(kind, int(seed), int(number)))
        return
    chosen = time.time_ns() % 1_000_000 if given.seed is None else given.seed
    faults = 0
    for kind in FORMATS:
        began = time.monotonic()
        findings = attack(kind, chosen, given.count)
        print(f"{kind}: seed {chosen}, {findings.ends.total():,} inputs in {time.monotonic() - began:.0f} s: {dict(findings.ends)}")
        for fault in findings.faults:
            print(f"  {fault}: repeat it with python -m tests.fuzz.decoders --one {fault.partition(':')[0]}")
        faults += len(findings.faults)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
