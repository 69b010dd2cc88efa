"""`python -m bench model`: the cost of a cluster of 10, 100 or 1,000 instances for its meta store and itself, and its limits.

The constants are measured (`--measure URL --pid PID`: those of the meta store at that URL, whose server is that process with its
children; `--measure-polls`: the cost of a poll between instances) and kept in bench/results/model.json; docs/explanation/scale-out.md has
the assumptions. All else is arithmetic on them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.bench.figures import progress, write_page
from sluiceway.bench.servers import SLUICEWAY, family_cpu, server
from sluiceway.client import Client
from sluiceway.cluster.cluster_secret import secret_of
from sluiceway.cluster.meta_watch import LOOK_AGAIN
from sluiceway.cluster.ownership import GROUP, PARAMETERS
from sluiceway.cluster.peer_http import HttpTransport
from sluiceway.core.group.group_records import (
    MAX_MEMBERS,
    MAX_PLAIN,
    GroupReader,
    Keys,
    MemberRecord,
    Plan,
    Writes,
    encode_record,
    largest_commit,
    put_member,
)
from sluiceway.core.group.heartbeats import FEW
from sluiceway.core.group.load_balance import PACE
from sluiceway.core.group.member import MANY
from sluiceway.core.group.rounds import LOOKS_A_BEAT
from sluiceway.core.queue import poll_line
from sluiceway.core.queue.remote_items import POLL, RemoteItems, Wish, poll_time
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.compatibility import KNOWN
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import MAX_COMMIT_BYTES
from sluiceway.model.peers import Poll
from sluiceway.model.queue import decode_queue
from sluiceway.ports.meta_store import NOTHING, MetaStore

RESULTS = Path("bench/results/model.json")
WATCHERS = 2
"""Watchers of an instance: its group, and the queues. A beat concerns only the first."""
QUIET_READS = 1.0 + WATCHERS
"""Reads per second of an idle instance: the API keys, and each watcher's own look."""
SETTLE = PARAMETERS.settle_timeout / 1_000
PARTS = 5
REPORTS = PACE.look / 1_000
"""Seconds between two reports of a member's loads, at least."""
BEAT = 75
"""Bytes of a member's beat, with its key."""
RECORD = 230
"""The same when it had all that is said about the member."""
PLAN_ITEM = 34
"""Bytes per partition in the plan: its name, with quotes and grant, and its part of its owner's name; once or, while it moves, twice."""
RESOURCE_ITEM = 15
"""Bytes per partition in the group's resource."""
PACKED_PLAN_ITEM = 5.3
"""Bytes per partition in a plan that is packed, while all partitions move."""
PACKED_RESOURCE_ITEM = 0.1
PLAN_HERE = 4e-6
"""Seconds of the member that seals, per partition: to plan, and to pack the plan."""
READ_PLAN_HERE = 0.7e-6
"""Seconds of each member, per partition, to unpack a plan and to look up its owners."""
QUEUE_ITEM = 24
"""Bytes per partition in the queues' records."""
AT_ONCE = 10
"""Polls that are measured at once, each of another instance: there is little time in which the server does something else."""
REST = 10.0
"""Seconds for which the server is measured at rest."""
POLLED_QUEUES = 100
"""Queues that a poll names, in the measurement, and of which the other instance has a partition each."""


@dataclass(frozen=True)
class Store:
    """Costs of a meta store's calls, in seconds. `…_cpu`: processor time of the server; `…_here`: of the instance.

    `serial`: commits are sequential. `asks_at_hints`: a woken watcher asks whether the change concerns it.
    `look_…`: a look that reads the whole group; `refresh_…`: one that reads what has changed. `…_each`: for each member whose record is
    sent; `scan_…`: for each member, sent or not.
    """

    name: str
    commit: float
    commit_cpu: float
    commit_here: float
    look_cpu: float
    look_cpu_each: float
    look_here: float
    look_here_each: float
    ask_cpu: float
    ask_here: float
    refresh_cpu: float
    refresh_here: float
    refresh_cpu_each: float
    refresh_here_each: float
    scan_cpu: float
    scan_here: float
    serial: bool
    asks_at_hints: bool


