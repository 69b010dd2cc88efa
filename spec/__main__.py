"""Command `python -m spec`: checks each specification, and that none of its rules can be left out."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from spec.checker import Result
from spec.registry import SPECS, Task, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a promise does not hold, or a rule is not needed."""
    parser = argparse.ArgumentParser(prog="python -m spec", description=__doc__)
    parser.add_argument("specs", nargs="*", metavar="SPEC", help=f"of {', '.join(SPECS)} (all)")
    parser.add_argument(
        "--bound", action="append", default=[], metavar="NAME=N", help="another bound of the one specification that is named"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="worker processes (1)")
    options = parser.parse_args(arguments)
    names = options.specs or list(SPECS)
    if unknown := [name for name in names if name not in SPECS]:
        parser.error(f"there is no specification {unknown[0]}; there are {', '.join(SPECS)}")
    if options.bound and len(names) != 1:
        parser.error("--bound needs the name of one specification")
    bounds = tuple((name, int(number)) for name, _, number in (each.partition("=") for each in options.bound))
    if wrong := [name for name, _ in bounds if name not in SPECS[names[0]].bounds]:
        parser.error(f"{names[0]} has no bound {wrong[0]}; it has {', '.join(SPECS[names[0]].bounds)}")
    tasks = [task for name in names for task in (Task(name, bounds=bounds), *(Task(name, each) for each in SPECS[name].ablations))]
    failed = False
    for task, result in zip(tasks, _checked(tasks, options.jobs), strict=True):
        print(_line(task, result), flush=True)
        failed = failed or (result.broken is None) == (task.ablation is not None)
    return int(failed)


def _checked(tasks: Iterable[Task], jobs: int) -> Iterator[Result]:
    """The results in the order of the tasks."""
    if jobs == 1:
        yield from map(run, tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, tasks)


def _line(task: Task, result: Result) -> str:
    if task.ablation is not None:
        return f"  {task.ablation}: {_text(result)}"
    bounds = ", ".join(f"{name} {number}" for name, number in (SPECS[task.spec].bounds | dict(task.bounds)).items())
    return f"{SPECS[task.spec].title} ({bounds}): {_text(result)}"


def _text(result: Result) -> str:
    where = f"{result.states:,} states, {result.depth} steps deep, {result.seconds:.1f} s"
    if result.broken is None:
        return f"holds ({where})"
    return "\n    ".join([f"BROKEN: {result.broken} ({where})", *result.trace])


if __name__ == "__main__":
    sys.exit(main())
