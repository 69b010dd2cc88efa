"""Coverage-guided fuzzing of the decoders with atheris: `python -m tests.fuzz.guided`, or `make fuzz-coverage` with SECONDS for each.

Inputs that reached new code are kept in build/fuzz, and the next run begins from them. Each decoder has a process of its own, so a crash is
seen. An input with a fault is kept beside them, and printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ROOT / "build" / "fuzz"
TIMEOUT: Final = 10
"""Seconds that one input may take."""
MEMORY: Final = 2_048
"""MiB that one input may take, with what the process has anyway."""
_COVERED: Final = re.compile(r"#\d+\s+(?:INITED|DONE|NEW|REDUCE|pulse|RELOAD)\s+cov: (\d+) ft: (\d+) corp: (\d+)")
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s+(\d+)")


class Run(NamedTuple):
    """What became of one decoder. `edges`: at the first and the last look, of the code of this project that was reached; `kept`: inputs."""

    name: str
    executions: int
    seconds: float
    edges: tuple[int, int]
    kept: int
    faults: list[Path]

    def __str__(self) -> str:
        first, last = self.edges
        speed = self.executions / max(self.seconds, 1e-9)
        said = f"{self.executions:,} inputs in {self.seconds:.0f} s ({speed:,.0f}/s), {first:,} edges from the start, {last - first:,} more"
        return f"{self.name}: {said}, {self.kept:,} inputs kept, {len(self.faults)} faults"


def fuzz(name: str, seconds: int, kept: Path = KEPT, seed: int = 0, module: str = "tests.fuzz.targets") -> Run:
    """Fuzz a decoder for so long, or up to a fault. `seed` 0: chosen by the time. `module` has the TARGETS."""
    corpus, faults = kept / name, kept / "faults"
    corpus.mkdir(parents=True, exist_ok=True)
    faults.mkdir(exist_ok=True)
    before = set(faults.glob(f"{name}-*"))
    command = [sys.executable, "-m", "tests.fuzz.guided", "--child", name, str(seconds), str(kept), str(seed), module]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    said = done.stderr.decode(errors="replace")
    covered = [tuple(map(int, found.groups())) for found in _COVERED.finditer(said)]
    executed = _EXECUTED.findall(said)
    new = sorted(set(faults.glob(f"{name}-*")) - before)
    if (done.returncode and not new) or not covered:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{said[-2_000:]}")
    if new:
        print(said[-4_000:], file=sys.stderr)
    edges = (covered[0][0], covered[-1][0])
    return Run(name, int(executed[-1]) if executed else 0, time.monotonic() - began, edges, covered[-1][2], new)


def child(name: str, seconds: str, kept: Path, seed: str, module: str) -> None:
    """Never returns: the fuzzer ends the process."""
    # Each input that is refused would have a line, which takes longer than to refuse it.
    logging.disable()
    atheris: Any = import_module("atheris")
    with atheris.instrument_imports(include=["sluiceway", "tests.fuzz.planted"]):
        target = import_module(module).TARGETS[name]
        # Some are made with what is imported only then.
        seeds = target.seeds()
    corpus = kept / name
    for each in seeds:
        (corpus / hashlib.sha1(each, usedforsecurity=False).hexdigest()).write_bytes(each)
    options = {
        "max_total_time": seconds,
        "seed": seed,
        "max_len": target.longest,
        "timeout": TIMEOUT,
        "rss_limit_mb": MEMORY,
        "print_final_stats": 1,
        "artifact_prefix": f"{kept / 'faults' / name}-",
        # Coverage of modules that are imported late is found late; nothing is left out for it.
        "len_control": 0,
    }
    put: Callable[[bytes], object] = target.put
    atheris.Setup([sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)], put)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided")
    parser.add_argument("names", nargs="*", help="decoders; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="for each decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", nargs=2, metavar=("NAME", "FILE"), help="put the input in FILE through that decoder")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, seconds, kept, seed, module = given.child
        child(name, seconds, Path(kept), seed, module)
    targets = import_module("tests.fuzz.targets").TARGETS
    if given.repeat:
        name, file = given.repeat
        targets[name].put(Path(file).read_bytes())
        print("no fault")
        return
    faults = []
    for name in given.names or targets:
        run = fuzz(name, given.seconds, seed=given.seed)
        print(run, flush=True)
        for fault in run.faults:
            print(f"  repeat it with python -m tests.fuzz.guided --repeat {name} {fault.relative_to(ROOT)}")
        faults += run.faults
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