@dataclass(frozen=True)
class Setting:
    """A cluster. `calls`: requests per second at each instance; `call_here`: processor seconds of one, and of its hop at either side.

    `strays`: fraction of the calls on leased items sent to any instance (behind a load balancer); the others go to the owner.
    `quiet`: in large groups, beats wake no other member; before, all looked at each. `told_what`: a hint names the change, so that
    it wakes only the watchers that it concerns. `delta`: a look fetches the changes rather than the whole group, and likewise one at the
    queues. `network`: megabytes per second that the meta store can send. `packed`: large plans are packed.
    `own_looks`: a member's looks for each beat of its own; the second one showed that it was recorded.
    `tells_all`: etcd tells its watchers of every commit.
    `wakes`: items per second and instance that go to a consumer at another instance, while consumers of their queue wait at all.
    `poll_here`: processor seconds of a poll at either side. `bounded_polls`: polls last longer in larger clusters, and some are told of
    an item; before, each took a second, and all were told.
    """

    instances: int
    partitions: int = 1_000
    queues: int = 100
    cores: float = 4.0
    """Cores of the meta store's server; each instance has one."""
    beat: float = PARAMETERS.beat_interval / 1_000
    lease: float = PARAMETERS.lease_timeout / 1_000
    calls: float = 1_000.0
    call_here: float = 200e-6
    strays: float = 1.0
    quiet: bool = True
    told_what: bool = True
    delta: bool = True
    network: float = 1_000.0
    packed: bool = True
    own_looks: int = 1
    tells_all: bool = False
    wakes: float = 1.0
    poll_here: float = 200e-6
    bounded_polls: bool = True


class Cost(NamedTuple):
    """Costs per second of a cluster at rest apart from its calls, and of a round. A share above 1 is impossible."""

    instances: int
    partitions: int
    commits: float
    looks: float
    asks: float
    megabytes: float
    """Sent by the meta store."""
    commit_line: float
    """Fraction of the time in which a commit is in flight, where commits are sequential."""
    meta_cores: float
    look_share: float
    """Share of an instance's core, for beats, looks and hints."""
    polls: float
    """Polls of one instance per second, sent and answered."""
    poll_share: float
    wake_share: float
    """Share of an instance's core for items that go to waiting consumers of other instances."""
    gossip_kb: float
    """Data about other instances' loads that one instance receives."""
    forwarded: float
    """Calls per second in the whole cluster that another instance than the one asked carries out."""
    forward_share: float
    """Share of an instance's core."""
    round_s: float
    breaks: str


