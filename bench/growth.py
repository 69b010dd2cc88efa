"""`python -m bench growth`: the cost of a long backlog, many partitions, waiting consumers and a second worker, against their number.

A part's sizes are measured in turn, on servers that all run at the same time: a ratio says more than a duration. The expected shape of
each cost goes with the figures; `--plots` draws both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.backlog import BATCH, cycles, fill
from bench.growth_plots import PARTS as PLOTTED
from bench.growth_plots import draw
from sluiceway.bench.figures import Figure, progress, table, write_page
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import SLUICEWAY, Server, cpu_seconds, family_cpu, handles, resident, server
from sluiceway.bench.servers import workers as by_workers
from sluiceway.bench.systems.sluiceway import lean
from sluiceway.bench.work import Work, run

Row = dict[str, float]

SHORT = 10_000
"""Waiting items of the backlog that the longest is compared with."""
STARTS = 3
SETTLE = 1.0
"""Seconds for a server to settle before it is watched at rest."""
CASES = ("arrow-1000x100-c8", "single-cycle-c64")


class Effort:
    """Duration of the measurements. `rounds`: leases with their completion; `rest`: seconds for which an idle server is watched."""

    def __init__(self, rounds: int, rest: float) -> None:
        self.rounds, self.rest = rounds, rest


def backlog(folder: Path, sizes: Sequence[int], effort: Effort) -> list[Row]:
    """Measure backlogs of `sizes` waiting items of 100 B in one partition."""
    folders = {size: folder / f"{size}" for size in sizes}
    for size, data in folders.items():
        progress(f"backlog: {size:,} items are produced")
        with server(SLUICEWAY, data) as filled:
            asyncio.run(fill(filled.url, size))
    starts = _starts(list(folders.values()))
    with ExitStack() as stack:
        servers = [stack.enter_context(server(SLUICEWAY, data)) for data in folders.values()]
        memory = [resident(each.pid) for each in servers]
        progress("backlog: leased and completed in turns")
        done = run(cycles([each.url for each in servers], effort.rounds))
    against = done[sizes.index(SHORT) if SHORT in sizes else 0]
    return [
        {
            "size": size,
            "restart_s": starts[number],
            "memory_mb": memory[number] / 1e6,
            "lease_ms": statistics.median(each.lease for each in done[number]) * 1e3,
            "complete_ms": statistics.median(each.complete for each in done[number]) * 1e3,
            "against_short": statistics.median(sum(mine) / sum(short) for mine, short in zip(done[number], against, strict=True)),
        }
        for number, size in enumerate(sizes)
    ]


def partitions(folder: Path, sizes: Sequence[int], effort: Effort) -> list[Row]:
    """Measure one queue of `sizes` empty partitions."""
    folders = [folder / f"{size}" for size in sizes]
    for size, data in zip(sizes, folders, strict=True):
        progress(f"partitions: {size:,} are made")
        with server(SLUICEWAY, data) as made:
            asyncio.run(_create(made.url, size))
    starts = _starts(folders)
    rows: list[Row] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(server(SLUICEWAY, data)) for data in folders]
        idle = _at_rest(servers, effort.rest)
        memory = [resident(each.pid) for each in servers]
        files = [handles(each.pid) for each in servers]
        progress("partitions: cycles in turns")
        costs = run(_costs(servers, effort.rounds))
    for number, size in enumerate(sizes):
        seconds, cpu = costs[number]
        rows.append(
            {
                "size": size,
                "restart_s": starts[number],
                "memory_mb": memory[number] / 1e6,
                "open_files": files[number],
                "idle_cpu_percent": idle[number] * 100,
                "cycle_ms": seconds * 1e3,
                "cycle_cpu_ms": cpu * 1e3,
            }
        )
    return rows


def waiters(folder: Path, sizes: Sequence[int], effort: Effort) -> list[Row]:
    """Measure `sizes` consumers that wait on one empty queue, each with its own connection. The number grows on one server."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The server inherits the limit. It reserves half of its files for its stores.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(most, 65_536), hard))
    with server(SLUICEWAY, folder / "data") as running:
        return run(_waiters(running, sizes, effort))


