"""Producers and consumers of a simulated cluster. Each calls any instance, gives up, retries at another, or vanishes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from random import Random
from typing import Protocol, TypeVar

import numpy as np

from simulation.cluster_instance import Instance
from simulation.cluster_ledger import Hold, QueueLedger
from simulation.known_items import Batch, new_rows
from simulation.loop import Loop
from simulation.network_link import Link, NoAnswerError, NotSentError, Roads
from simulation.promises import BrokenPromiseError, check
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import DONE, RELEASE, Disposition, Extend, Lease, Produce, ProduceKey, QueuePatch, Selection, Settle, Settled

T = TypeVar("T")
PARTINGS: list[Millis] = [0, 300, 2_000, 8_000]
"""How long a client waits beyond its request timeout, in milliseconds."""
SURE = ("unavailable", "partition_damaged", "queue_paused", "key_conflict", "stale_sequence", "queue_not_found")
"""Error codes of refusals: nothing was done."""
UNSURE = ("outcome_unknown",)


class World(Protocol):
    """The cluster, as its clients see it."""

    random: Random
    loop: Loop
    client_roads: Roads
    pace: Millis
    numbers: count[int]
    spanned: int

    def some_instance(self) -> Instance | None: ...

    def latest(self) -> Millis: ...

    async def pause(self, seconds: float) -> bool: ...


class UnheardError(Exception):
    """The call got no answer: it may have been done, or may still be."""


class Clients:
    """Clients of one queue, outside of all instances."""

    def __init__(self, world: World, ledger: QueueLedger) -> None:
        self.world = world
        self.random = world.random
        self.ledger = ledger
        self.asked = count(1)
        self.keys = count(1)
        self.created = False
        self.heard = 0
        """Number of answers."""

    # ---- one call ---------------------------------------------------------------------------------------------

    async def ask(self, work: Callable[[Service], Awaitable[T]], timeout: Millis, instance: Instance | None = None) -> T:
        """Call the instance, or any. Raises SluicewayError, UnheardError, and NotSentError if the request certainly was not sent."""
        instance = instance or self.world.some_instance()
        if instance is None or not instance.serves:
            await asyncio.sleep(0.05)
            raise NotSentError
        link = Link(self.world.loop, self.world.loop.outside, self.world.client_roads, instance.process, withdraws=True)
        instance.callers.append(link)
        try:
            answer = await link.call(lambda: self._asked(instance, work), timeout + self.random.choice(PARTINGS))
        except NoAnswerError:
            raise UnheardError from None
        except (SluicewayError, NotSentError):
            raise
        except Exception as error:
            raise BrokenPromiseError(f"a client is told of a mistake: {error!r}") from error
        finally:
            instance.callers.remove(link)
        self.heard += 1
        return answer

    async def _asked(self, instance: Instance, work: Callable[[Service], Awaitable[T]]) -> T:
        """Look the queue up first, as the HTTP surface does: the instance may not know a new queue yet."""
        if self.created:
            await instance.service.look_up(self.ledger.queue)
        return await work(instance.service)

    def _known(self, error: SluicewayError, what: str) -> str:
        check(error.code in SURE + UNSURE, f"{what} ended with {error.code}: {error.detail}")
        return error.code

    # ---- producers --------------------------------------------------------------------------------------------

    async def produce_until(self, until: Millis) -> None:
        while self.world.loop.now < until:
            await asyncio.sleep(self.random.random() * self.world.pace / 1000)
            key = ProduceKey(f"k{next(self.keys)}") if self.random.random() < 0.4 else None
            numbers = [next(self.world.numbers) for _ in range(self.random.randint(1, 5))]
            await self.produce(self.ledger.add(key, *new_rows(self.ledger.queue, numbers, [None for _ in numbers])))

    async def produce(self, batch: Batch, instance: Instance | None = None) -> bool:
        """Return whether the batch was acknowledged. With a key it is repeated, also after its acknowledgement."""
        for _ in range(6):
            await self._produce_once(batch, instance)
            if batch.key is None or self.random.random() < (0.9 if batch.answer else 0.1):
                break
            await asyncio.sleep(self.random.random() * 0.5)
        return batch.answer is not None

    async def _produce_once(self, batch: Batch, instance: Instance | None) -> None:
        request = Produce(batch.rows, self.random.choice([100, 1_000, 5_000]), batch.key)
        batch.asking += 1
        try:
            answer = await self.ask(lambda service: service.produce(self.ledger.queue, request), request.request_timeout, instance)
            self.ledger.produced(batch, answer)
        except UnheardError:
            batch.unknown = True
        except SluicewayError as error:
            batch.unknown |= self._known(error, "a produce") in UNSURE
        except NotSentError:
            pass
        finally:
            batch.asking -= 1
        self.ledger.check_refused(batch)

    # ---- consumers --------------------------------------------------------------------------------------------

    async def consume_until(self, until: Millis) -> None:
        while self.world.loop.now < until:
            await asyncio.sleep(self.random.random() * self.world.pace / 1000)
            client_id = f"c{next(self.asked)}"
            self.ledger.asks.lease_timeouts[client_id] = timeout = self.random.choice([None, 1_500, 10_000])
            holds: list[Hold] = []
            key = f"L{client_id}" if self.random.random() < 0.4 else None
            for _ in range(self.random.choice([1, 1, 2])):
                wait = self.random.choice([0, 300, 3_000])
                request = Lease(
                    client_id, self.random.choice([1, 3, 10]), wait, timeout, self.random.randint(1, 3), key, runs=self._runs(client_id)
                )
                known = {(each.partition, each.number) for each in holds}
                holds += [hold for hold in await self.lease(request) if (hold.partition, hold.number) not in known]
            await self.use(holds)

    def _runs(self, client_id: str) -> bool:
        """Draw whether this client asks for runs."""
        return False

    async def lease(self, request: Lease, instance: Instance | None = None) -> list[Hold]:
        before = self.ledger.live(request.client_id, self.world.latest())
        try:
            answer = await self.ask(lambda service: service.lease(self.ledger.queue, request), request.request_timeout, instance)
        except SluicewayError as error:
            self._known(error, "a lease")
        except (UnheardError, NotSentError):
            pass
        else:
            return self.ledger.leased(request, answer, before, self.world.latest())
        return []

    async def use(self, holds: Sequence[Hold]) -> None:
        """Act on the leases, which may lie in several partitions: extend, settle some, complete, or vanish."""
        for _ in range(self.random.randint(0, 2)):
            if await self.world.pause(self.random.random() * 1.5):
                break
            deed = self.random.random()
            if deed < 0.3:
                await self.extend(holds)
            elif deed < 0.6:
                some = [Hold(each.partition, each.number, each.client_id, dict(list(each.items.items())[:1])) for each in holds]
                await self.settle(some, self._some_disposition(), 2)
                for hold, part in zip(holds, some, strict=True):
                    for offset in part.items:
                        hold.items.pop(offset, None)
            elif deed < 0.7:
                return
        await self.settle(holds, DONE, 5)

    def _some_disposition(self) -> Disposition:
        dispositions = [DONE, Disposition("retry"), Disposition("retry", retry_after=700), RELEASE]
        return self.random.choice([*dispositions, Disposition("dead", reason="bad")])

    async def settle(self, holds: Sequence[Hold], disposition: Disposition, tries: int, instance: Instance | None = None) -> bool:
        """Settle at any instance, up to `tries` times. Returns whether all of it is settled or was before."""
        sent: dict[int, list[int]] = {}
        for hold in holds:
            sent.setdefault(hold.partition, []).extend(hold.items)
        sent = {partition: sorted(offsets) for partition, offsets in sent.items() if offsets}
        for partition, offsets in sent.items():
            self.ledger.asks.settle(partition, offsets, disposition)
        for _ in range(tries if sent else 0):
            answer = await self._settle_once(sent, disposition, instance)
            if answer is not None:
                self.ledger.settled(disposition.verdict, sent, answer)
                self.world.spanned += len(sent) > 1
                return True
            await asyncio.sleep(self.random.random() * 0.5)
        return False

    async def _settle_once(self, sent: dict[int, list[int]], disposition: Disposition, instance: Instance | None) -> Settled | None:
        selections = {number: [Selection(disposition, np.array(offsets, dtype=np.int64))] for number, offsets in sent.items()}
        request = Settle(selections, self.random.choice([300, 2_000]))
        try:
            return await self.ask(lambda service: service.settle(self.ledger.queue, request), request.request_timeout, instance)
        except SluicewayError as error:
            self._known(error, "a settle")
        except (UnheardError, NotSentError):
            pass
        return None

    async def extend(self, holds: Sequence[Hold]) -> None:
        request = Extend([(each.partition, each.number) for each in holds], 1_000, self.random.choice([500, 4_000]))
        if holds:
            try:
                await self.ask(lambda service: service.extend(self.ledger.queue, request), 1_000)
            except SluicewayError as error:
                self._known(error, "an extension")
            except (UnheardError, NotSentError):
                pass

    async def update(self, patch: QueuePatch) -> None:
        """Update the queue once. Whatever its outcome, all instances follow the record."""
        try:
            await self.ask(lambda service: service.update_queue(self.ledger.queue, patch), 3_000)
        except SluicewayError as error:
            check(error.code in (*SURE, *UNSURE, "version_conflict"), f"an update ended with {error.code}: {error.detail}")
        except (UnheardError, NotSentError):
            pass

    # ---- draining ---------------------------------------------------------------------------------------------

    async def drain(self, instance: Instance) -> None:
        """Lease all available items of the queue through this instance, and complete them."""
        client_id = f"d{next(self.asked)}"
        self.ledger.asks.lease_timeouts[client_id] = 30_000
        holds = await self.lease(Lease(client_id, 1_000, 500, 30_000, 100, runs=self._runs(client_id)), instance)
        if holds:
            await self.settle(holds, DONE, 10, instance)
