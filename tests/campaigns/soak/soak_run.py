"""A soak from its start to its books: full rate, half of it with faults, queues emptied, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from tests.campaigns.blackbox.checkers import FIRED_WITHIN
from tests.campaigns.blackbox.http_clients import ask
from tests.campaigns.blackbox.nemeses import Bag, Nemesis
from tests.campaigns.blackbox.operation_log import Fault, payload_of
from tests.campaigns.blackbox.targets import Links, Member, StraightWay
from tests.campaigns.blackbox.workloads import Crew
from tests.campaigns.soak import soak_faults
from tests.campaigns.soak.soak_clients import DEAD, EVENTS, JOBS, MOVING, QUEUES, SHORT, SINGLE, TICK, TICKS, Drainer, Scene, TickConsumer
from tests.campaigns.soak.soak_operators import crew
from tests.campaigns.soak.soak_record import SLICE, Beat, Calls, RecordFile, SoakRecord
from tests.campaigns.soak.vital_signs import Stored, machine_busy, proportional, stored, vitals, yardstick
from tests.server.server_process import COMMAND

FULL: Final = 12.0
"""Seconds for which clients do not pause."""
FILLING: Final = 3.0
"""The first of them, which are not counted: queues are still empty."""
SHARE: Final = 0.5
"""Of the full rate."""
BEAT: Final = 1.0
SELDOM: Final = 5
"""Beats between two looks at what takes longer: folders, the share of memory, metrics."""
GAP: Final = (6.0, 20.0)
"""Seconds, from and to, between two faults."""
END_WITHIN: Final = 60.0
"""Seconds within which each client must have ended what it was at."""
EMPTY_WITHIN: Final = 120.0
QUIET_WITHIN: Final = 30.0
"""Seconds within which the server must have let go of what clients had who are gone, and of queues that are deleted."""
SPARE_SOCKETS: Final = 2
"""Sockets that a server at rest may have beyond those of its start."""


class Plan(NamedTuple):
    """How long there is load, in seconds, and in how many lives of the server's process."""

    length: float
    lives: int
    seed: int
    has_faults: bool = True

    @property
    def warm_up(self) -> float:
        """Seconds after each start that are not judged."""
        return min(300.0, max(20.0, 0.2 * self.length / self.lives))

    def ends(self) -> list[float]:
        """When each life but the last ends, in seconds: about as far from one another as can be, and by chance."""
        chance, each = random.Random(self.seed), self.length / self.lives
        return [each * (number + chance.uniform(-0.1, 0.1)) for number in range(1, self.lives)]


def planned(minutes: float, seed: int) -> Plan:
    """A life has half an hour, but there are two at least."""
    return Plan(60 * minutes, max(2, round(minutes / 30)), seed)


async def soak(plan: Plan, folder: Path, command: Sequence[str] = COMMAND, say: Callable[[str], None] = print) -> SoakRecord:
    """Soak a server; its record is in that folder, too. What was wrong beside what grows is among its findings."""
    place = folder / "servers"
    place.mkdir()
    settings = soak_faults.Settings()
    member = Member(place, "server", Links(StraightWay()), lambda _: settings.text, command=command)
    file = RecordFile(folder / "record.jsonl")
    file.record.seed, file.record.warm_up, file.record.length = plan.seed, plan.warm_up, plan.length
    try:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False) as http:
            scene = Scene(http, member, plan.seed, command, place)
            try:
                await _Soak(plan, member, settings, scene, file, say).run()
            except AssertionError as error:
                # A server that does not start again, or an answer that does not come: what was measured so far is judged all the same.
                scene.findings.append(str(error))
        file.record.findings += scene.findings
        file.record.items = sum(book.items for book in scene.books.values())
    finally:
        if member.runs:
            member.kill()
        file.close()
    return file.record