async def _waiters(running: Server, sizes: Sequence[int], effort: Effort) -> list[Row]:
    control = Connection(running.url)
    await control.open()
    for name in ("polled", "other"):
        await control.post("/v1/queues.create", json.dumps({"queue_name": name, "requested_partitions": 4}).encode())
    await _produce(control, running.pid, effort.rounds)
    alone = await _produce(control, running.pid, effort.rounds)
    rows: list[Row] = []
    waiting: list[Connection] = []
    answers: list[asyncio.Future[bytes]] = []
    for size in sizes:
        progress(f"waiters: {size:,}")
        before, there = resident(running.pid), len(waiting)
        while len(waiting) < size:
            one = Connection(running.url)
            await one.open()
            body = {"queue_name": "polled", "client_id": f"c{len(waiting)}", "request_timeout": "15m"}
            answers.append(asyncio.ensure_future(one.post("/v1/queue.lease", json.dumps(body).encode())))
            waiting.append(one)
        while await _waiting(control) < size:
            if any(answer.done() for answer in answers):
                raise RuntimeError(f"a lease did not wait: {next(answer for answer in answers if answer.done())}")
        await asyncio.sleep(SETTLE)
        used, began = cpu_seconds(running.pid), time.perf_counter()
        await asyncio.sleep(effort.rest)
        share = (cpu_seconds(running.pid) - used) / (time.perf_counter() - began)
        memory = resident(running.pid)
        beside = await _produce(control, running.pid, effort.rounds)
        rows.append(
            {
                "size": size,
                "idle_cpu_percent": share * 100,
                "memory_mb": memory / 1e6,
                "memory_per_waiter_kb": max(0, memory - before) / max(1, size - there) / 1e3,
                "produce_cpu_ms": beside * 1e3,
                "produce_against_alone": beside / alone,
            }
        )
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    for each in [*waiting, control]:
        await each.close()
    return rows


def workers(folder: Path, sizes: Sequence[int], effort: Effort) -> list[Row]:
    """Measure `sizes` processes on one data directory, with a client on the same machine that uses a part of the cores."""
    folder.mkdir()
    with ExitStack() as stack:
        servers = [stack.enter_context(server(SLUICEWAY, folder / f"{size}", *by_workers(size, folder))) for size in sizes]
        rows: list[Row] = [{"size": size} for size in sizes]
        for case in CASES:
            progress(f"workers: {case}")
            rates: list[list[float]] = [[] for _ in sizes]
            cpu: list[list[float]] = [[] for _ in sizes]
            for _ in range(3):
                for number, each in enumerate(servers):
                    used = family_cpu(each.pid)
                    done = run(lean(each.url, Work.named(case), effort.rest / 2))
                    rates[number].append(done.items / done.seconds)
                    # Includes the warm-up, also in the seconds.
                    cpu[number].append((family_cpu(each.pid) - used) / done.seconds * 100)
            for number, row in enumerate(rows):
                row[f"{case} items_per_s"] = statistics.median(rates[number])
                row[f"{case} against_one"] = statistics.median(mine / one for mine, one in zip(rates[number], rates[0], strict=True))
                row[f"{case} server_cpu_percent"] = statistics.median(cpu[number])
    return rows


PARTS: dict[str, tuple[Callable[[Path, Sequence[int], Effort], list[Row]], tuple[int, ...]]] = {
    "backlog": (backlog, (1_000, 10_000, 100_000, 1_000_000, 10_000_000)),
    "partitions": (partitions, (1, 10, 100, 1_000)),
    # A listener takes 10,000 connections, and one is for control.
    "waiters": (waiters, (1, 10, 100, 1_000, 9_999)),
    "workers": (workers, (1, 2)),
}


