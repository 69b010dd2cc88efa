"""Consumers of a simulated cluster that wait for items of other instances: the real `Demand` of each instance, over bad links.

Queues are counts of items, and ownership is as the world says, so that histories are short and clusters of a dozen instances fit. In most
histories they go by the rules of large clusters: few polls are told at once, and polls last long. Invariants:

W1 In a calm cluster an item that is produced at any instance soon reaches a lease that waits at any other.
W2 After any faults, leases that wait at one instance get all items, wherever they are.
W3 An item that all instances wait for costs calls of those that are told at once, and not of every instance.
W4 At rest an instance makes no more than MAX_POLLS polls a second, or one for each other instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, cast

from simulation.cluster_group import roads_of
from simulation.logs import listening
from simulation.loop import Loop, Process, simulated
from simulation.network import Network
from simulation.network_link import NoAnswerError, NotSentError
from simulation.planting import Bug, planted
from simulation.promises import check
from simulation.world import EventLog
from sluiceway.cluster.remote_demand import MARGIN, Demand
from sluiceway.core.queue import poll_line, remote_items
from sluiceway.core.queue.remote_items import POLL
from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.peers import Load, PeerRequest, Poll

QUEUES = ("q0", "q1", "q2")
TRAFFIC: Millis = 20_000
SOON: Millis = 1_000
"""Deadline for an item of a calm cluster to reach a waiting lease."""
LEASE: Millis = 2_000
"""Lease timeout of items whose answer was lost: after it they are ready again."""
TRIALS = 12
ITEMS = 40
"""Items, one after the other, that all instances wait for."""


class Rules(NamedTuple):
    """Size of a cluster, and the rules by which it goes. `few`: polls that are told at once. `polls`: the most for an instance a second."""

    instances: int
    few: int
    polls: int


RULES = (Rules(2, 10, 33), Rules(5, 10, 33), Rules(4, 1, 1), Rules(9, 1, 1), Rules(12, 2, 2))


@dataclass
class _Counts:
    """A share of a queue, as `Demand` sees it."""

    items: int = 0
    is_owner: bool = False
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def ready(self) -> int:
        return 0 if self.waiters else self.items

    def load(self) -> Load:
        return Load(self.ready, self.items if self.is_owner else None)


class _Record(NamedTuple):
    incarnation: str


@dataclass
class _Share:
    record: _Record
    queue: _Counts = field(default_factory=_Counts)


@dataclass(eq=False)
class Host:
    """One instance."""

    process: Process
    peer: Peer
    shares: dict[str, _Share]
    demand: Demand = field(init=False)


class DemandWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.random = Random(seed)
        self.log = log
        self.loop = Loop(self.random)
        self.rules = self.random.choice(RULES)
        self.network = Network(self.loop, roads_of(self.random))
        self.hosts = [self._host(number) for number in range(self.rules.instances)]
        self.produced = self.taken = 0
        self.fetches = 0

    def _host(self, number: int) -> Host:
        name = f"h{number:02}"
        process = self.loop.add(Process(name, self.random.uniform(0.9, 1.1), self.random.randrange(10_000, 10_000_000)))
        return Host(process, Peer(name, name), {queue: _Share(_Record(queue)) for queue in QUEUES})

    def live(self) -> None:
        rules = [
            Bug("few", "", poll_line, "FEW", lambda _few: self.rules.few),
            Bug("polls", "", remote_items, "MAX_POLLS", lambda _most: self.rules.polls),
        ]
        with ExitStack() as stack:
            stack.enter_context(simulated(self.loop))
            stack.enter_context(listening(self.note, self.loop.fail))
            for rule in rules:
                stack.enter_context(planted(rule))
            stack.callback(self.loop.close)
            self.loop.run_until_complete(self._history())

    def note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.add(self.loop.now, [self.loop.process.name, *parts])

    # ---- the script -------------------------------------------------------------------------------------------

    async def _history(self) -> None:
        for host in self.hosts:
            self._start(host)
        for queue in QUEUES:
            for host in self.random.sample(self.hosts, self.random.randint(1, len(self.hosts))):
                host.shares[queue].queue.is_owner = True
        for host in self.hosts:
            self._follow(host)
        consumers = [self._consume(host) for host in self.hosts for _ in range(self.random.randint(0, 2))]
        for _ in range(self.random.choice([0, 2, 5])):
            self.loop.after(self.random.randrange(TRAFFIC), self._cut)
        for _ in range(self.random.choice([0, 3])):
            self.loop.after(self.random.randrange(TRAFFIC), self._freeze)
        for _ in range(self.random.choice([0, 2, 6])):
            self.loop.after(self.random.randrange(TRAFFIC), self._move)
        await asyncio.gather(self._produce(), *consumers)
        self.note("calm")
        self.network.roads.calm()
        self.network.free()
        await self._drain()
        # A poll that was lost ends by itself.
        await asyncio.sleep(self._longest_poll() / 1000)
        await self._check_items()
        await self._check_cost()
        await self._check_rest()

    def _start(self, host: Host) -> None:
        async def begin() -> None:
            transport = self.network.transport(host.process)
            shares = cast("Callable[[str], QueueDriver | None]", host.shares.get)
            host.demand = Demand(transport, shares, self._owners, lambda: host.peer.name)

            async def answer(request: PeerRequest) -> Any:
                assert isinstance(request, Poll)
                return await host.demand.answer(request, cast("list[QueueDriver]", [*host.shares.values()]))

            self.network.listen(host.peer.address, host.process, answer)

        self.loop.begin(host.process, begin())

    def _owners(self, queue: str) -> list[Peer]:
        return [host.peer for host in self.hosts if host.shares[queue].queue.is_owner]

    def _follow(self, host: Host) -> None:
        """The instance learns who owns what."""

        async def learn() -> None:
            host.demand.follow([other.peer for other in self.hosts if other is not host], moved=True)

        self.loop.begin(host.process, learn())

    def _cut(self) -> None:
        sender, receiver = self.random.sample(self.hosts, 2)
        self.note("cut", sender.peer.name, receiver.peer.name)
        self.network.cut(sender.process, receiver.process)
        self.loop.after(self.random.randrange(10_000), lambda: self.network.uncut(sender.process, receiver.process))

    def _freeze(self) -> None:
        process = self.random.choice(self.hosts).process
        process.frozen = True
        self.note("frozen", process.name)

        def thaw() -> None:
            process.frozen = False

        self.loop.after(self.random.randrange(5_000), thaw)

    def _move(self) -> None:
        """An owner's part of a queue moves, and all instances hear of it within a second."""
        queue = self.random.choice(QUEUES)
        before = self.random.choice([host for host in self.hosts if host.shares[queue].queue.is_owner])
        after = self.random.choice(self.hosts)
        items, before.shares[queue].queue.items = before.shares[queue].queue.items, 0
        before.shares[queue].queue.is_owner, after.shares[queue].queue.is_owner = False, True
        self.note(items, "of", queue, "move from", before.peer.name, "to", after.peer.name)
        self._add(after, queue, items)
        for host in self.hosts:
            self.loop.after(self.random.randrange(1_000), lambda host=host: self._follow(host))  # type: ignore[misc]

    # ---- items ------------------------------------------------------------------------------------------------

    def _add(self, host: Host, queue: str, items: int) -> None:
        """A cycle of the share, in the instance's process: leases that wait there come first."""

        async def cycle() -> None:
            share = host.shares[queue].queue
            share.items += items
            while share.waiters and share.items:
                waiter = share.waiters.pop(0)
                if not waiter.done():
                    share.items -= 1
                    self.taken += 1
                    waiter.set_result(None)
            host.demand.look(queue)

        self.loop.begin(host.process, cycle())

    def _make(self, host: Host, queue: str, items: int = 1) -> None:
        self.produced += items
        self.note(items, "of", queue, "at", host.peer.name)
        self._add(host, queue, items)

    async def _produce(self) -> None:
        until = self.loop.now + TRAFFIC
        while self.loop.now < until:
            queue = self.random.choice(QUEUES)
            owner = self.random.choice([host for host in self.hosts if host.shares[queue].queue.is_owner])
            self._make(owner, queue, self.random.choice([1, 1, 3, 20]))
            await asyncio.sleep(self.random.choice([0.02, 0.5, 3]))

    async def _consume(self, host: Host) -> None:
        until = self.loop.now + TRAFFIC
        while self.loop.now < until:
            queue, batch_size = self.random.choice(QUEUES), self.random.choice([1, 5])
            await self._lease(host, queue, self.random.choice([300, 5_000]), batch_size)
            await asyncio.sleep(self.random.random())

    async def _lease(self, host: Host, queue: str, patience: Millis, batch_size: int = 1) -> bool:
        return await self.loop.begin(host.process, self._leased(host, queue, patience, batch_size))

    async def _leased(self, host: Host, queue: str, patience: Millis, batch_size: int) -> bool:
        """As `RemoteLeases` does: wait here, take back what waits for an offer, and fetch."""
        share, deadline = host.shares[queue].queue, self.loop.now + patience
        while self.loop.now < deadline:
            if share.items:
                self.taken += min(share.items, batch_size)
                share.items -= min(share.items, batch_size)
                return True
            here: asyncio.Future[None] = self.loop.create_future()
            share.waiters.append(here)
            wish, got = host.demand.wish(queue, batch_size), None
            try:
                left = (deadline - self.loop.now) / 1000
                await asyncio.wait((here, wish.offer), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if here.done():
                    return True
                share.waiters.remove(here)
                if wish.offer.done():
                    got = await self._fetch(host, wish.offer.result(), queue, batch_size)
                    if got:
                        return True
            finally:
                host.demand.end(wish, got)
        return False

    async def _fetch(self, host: Host, peer: Peer, queue: str, batch_size: int) -> bool:
        self.fetches += 1
        other = next(each for each in self.hosts if each.peer == peer)
        heard: asyncio.Future[None] = self.loop.create_future()

        async def take() -> int:
            share = other.shares[queue].queue
            items = min(share.ready, batch_size)
            share.items -= items
            if items:
                self.loop.after(LEASE, lambda: self._add(other, queue, items) if heard.cancel() else None)
            return items

        try:
            items = await self.network.link(host.process, other.process).call(take, LEASE // 2)
        except (NotSentError, NoAnswerError):
            return False
        if heard.cancelled():
            # It was frozen for too long: its lease has run out.
            return False
        heard.set_result(None)
        self.taken += items
        return items > 0

    # ---- invariant checks -------------------------------------------------------------------------------------

    def _longest_poll(self) -> Millis:
        # An instance that still goes by its poll of the time before the calm needs it to end. Its clock may be slow.
        return round(1.2 * (1.5 * remote_items.poll_time(len(self.hosts) - 1) + MARGIN))

    async def _drain(self) -> None:
        """W2: consumers at one instance get all."""
        host = self.random.choice(self.hosts)
        deadline = self.loop.now + 2 * self._longest_poll() + 10_000 + 100 * self.produced

        async def drain(queue: str) -> None:
            while any(each.shares[queue].queue.items for each in self.hosts) or self.taken < self.produced:
                check(self.loop.now < deadline, f"{self.produced - self.taken} items are left, of which {host.peer.name} does not learn")
                await self._lease(host, queue, 1_000, 5)

        await asyncio.gather(*map(drain, QUEUES))

    async def _check_items(self) -> None:
        """W1: between pairs of instances, also while a third one is frozen, of which others may have been told."""
        for _ in range(TRIALS):
            queue = self.random.choice(QUEUES)
            waits = self.random.choice(self.hosts)
            makes = self.random.choice([host for host in self.hosts if host.shares[queue].queue.is_owner])
            lease = asyncio.ensure_future(self._lease(waits, queue, 30_000))
            await asyncio.sleep(self.random.choice([0.1, 0.5, 3]))
            third = self.random.choice(self.hosts)
            third.process.frozen = third not in (waits, makes) and self.random.random() < 0.5
            began = self.loop.now
            self._make(makes, queue)
            check(await lease, f"{waits.peer.name} does not learn of an item of {makes.peer.name}")
            took = self.loop.now - began
            third.process.frozen = False
            check(took < SOON, f"{waits.peer.name} has an item of {makes.peer.name} after {took} ms")
            # Others are told of items that they do not wait for any more.
            self._make(makes, queue, self.random.choice([0, 0, 2]))
            await asyncio.sleep(self.random.choice([0, 0.3]))
            await self._drain()

    async def _check_cost(self) -> None:
        """W3."""
        queue, until = QUEUES[0], self.loop.now + 120 * ITEMS

        async def consume(host: Host) -> None:
            while self.loop.now < until:
                await self._lease(host, queue, until - self.loop.now)

        owner, *others = self.hosts
        owner.shares[queue].queue.is_owner = True
        for host in self.hosts:
            self._follow(host)
        consumers = [asyncio.ensure_future(consume(host)) for host in others]
        await asyncio.sleep(0.5)
        # An item that all wait for is told to one, or to as many as are told at once.
        told = self.rules.few if len(others) <= self.rules.few else 1
        asked, fetches, began = self.network.asked, self.fetches, self.loop.now
        for _ in range(ITEMS):
            self._make(owner, queue)
            await asyncio.sleep(0.1)
        calls = self.network.asked - asked + self.fetches - fetches
        most = ITEMS * (2 + 2 * told) + self._rest(self.loop.now - began)
        check(calls <= most, f"{ITEMS} items that all wait for cost {calls} calls, and may cost {most}")
        await asyncio.gather(*consumers)
        check(self.taken == self.produced, f"{self.produced - self.taken} items that all wait for are left")

    async def _check_rest(self) -> None:
        """W4."""
        await asyncio.sleep(2 * self._longest_poll() / 1000)
        asked, began = self.network.asked, self.loop.now
        await asyncio.sleep(30)
        calls, most = self.network.asked - asked, self._rest(self.loop.now - began)
        check(calls <= most, f"at rest there are {calls} polls, and may be {most}")

    def _rest(self, time: Millis) -> int:
        """The most polls of all instances in that time, if nothing happens: one may end at once."""
        others = len(self.hosts) - 1
        each = max(POLL, others * 1_000 // self.rules.polls)
        return round(len(self.hosts) * others * (1 + 1.5 * time / each))


def run_demand(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    DemandWorld(seed, log).live()