def cost(store: Store, at: Setting) -> Cost:
    """Compute the costs from the constants."""
    n = at.instances
    commits = n / at.beat
    hints = commits
    if at.quiet and n > FEW:
        # Before, etcd told its watchers of every commit, and the members paced themselves.
        pace = at.beat * min(1.0, (n - FEW) / (MANY - FEW))
        hints = 0.0 if store.asks_at_hints or not at.tells_all else min(commits, 1 / pace)
    each_looks = min(commits, hints + at.own_looks / at.beat)
    looks = n * each_looks
    records = n if not at.delta else min(n, max(1.0, commits / each_looks))
    woken = 1 if at.told_what else WATCHERS
    asks = n * (QUIET_READS + (woken * hints * 2 if store.asks_at_hints else 0))
    plan, resource = _sizes(at)
    megabytes = looks * records * (BEAT if at.delta else RECORD) / 1e6
    if not at.delta:
        megabytes += (looks * (plan + resource) + n / (LOOK_AGAIN / 1_000) * QUEUE_ITEM * at.partitions) / 1e6
    look_cpu, look_here = _look_costs(store, at, records)
    # Members report their loads with beats, and one of them reads all reports: an item of a report is as large as one of the plan.
    asks += 1 / REPORTS
    megabytes += PLAN_ITEM * at.partitions / REPORTS / 1e6
    meta_cores = commits * store.commit_cpu + looks * look_cpu + asks * store.ask_cpu
    look_share = (commits * store.commit_here + looks * look_here + asks * store.ask_here) / n
    poll_seconds = (poll_time(n - 1) if at.bounded_polls else POLL) / 1_000
    polls = 2 * (n - 1) / poll_seconds
    poll_share = polls * at.poll_here
    # Each instance that is told fetches, and polls anew. If many wait, as many are told as there are items.
    told = 1 if at.bounded_polls and n - 1 > poll_line.FEW else n - 1
    wake_share = at.wakes * told * 2 * (at.call_here + at.poll_here)
    gossip_kb = (n - 1) / poll_seconds * 40 * min(at.queues, at.queues * at.partitions / n) / 1e3
    # Of a produce, a lease and a completion: produces stay, leases find items where they are sent, completions go to the owner.
    forwarded = at.strays * n * at.calls / 3 * (n - 1) / n
    forward_share = forwarded / n * 2 * at.call_here
    commit_line = commits * store.commit if store.serial else 0.0
    # A mark is a beat, so a member has no other commit in the line then, unless it is full: one beat each before. Add opening and seal.
    before = n * store.commit if commit_line > 1 else 0.0
    marks = before + (n + 2) * store.commit if store.serial else 3 * store.commit
    # Those who seal see the last mark of a large group at their next look.
    notice = min(at.beat / LOOKS_A_BEAT, SETTLE) if at.quiet and n > FEW else 0.0
    planning = (PLAN_HERE + READ_PLAN_HERE) * at.partitions
    # Everybody reads the records of all, twice, and the plan.
    reading = 2 * _look_costs(store, at, n)[0] * n / at.cores + n * plan / 1e6 / at.network
    round_s = SETTLE + notice + marks + planning + reading
    verdicts = [
        (n > MAX_MEMBERS, f"{MAX_MEMBERS} members are the limit"),
        (not _fits(at), "the plan does not fit into a commit"),
        (commit_line > 1, "commits wait for one another longer than beats may"),
        (meta_cores > at.cores, f"the meta store needs {meta_cores:,.0f} cores"),
        (megabytes > at.network, f"the meta store sends {megabytes:,.0f} MB/s"),
        (look_share > 1, "an instance does nothing but look"),
        (
            look_share + poll_share + wake_share + forward_share + at.calls * at.call_here > 1,
            "an instance has not enough of its core left for its calls",
        ),
        (round_s > at.lease, "a round takes longer than a lease"),
    ]
    breaks = "; ".join(words for broken, words in verdicts if broken)
    return Cost(
        n,
        at.partitions,
        commits,
        looks,
        asks,
        megabytes,
        commit_line,
        meta_cores,
        look_share,
        polls,
        poll_share,
        wake_share,
        gossip_kb,
        forwarded,
        forward_share,
        round_s,
        breaks,
    )


def _sizes(at: Setting) -> tuple[float, float]:
    """Bytes of the plan and of the resource."""
    plan, resource = float(PLAN_ITEM * at.partitions), float(RESOURCE_ITEM * at.partitions)
    if at.packed and plan > MAX_PLAIN:
        plan = PACKED_PLAN_ITEM * at.partitions
    return plan, PACKED_RESOURCE_ITEM * at.partitions if at.packed and resource > MAX_PLAIN else resource


@lru_cache
def _largest(partitions: int, queues: int) -> int:
    items = [f"k7f3q{number % queues:03}.{number // queues}" for number in range(partitions)]
    return largest_commit(Keys(GROUP), items, items)


def _fits(at: Setting) -> bool:
    if at.packed:
        return _largest(at.partitions, at.queues) <= MAX_COMMIT_BYTES
    # Each name may be there twice more, and the members' names take 220 KB.
    return PLAN_ITEM * 2 * at.partitions <= MAX_COMMIT_BYTES


