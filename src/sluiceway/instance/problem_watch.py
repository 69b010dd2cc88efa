"""Problem watch: samples the instance's own partitions every two seconds, keeps the judge, and collects what other instances find."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from sluiceway.adapters import system
from sluiceway.adapters.storage.bucket_requests import META, BucketRequests
from sluiceway.cluster.instance_view import Instances
from sluiceway.cluster.ownership import Ownership
from sluiceway.core.problems.judge import Judge
from sluiceway.core.problems.observations import BackendSample, HeldUp, InstanceSample
from sluiceway.core.problems.thresholds import INTERVAL
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_PROBLEMS
from sluiceway.local.backend_pool import BackendInfo
from sluiceway.local.clock_watch import ClockWatch
from sluiceway.local.disk_room import DiskRoom
from sluiceway.local.queries import keys_of
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.local.queue_sampling import facts_of, sample_of
from sluiceway.model.peers import ListProblems
from sluiceway.model.problems import Problem, Problems, ProblemsSeen, merge
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport

log = logging.getLogger(__name__)

_PATIENCE: Final[Millis] = 3_000
"""Timeout for the answer of another instance: a page that shows what is wrong must not wait for what is wrong."""
_QUEUES_AT_ONCE: Final = 20
"""Queues sampled before the event loop gets to serve other tasks: a millisecond or two."""
_KEYS_READ_IN: Final = 1.0
"""Seconds for which a look waits for the texts of keys that are held up: it must not hang with the storage."""
_FIRST: Final = 0.5
"""Seconds until the first sample, so that a start is not slowed down."""


class Source(Protocol):
    """The instance that is watched."""

    room: DiskRoom
    clock: ClockWatch
    instances: Instances
    bucket_requests: BucketRequests

    def queues(self) -> list[QueueRecord]: ...

    def backends(self) -> list[BackendInfo]: ...


class ProblemWatch:
    """What is wrong with this instance and its partitions, between `start` and `stop`; and with all instances, on request."""

    def __init__(self, source: Source, drivers: Mapping[str, QueueDriver], ownership: Ownership, transport: Transport | None) -> None:
        self._source = source
        self._drivers = drivers
        self._ownership = ownership
        self._transport = transport
        self._judge = Judge()
        self._counted: dict[str, tuple[int, int]] = {}
        """Requests to each bucket as of the last look, and how many of them it throttled."""
        self._key_texts: dict[tuple[str, int], str] = {}
        """The keys that were held up at the last look, by incarnation and hash."""
        self._watched = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        await asyncio.sleep(_FIRST)
        while True:
            began = system.stopwatch()
            try:
                await self.look(system.now())
            except Exception:
                log.exception("the check for problems failed")
            await asyncio.sleep(max(0.1, INTERVAL / 1000 - (system.stopwatch() - began)))

    async def look(self, now: Millis) -> None:
        """Take a sample of everything, and judge it. Yields to other requests meanwhile."""
        self._judge.instance = "" if self._ownership.is_alone else self._ownership.name
        dead_queues = frozenset(record.dead_queue for record in self._source.queues() if record.dead_queue is not None)
        slowest: dict[str, tuple[Millis, str]] = {}
        there = []
        key_texts: dict[tuple[str, int], str] = {}
        for number, driver in enumerate(list(self._drivers.values()), 1):
            if number % _QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if not driver.queue.executors:
                # Other instances own all of its partitions.
                continue
            sample, by_backend = sample_of(driver, now)
            there.append(driver.record.incarnation)
            if sample.held_up:
                sample = sample._replace(held_up=await self._named(driver, sample.held_up, key_texts))
            self._judge.see_queue(driver.record.incarnation, facts_of(driver, dead_queues), sample)
            for backend, took in by_backend.items():
                slowest[backend] = max(slowest.get(backend, (0, "")), (took, driver.record.queue_name))
        self._judge.keep(there)
        self._key_texts = key_texts
        self._judge.see_instance(self._sample(now, slowest))
        self._watched = True

    async def _named(self, driver: QueueDriver, held_up: Sequence[HeldUp], texts: dict[tuple[str, int], str]) -> tuple[HeldUp, ...]:
        """The same with the keys' texts, which are read once each, and noted in `texts`. Empty where they cannot be read in time."""
        incarnation = driver.record.incarnation
        known = {each.holder.key: self._key_texts.get((incarnation, each.holder.key)) for each in held_up}
        unknown = [(each.partition, each.holder) for each in held_up if known[each.holder.key] is None]
        found: Mapping[int, str] = {}
        if unknown:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEYS_READ_IN):
                    found = await keys_of(driver, unknown)
        named = tuple(each._replace(key=known[each.holder.key] or found.get(each.holder.key, "")) for each in held_up)
        texts.update({(incarnation, each.holder.key): each.key for each in named})
        return named

    def _sample(self, now: Millis, slowest: Mapping[str, tuple[Millis, str]]) -> InstanceSample:
        source = self._source
        backends = tuple(
            BackendSample(each.name, each.problem if each.partitions else None, *slowest.get(each.name, (0, "")))
            for each in source.backends()
        )
        cluster = source.instances.cluster()
        silent = [each.name for each in cluster.instances if each.state == "silent"] if not self._ownership.is_alone else []
        clock = source.clock.check()
        return InstanceSample(
            now,
            backends,
            tuple(silent),
            "; ".join(source.instances.problems()),
            source.room.low(),
            dict(self._throttled()),
            "" if clock.ok else clock.detail,
            cluster.level,
            cluster.reachable_level,
        )

    def _throttled(self) -> Iterator[tuple[str, float]]:
        """The share of the requests since the last look that each bucket refused because there were too many."""
        for name, counts in self._source.bucket_requests.backends.items():
            total, throttled = self._counted.get(name, (0, 0))
            self._counted[name] = counts.total, counts.throttled
            # No new ones, or fewer than before: the counts have started anew.
            share = (counts.throttled - throttled) / (counts.total - total) if counts.total > total else 0.0
            yield "the meta store" if name == META else f"backend {name}", share

    # ---- reading ----------------------------------------------------------------------------------------------

    def here(self, queue_name: str = "") -> Problems:
        """What is wrong with this instance and its partitions; with a name, only what concerns that queue."""
        found = [each for each in self._judge.problems() if not queue_name or each.queue_name == queue_name]
        return Problems(tuple(found[:MAX_PROBLEMS]), self._watched)

    async def everywhere(self, queue_name: str = "") -> ProblemsSeen:
        """What is wrong with any instance, and the instances that did not answer."""
        here, peers = self.here(queue_name), self._ownership.peers()
        asked = ListProblems(queue_name)
        answers = await asyncio.gather(*(self._ask(peer.address, asked) for peer in peers))
        found: list[Problem] = [each for share in (here, *answers) if share is not None for each in share.found]
        silent = tuple(peer.name for peer, answer in zip(peers, answers, strict=True) if answer is None)
        return ProblemsSeen(tuple(merge(found)[:MAX_PROBLEMS]), here.watched, silent)

    async def _ask(self, address: str, asked: ListProblems) -> Problems | None:
        assert self._transport is not None, "an instance that is alone has no peers"
        try:
            found: Problems = await self._transport.ask(address, asked, _PATIENCE)
        except (PeerRefusedError, PeerUnknownError, SluicewayError):
            return None
        return found