def _starts(folders: Sequence[Path]) -> list[float]:
    """Seconds until a server on each folder takes requests, measured in turn."""
    seconds: list[list[float]] = [[] for _ in folders]
    for _ in range(STARTS):
        for data, each in zip(folders, seconds, strict=True):
            with server(SLUICEWAY, data) as started:
                each.append(started.start)
    return [statistics.median(each) for each in seconds]


def _at_rest(servers: Sequence[Server], rest: float) -> list[float]:
    """Shares of a core used at rest, measured simultaneously."""
    time.sleep(SETTLE)
    used, began = [cpu_seconds(each.pid) for each in servers], time.perf_counter()
    time.sleep(rest)
    elapsed = time.perf_counter() - began
    return [(cpu_seconds(each.pid) - before) / elapsed for each, before in zip(servers, used, strict=True)]


async def _costs(servers: Sequence[Server], rounds: int) -> list[tuple[float, float]]:
    """Seconds of the clock and of the server's processor for a cycle of one item, measured in turns of ten."""
    connections = [Connection(each.url) for each in servers]
    for connection in connections:
        await connection.open()
    produce = json.dumps({"queue_name": "q", "items": [{"utf8": "x" * 100}]}).encode()
    lease = json.dumps({"queue_name": "q", "client_id": "bench", "request_timeout": "10s"}).encode()
    times: list[list[float]] = [[] for _ in servers]
    cpu = [0.0 for _ in servers]
    for number in range(rounds // 10 + 1):
        for each, (connection, running) in enumerate(zip(connections, servers, strict=True)):
            used = cpu_seconds(running.pid)
            for _ in range(10):
                began = time.perf_counter()
                await connection.post("/v1/queue.produce", produce)
                leases = json.loads(await connection.post("/v1/queue.lease", lease))["leases"]
                done = {"queue_name": "q", "lease_ids": [one["lease_id"] for one in leases]}
                if json.loads(await connection.post("/v1/queue.complete", json.dumps(done).encode()))["completed"] != 1:
                    raise RuntimeError("what was produced was not completed")
                if number:
                    times[each].append(time.perf_counter() - began)
            if number:
                cpu[each] += cpu_seconds(running.pid) - used
    for connection in connections:
        await connection.close()
    return [(statistics.median(seconds), used / len(seconds)) for seconds, used in zip(times, cpu, strict=True)]


async def _create(url: str, number: int) -> None:
    connection = Connection(url)
    await connection.open()
    await connection.post("/v1/queues.create", json.dumps({"queue_name": "q", "requested_partitions": number}).encode())
    await connection.close()


async def _waiting(connection: Connection) -> int:
    answer = json.loads(await connection.post("/v1/queue.stats", json.dumps({"queue_name": "polled"}).encode()))
    return int(answer["logical_queues"][0]["lease_waiting"])


async def _produce(connection: Connection, pid: int, calls: int) -> float:
    """Processor seconds of the server for one call to the other queue."""
    body, used = json.dumps({"queue_name": "other", "items": [{"utf8": "x"}]}).encode(), cpu_seconds(pid)
    # The system counts in hundredths of a second, so ten times as many calls.
    for _ in range(10 * calls):
        await connection.post("/v1/queue.produce", body)
    return (cpu_seconds(pid) - used) / (10 * calls)


def aims(parts: dict[str, list[Row]]) -> list[Figure]:
    """Figures with the aims for speed, if measured at full size; the others for information."""
    figures: list[Figure] = []
    if rows := parts.get("backlog"):
        about, last, first = "backlog", rows[-1], rows[0]
        full = 1.2 if last["size"] >= 10_000_000 else None
        figures += [
            Figure(
                about, f"lease and complete of {BATCH:,} at {last['size']:,.0f} against the short line", last["against_short"], "x", full
            ),
            Figure(about, "restart, the longest against the shortest", last["restart_s"] / first["restart_s"], "x"),
            Figure(about, "memory after a restart, per item", (last["memory_mb"] - first["memory_mb"]) * 1e6 / last["size"], "B"),
        ]
    if rows := parts.get("partitions"):
        about, last, first = "partitions", rows[-1], rows[0]
        more = max(1, last["size"] - first["size"])
        figures += [
            Figure(about, "memory, each", (last["memory_mb"] - first["memory_mb"]) / more * 1e3, "KB"),
            Figure(about, "restart, each", (last["restart_s"] - first["restart_s"]) / more * 1e3, "ms"),
            Figure(
                about,
                f"a cycle of one item with {last['size']:,.0f}, processor",
                last["cycle_cpu_ms"] / max(first["cycle_cpu_ms"], 1e-3),
                "x",
            ),
        ]
    if rows := parts.get("waiters"):
        last = rows[-1]
        full = 2.0 if last["size"] >= 9_000 else None
        figures += [
            Figure("waiters", f"processor while {last['size']:,.0f} wait, of one core", last["idle_cpu_percent"], "%", full),
            Figure("waiters", "memory, each", last["memory_per_waiter_kb"], "KB"),
            Figure("waiters", "a produce to another queue, processor, against without them", last["produce_against_alone"], "x"),
        ]
    if rows := parts.get("workers"):
        figures += [
            Figure("workers", f"{case}: {rows[-1]['size']:.0f} against one", rows[-1][f"{case} against_one"], "x") for case in CASES
        ]
    return figures


def page_of(parts: dict[str, list[Row]], pictures: str = "") -> str:
    """Render Markdown: a table for each part, with its plot if `pictures` names their folder."""
    blocks = []
    for name, rows in parts.items():
        columns = list(rows[0])
        lines = [f"**{name}**", "", f"| {' | '.join(column.replace('_', ' ') for column in columns)} |", "| --- " * len(columns) + "|"]
        lines += [
            f"| {' | '.join(f'{row[column]:,.4g}' if row[column] < 1_000 else f'{row[column]:,.0f}' for column in columns)} |"
            for row in rows
        ]
        if pictures and name in PLOTTED and len(rows) > 1:
            lines += ["", f"![{name}: cost against size]({pictures}/growth-{name}.svg)"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench growth", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which to measure; all of them, if none is named")
    parser.add_argument("--largest", type=int, default=10_000_000, help="no size above it")
    parser.add_argument("--rounds", type=int, default=300, help="of calls whose median counts")
    parser.add_argument("--rest", type=float, default=10.0, help="seconds for which an idle server is watched")
    parser.add_argument("--output", type=Path, default=Path("bench/results/growth.json"), help="parts that were not measured stay in it")
    parser.add_argument("--plots", type=Path, help="the folder for growth-PART.svg (needs matplotlib), such as docs/images")
    parser.add_argument("--page", type=Path, help="put the tables into this page, such as docs/explanation/performance.md")
    given = parser.parse_args(arguments)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    parts: dict[str, list[Row]] = {}
    for name in given.parts or PARTS:
        measure, sizes = PARTS[name]
        with tempfile.TemporaryDirectory(prefix="sluiceway-growth-") as folder:
            chosen = [size for size in sizes if size <= given.largest]
            rows = measure(Path(folder) / name, chosen, Effort(given.rounds, given.rest))
        parts[name] = [{key: float(f"{value:.4g}") for key, value in row.items()} for row in rows]
    figures = aims(parts)
    before = json.loads(given.output.read_text())["parts"] if given.output.exists() else {}
    report = {"machine": machine, "load": round(os.getloadavg()[2], 1), "parts": before | parts}
    report["figures"] = [figure.document() for figure in aims(before | parts)]
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{table(figures)}\n{machine}")
    if given.plots:
        draw(before | parts, given.plots)
    if given.page:
        pictures = os.path.relpath(given.plots, given.page.parent) if given.plots else ""
        write_page(given.page, "growth", f"{machine}, load {report['load']}.\n\n{page_of(before | parts, pictures)}")
    missed = sum(figure.missed for figure in figures)
    progress(f"{missed} aims missed" if missed else "every aim met")
    return int(missed > 0)