class _Soak:
    def __init__(
        self, plan: Plan, member: Member, settings: soak_faults.Settings, scene: Scene, file: RecordFile, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._member = member
        self._settings = settings
        self._scene = scene
        self._file = file
        self._record = file.record
        self._say = say
        self._chance = random.Random(plan.seed)
        self._began = self._epoch = 0.0
        self._pid: int | None = None
        """None: the server is down, or starts."""

    async def run(self) -> None:
        await asyncio.to_thread(self._member.revive)
        await self._create()
        rest = await self._at_rest()
        clients = Crew(crew(self._scene))
        watching: asyncio.Task[None] | None = None
        try:
            clients.start()
            await self._find_rate()
            self._began, self._epoch = time.monotonic(), time.time()
            self._begun()
            watching = asyncio.create_task(self._watch())
            await self._strike()
            await clients.stop(END_WITHIN)
        finally:
            await clients.stop(0.0)
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
        self._record.load = os.getloadavg()[0]
        self._scene.pace.rate = None
        await self._check_books()
        await self._check_rest(rest)

    async def _create(self) -> None:
        for queue, settings in QUEUES.items():
            answer = await self._scene.call("create", "queues.create", {"queue_name": queue, **settings})
            assert answer.outcome == "done", f"queues.create: {answer.problem}"
        schedule = {"name": TICK, "queue_name": TICKS, "cron": "* * * * *", "item": {"utf8": payload_of(TICK)}, "catch_up": "all"}
        answer = await self._scene.call("create", "schedules.create", schedule)
        assert answer.outcome == "done", f"schedules.create: {answer.problem}"

    async def _find_rate(self) -> None:
        await asyncio.sleep(FILLING)
        before = self._scene.times.done
        await asyncio.sleep(FULL - FILLING)
        self._record.full_rate = (self._scene.times.done - before) / (FULL - FILLING)
        assert self._record.full_rate > 1, "hardly any call was done when clients did not pause"
        self._record.rate = self._scene.pace.rate = SHARE * self._record.full_rate
        self._scene.times.take()
        self._say(f"full rate: {self._record.full_rate:.0f} calls/s; now {self._record.rate:.0f}")

    def _begun(self) -> None:
        """The server takes calls, as another process than before."""
        self._pid = self._member.pid
        self._record.lives[len(self._record.lives) + 1] = time.monotonic() - self._began

    # ---- faults -------------------------------------------------------------------------------------------------

    async def _strike(self) -> None:
        """One fault after the other, until the time is over."""
        bag = Bag(soak_faults.faults(self._member, self._settings) if self._plan.has_faults else [], self._chance)
        last = Bag(soak_faults.ends(self._member, self._begun), self._chance)
        for end in self._plan.ends():
            await self._strike_until(end, bag)
            nemesis = last.take()
            assert nemesis is not None
            self._pid = None
            await self._strike_once(nemesis)
        await self._strike_until(self._plan.length, bag)

    async def _strike_until(self, end: float, bag: Bag) -> None:
        while (left := end - (time.monotonic() - self._began)) > 0:
            await asyncio.sleep(min(left, self._chance.uniform(*GAP)))
            if time.monotonic() - self._began < end - GAP[0] and (nemesis := bag.take()):
                await self._strike_once(nemesis)

    async def _strike_once(self, nemesis: Nemesis) -> None:
        began = time.monotonic() - self._began
        strike = await asyncio.to_thread(nemesis.strike, self._chance)
        try:
            await asyncio.sleep(self._chance.uniform(*nemesis.lasts))
        finally:
            # Also when the soak is stopped: a process that stands still cannot be ended in good order.
            await asyncio.to_thread(strike.mend)
        ended = time.monotonic() - self._began
        self._file.add(Fault(nemesis.kind, "", began, ended, nemesis.hangs))
        self._say(f"{began:7.1f} s  {nemesis.kind}, {ended - began:.1f} s")

    # ---- watching -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        number = 0
        busy = machine_busy()
        while True:
            await asyncio.sleep(BEAT)
            number += 1
            now = machine_busy()
            share = (now[0] - busy[0]) / (now[1] - busy[1]) if now[1] > busy[1] else 0.0
            busy = now
            await self._beat(share, is_thorough=number % SELDOM == 0)
            if number % round(SLICE / BEAT) == 0:
                at = SLICE * ((time.monotonic() - self._began) // SLICE - 1)
                self._file.add(Calls(at, *self._scene.times.take()))

    async def _beat(self, machine: float, *, is_thorough: bool) -> None:
        pid, life = self._pid, len(self._record.lives)
        found = None if pid is None else await asyncio.to_thread(vitals, pid)
        if pid is None or found is None:
            return
        at, calls = time.monotonic() - self._began, self._scene.times.done
        share: int | None = None
        kept: Stored | None = None
        gauges: dict[str, float] = {}
        if is_thorough:
            share = await asyncio.to_thread(proportional, pid)
            kept = await asyncio.to_thread(stored, self._member.data)
            gauges = await self._gauges()
        beat = Beat(
            round(at, 3),
            life,
            found.resident,
            found.anonymous,
            found.handles,
            found.sockets,
            found.threads,
            found.processor,
            calls,
            round(machine, 3),
            round(yardstick(), 3),
            share,
            None if kept is None else kept.files,
            None if kept is None else kept.bytes,
            gauges,
        )
        if life == len(self._record.lives) and self._pid == pid:
            self._file.add(beat)

    async def _gauges(self) -> dict[str, float]:
        """Empty while the server does not answer."""
        try:
            answer = await self._scene.http.get(f"{self._member.url}/metrics", timeout=10.0)
        except httpx.HTTPError:
            return {}
        return read_metrics(answer.text) if answer.status_code == 200 else {}

    # ---- the end ------------------------------------------------------------------------------------------------

    async def _check_books(self) -> None:
        """Empty all queues, and compare what the server has counted with what it has answered."""
        left = [each["queue_name"] for each in (await self._ask("queues.list"))["items"] if each["queue_name"] not in QUEUES]
        for queue in left:
            # One whose deletion was cut off with its maker.
            await self._ask("queues.delete", queue_name=queue, force=True)
        minutes = range(int(self._epoch // 60) + 1, int((time.time() - FIRED_WITHIN) // 60) + 1)
        drainers = Crew([Drainer(self._scene, f"d-{queue}-{n}", queue) for queue in (JOBS, DEAD, EVENTS, SINGLE, MOVING) for n in range(2)])
        drainers.start()
        try:
            counters = await self._until_empty()
        finally:
            await drainers.stop(END_WITHIN)
        await self._take_ticks()
        findings = self._scene.findings
        for queue, book in self._scene.books.items():
            family = {} if queue == SHORT else {each: counters[each] for each in ((JOBS, DEAD) if queue == JOBS else (queue,))}
            findings += book.close(family, keeps_counts=queue not in (MOVING, SHORT))
        missing = sorted(set(minutes) - self._scene.ticks)
        findings += [f"lost: the schedule's item of {time.strftime('%H:%M', time.gmtime(60 * each))}" for each in missing]
        items = sum(book.items for book in self._scene.books.values())
        self._say(f"books: {items:,} items, {len(self._scene.ticks)} of the schedule")

    async def _until_empty(self) -> dict[str, dict[str, int]]:
        """The counters of all queues once those with a book are empty. Raises AssertionError if they do not get so."""
        deadline = time.monotonic() + EMPTY_WITHIN
        looks = 0
        while True:
            counters = {queue: await self._scene.counters(queue) for queue in QUEUES}
            left = {queue: sum(each[name] for name in ("total", "transferring", "unavailable")) for queue, each in counters.items()}
            # Two in a row: an item may go from a queue that is looked at later to one that was looked at before.
            looks = looks + 1 if not any(count for queue, count in left.items() if queue != TICKS) else 0
            if looks == 2:
                return counters
            assert time.monotonic() < deadline, f"the queues could not be emptied; left: {left}"
            await asyncio.sleep(0.0 if looks else 0.3)

    async def _take_ticks(self) -> None:
        taker = TickConsumer(self._scene, "t-last", TICKS)
        while (await self._scene.counters(TICKS))["total"]:
            await taker.work()

    async def _at_rest(self) -> int:
        """The sockets of a server that nobody uses but for the one connection over which its queues were made."""
        found = await asyncio.to_thread(vitals, self._member.pid)
        assert found is not None, f"the server has ended:\n{self._member.tail()}"
        return found.sockets - 1

    async def _check_rest(self, sockets: int) -> None:
        """Delete all queues, and let all clients go: then nothing of them may be left."""
        await self._ask("schedules.delete", name=TICK)
        for queue in reversed(QUEUES):
            # An empty dead queue goes with its queue.
            await self._ask("queues.delete", ("queue_not_found",), queue_name=queue, force=True)
        await self._scene.http.aclose()
        deadline = time.monotonic() + QUIET_WITHIN
        while True:
            found = await asyncio.to_thread(vitals, self._member.pid)
            assert found is not None, f"the server has ended:\n{self._member.tail()}"
            kept = await asyncio.to_thread(lambda: sorted(each.name for each in (self._member.data / "partitions").glob("*.sqlite*")))
            if not kept and found.sockets <= sockets + SPARE_SOCKETS:
                break
            if time.monotonic() > deadline:
                self._scene.findings += [f"left behind: {len(kept)} files of deleted queues, such as {kept[0]}"] if kept else []
                if found.sockets > sockets + SPARE_SOCKETS:
                    self._scene.findings.append(f"left behind: {found.sockets} sockets when all clients are gone; {sockets} at the start")
                break
            await asyncio.sleep(0.5)
        code = await asyncio.to_thread(self._member.stop)
        if code != 0:
            self._scene.findings.append(f"the server was stopped, and ended with {code}")
        if self._member.tracebacks():
            self._scene.findings.append(f"the server's log has {self._member.tracebacks()} tracebacks")

    async def _ask(self, call: str, expected: Sequence[str] = (), **fields: Any) -> Any:
        answer = await ask(self._scene.http, self._member.url, call, fields, 60.0, expected)
        assert answer.outcome == "done" or answer.problem in expected, f"{call}: {answer.problem}"
        return answer.body


_SAMPLE: Final = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_SUMMED: Final = {
    "sluiceway_queue_items": "items",
    "sluiceway_queue_leases": "leases",
    "sluiceway_queue_waiting_requests": "waiting requests",
    "sluiceway_event_loop_lag_seconds_sum": "lag sum",
    "sluiceway_event_loop_lag_seconds_count": "lag count",
    "sluiceway_queue_partition_failures_total": "partition failures",
}


def read_metrics(text: str) -> dict[str, float]:
    """Some metrics of the server, each summed over its labels, and under `series` how many there are in all."""
    found = {"series": 0.0}
    for name, value in _SAMPLE.findall(text):
        found["series"] += 1
        if name in _SUMMED:
            found[_SUMMED[name]] = found.get(_SUMMED[name], 0.0) + float(value)
    return found