def _look_costs(store: Store, at: Setting, records: float) -> tuple[float, float]:
    """Processor seconds of a look in which so many members have changed, of the server and of the instance."""
    if not at.delta:
        return store.look_cpu + store.look_cpu_each * at.instances, store.look_here + store.look_here_each * at.instances
    return (
        store.refresh_cpu + store.scan_cpu * at.instances + store.refresh_cpu_each * records,
        store.refresh_here + store.scan_here * at.instances + store.refresh_here_each * records,
    )


def most(store: Store, at: Setting) -> int:
    """Return the maximum number of instances with which nothing breaks, apart from the limit on members."""
    low, high = 1, 100_000
    while low < high:
        middle = (low + high + 1) // 2
        broken = cost(store, replace(at, instances=middle)).breaks.removeprefix(f"{MAX_MEMBERS} members are the limit")
        low, high = (low, middle - 1) if broken else (middle, high)
    return low


VARIANTS: dict[str, Setting] = {
    "before: a look at each beat of another": Setting(
        10, quiet=False, told_what=False, delta=False, packed=False, own_looks=2, bounded_polls=False
    ),
    "before: looks that read everything": Setting(10, tells_all=True, delta=False, packed=False, own_looks=2, bounded_polls=False),
    "… with a beat each 2 s": Setting(
        10, tells_all=True, delta=False, packed=False, own_looks=2, bounded_polls=False, beat=2.0, lease=12.0
    ),
    "before: polls of a second": Setting(10, bounded_polls=False, beat=2.0, lease=12.0),
    "as it is": Setting(10),
    "a beat each 2 s, a lease of 12 s": Setting(10, beat=2.0, lease=12.0),
}
"""Earlier states, the present one, and a possible setting."""
SIZES = ((10, 1_000), (100, 1_000), (1_000, 1_000), (1_000, 100_000))
"""Instances and partitions."""


COLUMNS = (
    "instances",
    "partitions",
    "commits /s",
    "looks /s",
    "other reads /s",
    "MB/s",
    "commits' line",
    "cores of the meta store",
    "an instance's core: looks",
    "polls",
    "wake-ups",
    "hops",
    "a round, s",
    "breaks",
)


def table(stores: Sequence[Store], poll_here: float) -> str:
    """Render the results as Markdown. `poll_here`: as measured."""
    lines = []
    for store in stores:
        lines += [f"\n**{store.name}**\n", f"| | {' | '.join(COLUMNS)} |", "| --- " * (1 + len(COLUMNS)) + "|"]
        for name, variant in VARIANTS.items():
            setting = replace(variant, poll_here=poll_here)
            for instances, partitions in SIZES:
                at = cost(store, replace(setting, instances=instances, partitions=partitions))
                cells = [
                    f"{instances:,}",
                    f"{partitions:,}",
                    *(f"{value:,.0f}" for value in (at.commits, at.looks, at.asks)),
                    f"{at.megabytes:,.1f}",
                    f"{at.commit_line:.0%}" if store.serial else "–",
                    f"{at.meta_cores:,.2f}",
                    *(f"{share:.1%}" for share in (at.look_share, at.poll_share, at.wake_share, at.forward_share)),
                    f"{at.round_s:.2f}",
                    at.breaks or "–",
                ]
                lines.append(f"| {name} | {' | '.join(cells)} |")
            lines.append(f"| {name}: the most, without the limit on members | {most(store, setting):,} |{' |' * (len(COLUMNS) - 1)}")
    return "\n".join(lines)


# ---- the constants --------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    seconds: float
    cpu: float
    here: float


