"""`python -m bench hard`: work that does not suit a queue of ranges. Single-item leases, items produced one by one, completes in
random order, leases that run out all at once.

Each case is its own process: an instance on SQLite (FULL) with its callers, without HTTP, whose cost does not depend on the work.
Processor time is that of both. All answers are checked; a case that exceeds its bound is ended, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import uvloop

from sluiceway.bench.figures import progress, shown, write_page
from sluiceway.bench.rows import payload_of, rows_of
from sluiceway.bench.servers import forget_peak, peak, resident, written_bytes
from sluiceway.instance.service import Service
from sluiceway.model.requests import DONE, Extend, Lease, Offsets, Produce, QueueSpec, Selection, Settle
from sluiceway.server.run import spare_the_collector

T = TypeVar("T")
Document = dict[str, Any]
Leases = list[tuple[int, int]]
"""Partition and number of each lease."""

PARTITIONS = 4
PAYLOAD = 100
BULK = 10_000
"""Items of a large produce or lease."""
CALL = 1_000
"""Ids or leases named by one call."""
CALLERS = 64
SINGLES = 256
"""Callers that each produce one item at a time."""
LONG = 3_600_000
"""Milliseconds that exceed every lease and call."""
SOON = 2_000
"""Milliseconds until a common deadline, plus the time to set it on the leases."""
COMMITS = 0.5
"""Seconds in which the changes of the last cycles are written."""


def short(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


class Bench:
    """A started service with one queue, and its measurements."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.phases: list[Document] = []

    async def measured(self, phase: str, items: int, work: Awaitable[int], why: str, wait: float = 0.0) -> None:
        """Measure work that returns its number of items; `wait`: seconds that it idles. Raises RuntimeError for another number."""
        memory, written = resident(os.getpid()), written_bytes()
        forget_peak()
        began, used, loop = time.perf_counter(), time.process_time(), time.thread_time()
        done = await work
        seconds, used = max(1e-3, time.perf_counter() - began - wait), time.process_time() - used
        loop = time.thread_time() - loop
        after = resident(os.getpid())
        if done != items:
            raise RuntimeError(f"{phase}: {done} items instead of {items}")
        self.phases.append(
            {
                "phase": phase,
                "items": items,
                "seconds": round(seconds, 2),
                "items_per_s": round(items / seconds),
                "cpu_us_per_item": short(used / items * 1e6),
                "loop_us_per_item": short(loop / items * 1e6),
                "written_per_item": short((written_bytes() - written) / items),
                "memory_per_item": short((after - memory) / items),
                "memory_before_mb": round(memory / 1e6),
                "memory_after_mb": round(after / 1e6),
                "memory_peak_mb": round(peak(os.getpid()) / 1e6),
                "why": why,
            }
        )

    async def produce(self, items: int, rows: int, callers: int) -> int:
        """Produce `items` items, `rows` per call."""
        request = Produce(rows_of(rows, PAYLOAD), LONG)

        async def call(_: int) -> int:
            return (await self.service.produce("q", request)).items

        return await summed(call, range(items // rows), callers)

    async def lease(self, items: int, rows: int, *, payload: bool = False, then_complete: bool = False, into: Leases | None = None) -> int:
        """Lease all of the items, in leases of up to `rows`. Appends the leases to `into`."""
        request, got, wanted = Lease("bench", rows, LONG, LONG), 0, 0

        async def caller() -> None:
            nonlocal got, wanted
            # Together they never ask for more than there is, so that no caller waits for items that will not come.
            while wanted < items:
                wanted += rows
                leased = await self.service.lease("q", request, payload=payload)
                count = sum(lease.items for lease in leased.leases)
                wanted -= rows - count
                if payload and sum(map(payload_of, leased.batches)) != count * PAYLOAD:
                    raise RuntimeError(f"{count} items leased, and others answered")
                got += count
                if then_complete:
                    await self.settle(by_lease([(lease.partition, lease.number) for lease in leased.leases]))
                if into is not None:
                    into.extend((lease.partition, lease.number) for lease in leased.leases)

        await asyncio.gather(*(caller() for _ in range(CALLERS if rows == 1 else 8)))
        return got

    async def settle(self, selections: dict[int, list[Selection]]) -> int:
        settled = await self.service.settle("q", Settle(selections, LONG))
        if settled.ignored:
            raise RuntimeError(f"{len(settled.ignored)} ignored, the first of them {settled.ignored[0]}")
        return settled.completed

    async def complete(self, chosen: Offsets, select: Callable[[Offsets], dict[int, list[Selection]]], call: int, callers: int = 8) -> int:
        """Complete rows of (partition, number), `call` of them per call, in that order."""

        async def one(start: int) -> int:
            return await self.settle(select(chosen[start : start + call]))

        return await summed(one, range(0, len(chosen), call), callers)

    def total(self, name: str) -> int:
        return sum(getattr(partition, name) for partition in self.service.stats("q").partitions)

    def given(self, counter: str) -> Offsets:
        """All (partition, number) that a fresh queue has given out, in random order; numbers from 0."""
        each = [
            np.stack([np.full(count, partition.partition), np.arange(count)], axis=1)
            for partition in self.service.stats("q").partitions
            if (count := getattr(partition, counter))
        ]
        chosen: Offsets = np.random.default_rng(11).permutation(np.concatenate(each).astype(np.int64))
        return chosen

    async def run_out(self, leases: Leases, why: str) -> None:
        """Let all of these leases, the only ones, run out at one moment. Also measures the longest uninterrupted work of the loop."""
        items = self.total("total_leased")
        ready = self.total("ready")
        began = time.perf_counter()
        await self.service.extend("q", Extend(leases[:BULK], LONG, LONG))
        # Twice the time needed to set all of them.
        chunks = -(-len(leases) // BULK)
        deadline = time.perf_counter() + SOON / 1_000 + 2 * chunks * (time.perf_counter() - began)
        for start in range(0, len(leases), BULK):
            await self.service.extend("q", Extend(leases[start : start + BULK], LONG, round((deadline - time.perf_counter()) * 1_000)))
        left = deadline - time.perf_counter()
        if left < 0 or self.total("ready") > ready:
            raise RuntimeError("the leases ran out before all of them had their deadline")

        held = 0.0

        async def until_ready() -> int:
            nonlocal held
            await asyncio.sleep(max(0.0, left - 0.05))
            last = time.thread_time()
            # Polls, since the service has no event for the end of the last cycle.
            while self.total("total_leased"):
                await asyncio.sleep(0.001)
                now = time.thread_time()
                held, last = max(held, now - last), now
            await asyncio.sleep(COMMITS)
            return self.total("ready") - ready

        await self.measured(f"{len(leases):,} leases run out together", items, until_ready(), why, wait=left + COMMITS)
        self.phases[-1]["held_ms"] = round(held * 1e3, 1)


async def summed(call: Callable[[T], Awaitable[int]], each: Iterable[T], callers: int) -> int:
    """Sum the results of the calls, with up to `callers` of them at a time."""
    todo, done = iter(each), 0

    async def caller() -> None:
        nonlocal done
        for one in todo:
            count = await call(one)
            done += count

    await asyncio.gather(*(caller() for _ in range(callers)))
    return done


def by_lease(leases: Iterable[tuple[int, int]]) -> dict[int, list[Selection]]:
    selections: dict[int, list[Selection]] = {}
    for partition, number in leases:
        selections.setdefault(partition, []).append(Selection(DONE, lease=number))
    return selections


def by_number(chosen: Offsets) -> dict[int, list[Selection]]:
    """Selections by lease id. A partition's leases have numbers from 1."""
    return by_lease((partition, number + 1) for partition, number in chosen.tolist())


def by_offset(chosen: Offsets) -> dict[int, list[Selection]]:
    """Selections by item id. A partition's items have offsets from 0."""
    return {
        int(partition): [Selection(DONE, offsets=np.sort(chosen[chosen[:, 0] == partition, 1]))] for partition in np.unique(chosen[:, 0])
    }


# ---- the cases ------------------------------------------------------------------------------------------------


async def ones(bench: Bench, items: int) -> None:
    await bench.produce(items, min(BULK, items), 1)
    await bench.measured(
        "leased one at a time out of batches of 10,000, with payloads",
        items,
        bench.lease(items, 1, payload=True),
        "A lease moves the head by one and writes one record. Cutting one row out of columns for the answer (six columns of "
        "one row each) takes a third of the time, the cycle a fifth, and SQLite, whose commits 64 callers share, an eighth.",
    )
    await bench.measured(
        "each completed by a call of its own, in random order",
        items,
        bench.complete(bench.given("leased"), by_number, 1, CALLERS),
        "Completing a whole lease deletes one record. SQLite takes nearly half of the time: in random order, nearly every "
        "record is on a page of its own, which is written to the log and again to the file. Closing the lease takes a sixth, "
        "and the call's path most of the rest.",
    )


async def singly(bench: Bench, items: int) -> None:
    await bench.measured(
        f"produced one by one, by {SINGLES} callers",
        items,
        bench.produce(items, 1, SINGLES),
        "Everything that waits when a cycle begins becomes one blob and one extent, so many calls share a commit and its sync, "
        "and SQLite takes only a sixth of the time. The call's path into the instance and out takes a quarter, the cycle a "
        "third.",
    )
    await bench.measured(
        "leased 10,000 at a time with payloads, and completed",
        items,
        bench.lease(items, BULK, payload=True, then_complete=True),
        "A lease names one extent for each cycle that stored its items, and reads as many blobs. Completing it deletes one "
        "record and those blobs. SQLite takes nearly half of the time, to write, read and delete; the cycle a fifth; cutting "
        "rows for the answer an eighth.",
    )


async def live(bench: Bench, items: int) -> None:
    await bench.produce(items, min(BULK, items), 1)
    await bench.measured(
        "leased one at a time, all of them live at once",
        items,
        bench.lease(items, 1),
        "The newest live leases are objects, the older ones rows in columns, and each has a record of its own. The cycle takes "
        "a third of the time, most of it to deal items to leases, and SQLite a sixth; the rest is the cost of each call.",
    )
    chosen = bench.given("leased")
    quarter = items // 4
    await bench.measured(
        "a quarter completed in random order, 1,000 item ids a call",
        quarter,
        bench.complete(chosen[:quarter], by_offset, CALL),
        "Each id is looked up among the live leases (a quarter of the time) and ends one (another quarter, half of it to "
        "record that it ended). Deleting a record for each takes a quarter as well.",
    )
    await bench.measured(
        "a quarter completed in random order, 1,000 lease ids a call",
        quarter,
        bench.complete(chosen[quarter : 2 * quarter], by_number, CALL),
        "The same without looking up offsets: ending the leases and deleting their records take 45 % each.",
    )
    rest = [(partition, number + 1) for partition, number in chosen[2 * quarter :].tolist()]
    await bench.run_out(
        rest,
        "A cycle ends as many leases as fit into 4 ms, 200 at most. Ending them and putting their items back, as extents over "
        "the same blobs, takes two fifths of the time; encoding why each ended a fifth; deleting its record and writing that "
        "it ended a third.",
    )


async def shuffled(bench: Bench, items: int) -> None:
    await bench.produce(items, min(BULK, items), 1)
    await bench.lease(items, CALL)
    await bench.measured(
        f"completed in random order, 1,000 ids a call, out of {items // CALL:,} leases of 1,000",
        items,
        bench.complete(bench.given("leased"), by_offset, CALL),
        "A call touches nearly every lease, so this is the worst order. Finding about four ids in each lease takes two thirds "
        "of the time, writing a bitmap for each an eighth.",
    )


async def expiry(bench: Bench, items: int) -> None:
    await bench.produce(items, min(BULK, items), 1)
    for rows in (BULK, CALL, CALL // 10):
        leases: Leases = []
        await bench.lease(items, rows, into=leases)
        await bench.run_out(
            leases,
            "A lease's ranges go back as extents over the same blobs: time and bytes grow with the number of leases, as above, "
            "and no payload is written.",
        )


class Case(NamedTuple):
    run: Callable[[Bench, int], Awaitable[None]]
    share: int
    """Divisor of a run's maximum number of items."""
    bound: float
    """Seconds per million items; each case has a minute in addition."""


CASES = {
    "ones": Case(ones, 100, 1_000),
    "singly": Case(singly, 1, 100),
    "live": Case(live, 10, 300),
    "shuffled": Case(shuffled, 10, 120),
    "expiry": Case(expiry, 10, 30),
}


async def _run(name: str, items: int, folder: Path) -> list[Document]:
    service = Service(folder)
    await service.start()
    await service.create_queue(QueueSpec("q", PARTITIONS))
    bench = Bench(service)
    await CASES[name].run(bench, items)
    await service.stop()
    return bench.phases


def measure(name: str, items: int) -> list[Document]:
    """Run the case in its own process and return its phases. Raises RuntimeError if it failed or exceeded its bound."""
    bound = 60 + CASES[name].bound * items / 1e6
    with tempfile.TemporaryDirectory(prefix="sluiceway-hard-") as folder:
        command = [sys.executable, "-m", __spec__.name, name, str(items), folder]
        try:
            ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=bound, check=False, text=True)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name} took longer than {bound:.0f} s") from None
    if ended.returncode:
        raise RuntimeError(f"{name} failed")
    phases: list[Document] = json.loads(ended.stdout)
    return phases


COLUMNS = {
    "items": "items",
    "items/s": "items_per_s",
    "processor, µs": "cpu_us_per_item",
    "… of the loop": "loop_us_per_item",
    "written, B": "written_per_item",
    "memory, B": "memory_per_item",
}
"""Columns of a phase by heading: the items, the rate, then figures per item."""


def _cells(phase: Document) -> list[str]:
    held = phase.get("held_ms")
    return [
        *(shown(phase[key]) for key in COLUMNS.values()),
        f"{phase['memory_before_mb']:,} → {phase['memory_after_mb']:,}",
        f"{phase['memory_peak_mb']:,}",
        "" if held is None else f"{held:,}",
    ]


def table(cases: dict[str, list[Document]]) -> str:
    """Render Markdown: the figures, then their explanations."""
    heads = ["", *COLUMNS, "memory of the process, MB", "at most", "loop held, ms"]
    phases = [(name, each) for name, phases in cases.items() for each in phases]
    rows = [[f"{number}. `{name}`: {each['phase']}", *_cells(each)] for number, (name, each) in enumerate(phases, 1)]
    lines = [f"| {' | '.join(cells)} |" for cells in [heads, ["---"] * len(heads), *rows]]
    whys: dict[str, int] = {}
    for number, (_, each) in enumerate(phases, 1):
        whys.setdefault(each["why"], number)
    return "\n".join([*lines, "", *(f"* {number}: {why}" for why, number in whys.items())])


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if a case failed or exceeded its bound."""
    parser = argparse.ArgumentParser(prog="python -m bench hard", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="which to measure; all of them, if none is named")
    parser.add_argument("--items", type=int, default=10_000_000, help="of the largest case; the others have a tenth or a hundredth of it")
    parser.add_argument("--output", type=Path, default=Path("bench/results/hard.json"))
    parser.add_argument("--page", type=Path, help="put the table into this page, such as docs/explanation/performance.md")
    given = parser.parse_args(arguments)
    cases: dict[str, list[Document]] = {}
    failed = 0
    for name in given.cases or CASES:
        items = max(1_000, given.items // CASES[name].share)
        progress(f"{name}: {items:,} items")
        try:
            cases[name] = measure(name, items)
        except RuntimeError as error:
            failed += 1
            progress(f"FAILED: {error}")
    print(table(cases))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[1]:.1f}"
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps({"machine": machine, "items": given.items, "cases": cases}, indent=2, ensure_ascii=False) + "\n")
    if given.page:
        write_page(given.page, "hard", f"{machine}.\n\n{table(cases)}")
    progress(f"written to {given.output}")
    return int(failed > 0)


if __name__ == "__main__":
    # As a server does.
    spare_the_collector()
    print(json.dumps(uvloop.run(_run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))))