async def _taken(call: Callable[[int], Awaitable[object]], rounds: int, pid: int) -> Taken:
    """Measure one call after another, after a warm-up.

    Other load on the machine only makes calls longer. So the result is the minimum of PARTS parts: of their mean processor time, and of the
    lower quartile of their seconds (which include the wait for a sync).
    """
    for number in range(max(1, rounds // 10)):
        await call(number)
    parts = []
    for _ in range(PARTS):
        used, here, times = family_cpu(pid), time.process_time(), []
        for number in range(rounds):
            began = time.perf_counter()
            await call(number)
            times.append(time.perf_counter() - began)
        quartile = statistics.quantiles(times, n=4)[0]
        parts.append(Taken(quartile, (family_cpu(pid) - used) / rounds, (time.process_time() - here) / rounds))
    return Taken(*map(min, zip(*parts, strict=True)))


async def _look(store: MetaStore, members: int, rounds: int, pid: int, changed: int | None = None) -> Taken:
    """Measure a look at a group of `members`: at everything, which was once in one record of each, or at what has changed since so many of
    them have beaten."""
    keys = Keys(f"model{members}-{changed}")
    about = MemberRecord(beat=1, lease_timeout=3_000, address="http://10.0.0.1:2319", joined_at=1, levels=KNOWN, release="1.0.0")
    names = [f"instance-{number:08}" for number in range(members)]
    owners = {name: {f"k7f3q2ma.{at}": 7 for at in range(number, 1_000, members)} for number, name in enumerate(names)}
    await store.commit(puts={keys.plan: encode_record(Plan(round=1, era=1, resource_version=1, owners=owners))})

    async def put(some: Sequence[str], *, joins: bool) -> None:
        for at in range(0, len(some), 50):
            writes = Writes()
            for name in some[at : at + 50]:
                if changed is None:
                    writes.put(keys.member(name), about)
                else:
                    put_member(writes, keys, name, about, joins=joins)
            await store.commit(puts=writes.puts)

    await put(names, joins=True)
    reader = GroupReader(keys)
    before = await store.refresh(NOTHING, keys.prefix)
    await put(names[: changed or 0], joins=False)

    async def look(_: int) -> None:
        view = await (store.read(prefixes=[keys.prefix]) if changed is None else store.refresh(before, keys.prefix))
        if len(reader.read(view, 0).members) != members:
            raise RuntimeError("a look does not show all members")

    return await _taken(look, rounds, pid)


async def _measure(url: str, pid: int, rounds: int) -> Store:
    store = open_meta_store(url)
    try:
        record = b"x" * 230
        commit = await _taken(lambda number: store.commit(puts={f"model/beat/{number % 10}": record}), rounds, pid)
        ask = await _taken(lambda number: store.read([f"model/beat/{number % 10}"]), rounds, pid)
        few, many = await _look(store, 10, rounds, pid), await _look(store, 210, rounds, pid)
        fresh, wide, busy = [await _look(store, members, rounds, pid, changed) for members, changed in ((10, 0), (210, 0), (210, 200))]
    finally:
        await store.close()
    each_cpu, each_here = max(0.0, many.cpu - few.cpu) / 200, max(0.0, many.here - few.here) / 200
    kind = url.partition(":")[0]
    serial = not kind.startswith("etcd")
    return Store(
        name="etcd" if not serial else "PostgreSQL" if kind.startswith("postgres") else kind,
        commit=commit.seconds,
        commit_cpu=commit.cpu,
        commit_here=commit.here,
        look_cpu=max(0.0, few.cpu - 10 * each_cpu),
        look_cpu_each=each_cpu,
        look_here=max(0.0, few.here - 10 * each_here),
        look_here_each=each_here,
        ask_cpu=ask.cpu,
        ask_here=ask.here,
        refresh_cpu=fresh.cpu,
        refresh_here=fresh.here,
        refresh_cpu_each=max(0.0, busy.cpu - wide.cpu) / 200,
        refresh_here_each=max(0.0, busy.here - wide.here) / 200,
        scan_cpu=max(0.0, wide.cpu - fresh.cpu) / 200,
        scan_here=max(0.0, wide.here - fresh.here) / 200,
        serial=serial,
        asks_at_hints=serial,
    )


async def _poll_cost(rounds: int) -> float:
    """Processor seconds of a poll at either side, the mean of both: of a real instance that answers at once, with no items."""
    with tempfile.TemporaryDirectory() as name:
        folder, url = Path(name), f"sqlite:{name}/meta.sqlite"
        (folder / "cluster.toml").write_text(f'[cluster]\nmeta = "{url}"\n')
        with server(SLUICEWAY, folder / "data", "--config", str(folder / "cluster.toml")) as running:
            with Client(running.url) as client:
                for number in range(POLLED_QUEUES):
                    client.create_queue(f"q{number}", requested_partitions=1)
            meta = open_meta_store(url)
            try:
                secret, view = await secret_of(meta), await meta.read(prefixes=[QUEUE])
            finally:
                await meta.close()
            transport, known, peer = HttpTransport(secret), RemoteItems(), Peer("other", running.url)
            known.follow([peer])
            for entry in view.prefix(QUEUE).values():
                known.wish(Wish(decode_queue(entry.value).incarnation, 1))

            async def poll(asker: str) -> None:
                request = Poll(known.asks(peer, system.steady()), 0, asker)
                if known.answered(peer, (await transport.ask(peer.address, request, 60_000)).loads):
                    raise RuntimeError("an empty queue has items")

            try:
                there, here = await _polls_taken(poll, rounds, running.pid)
            finally:
                await transport.close()
    progress(f"a poll takes {there * 1e6:,.0f} µs where it is answered, and {here * 1e6:,.0f} where it is asked")
    return (there + here) / 2


async def _polls_taken(poll: Callable[[str], Awaitable[object]], rounds: int, pid: int) -> tuple[float, float]:
    """Processor seconds of a poll at the server and here: the minimum of PARTS parts, without what the server takes at rest."""
    await asyncio.gather(*(poll(f"model{number}") for number in range(AT_ONCE)))
    began, used = time.perf_counter(), family_cpu(pid)
    await asyncio.sleep(REST)
    idle = (family_cpu(pid) - used) / (time.perf_counter() - began)
    parts = []
    for _ in range(PARTS):
        began, used, here = time.perf_counter(), family_cpu(pid), time.process_time()
        for _ in range(0, rounds, AT_ONCE):
            await asyncio.gather(*(poll(f"model{number}") for number in range(AT_ONCE)))
        there = family_cpu(pid) - used - idle * (time.perf_counter() - began)
        parts.append((there / rounds, (time.process_time() - here) / rounds))
    return min(there for there, _ in parts), min(here for _, here in parts)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench model", description=__doc__)
    parser.add_argument(
        "--measure", metavar="URL", help="measure this meta store, in which nothing else may happen, and keep its constants"
    )
    parser.add_argument("--pid", type=int, help="of its server")
    parser.add_argument("--measure-polls", action="store_true", help="measure polls between two instances of this machine, and keep that")
    parser.add_argument("--rounds", type=int, default=3_000, help="calls of each of the parts, of which the least counts")
    parser.add_argument("--page", type=Path, help="put the table into this page, such as docs/explanation/scale-out.md")
    parser.add_argument("--constants", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    kept: dict[str, Any] = json.loads(given.constants.read_text()) if given.constants.exists() else {"stores": {}}
    if given.measure:
        if given.pid is None:
            parser.error("--measure needs --pid")
        store = asyncio.run(_measure(given.measure, given.pid, given.rounds))
        kept["machine"] = _machine()
        kept["stores"][store.name] = {name: _rounded(value) for name, value in asdict(store).items()}
    if given.measure_polls:
        kept["poll"] = {"machine": _machine(), "here": _rounded(asyncio.run(_poll_cost(given.rounds)))}
    if given.measure or given.measure_polls:
        given.constants.parent.mkdir(parents=True, exist_ok=True)
        given.constants.write_text(json.dumps(kept, indent=2) + "\n")
        progress(f"written to {given.constants}")
    if not kept["stores"] or "poll" not in kept:
        parser.error(f"{given.constants} has no constants: measure a meta store and polls first")
    text = table([msgspec.convert(each, Store) for each in kept["stores"].values()], kept["poll"]["here"])
    print(text)
    if given.page:
        write_page(given.page, "model", text)
    return 0


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[1]:.1f}"
