"""Order under faults: a million keys, and consumers that complete, retry, release, and stop in the midst; the server is killed, and the
queue is rebalanced."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from sluiceway.client import AsyncClient, Rebalance, Retry, SluicewayError
from tests.campaigns.keys.key_ledger import KeyLedger, Numbers, Run, bodies, body
from tests.server.server_process import ServerProcess

QUEUE = "orders"
LEASE = 5.0
"""Seconds of a lease."""
BATCH = 1_000
SMALL = 200


@dataclass
class Plan:
    """What the run does."""

    keys: int
    items: int
    """Of each key."""
    consumers: int = 64
    partitions: int = 4
    rebalances: tuple[int, ...] = (8, 3)
    """Numbers of partitions to which the queue is rebalanced, one after the other, while items are produced."""
    producers: int = 8
    per_batch: int = 100
    """Keys of a produced batch."""
    kill_every: float = 20.0
    """Seconds; 0: never."""


@dataclass
class Counts:
    completed: int = 0
    retried: int = 0
    released: int = 0
    dropped: int = 0
    unknown: int = 0
    kills: int = 0
    produced: int = 0
    repeated: int = 0
    rebalances: list[str] = field(default_factory=list)
    """What each was, and how long it took."""
    problems: list[str] = field(default_factory=list)


class OrderRun:
    """One run on a server of its own."""

    def __init__(self, plan: Plan, folder: Path, seed: int) -> None:
        self.plan = plan
        self.ledger = KeyLedger(plan.keys)
        self.counts = Counts()
        self._random = random.Random(seed)
        self._data = folder / "data"
        self._server = ServerProcess(self._data)
        self._url = self._server.url
        self._produced_all = False
        self._is_over = False

    async def run(self) -> None:
        """Returns once every item is settled, or nothing moves any more."""
        async with self._client() as client:
            await client.create_queue(
                QUEUE, requested_partitions=self.plan.partitions, order="key", max_attempts=None, dead_queue=None, retry_backoff=None
            )
            nemesis = asyncio.create_task(self._kill_again_and_again())
            rebalances = asyncio.create_task(self._rebalance(client))
            consumers = [asyncio.create_task(self._consume(random.Random(number))) for number in range(self.plan.consumers)]
            try:
                await asyncio.gather(*(self._produce(number) for number in range(self.plan.producers)))
                self._produced_all = True
                await self._drain(client)
                await rebalances
            finally:
                self._is_over = True
                nemesis.cancel()
                rebalances.cancel()
                await asyncio.wait(consumers)
                with contextlib.suppress(asyncio.CancelledError):
                    await nemesis
                self._server.kill()
        for each in consumers:
            if (error := each.exception()) is not None:
                self.counts.problems.append(repr(error))

    def _client(self) -> AsyncClient:
        return AsyncClient(self._url, retry_for="3m")

    # ---- producers ------------------------------------------------------------------------------------------------

    async def _produce(self, producer: int) -> None:
        """Its share of the keys, so that the items of each are sent one call after the other."""
        mine = np.arange(producer, self.plan.keys, self.plan.producers)
        each = BATCH // self.plan.per_batch
        async with self._client() as client:
            for number in range(0, self.plan.items, each):
                for start in range(0, len(mine), self.plan.per_batch):
                    keys = mine[start : start + self.plan.per_batch].tolist()
                    items = min(each, self.plan.items - number)
                    rows = [(key, number + at) for at in range(items) for key in keys]
                    batch = pa.RecordBatch.from_arrays(
                        [pa.array([body(*row) for row in rows], pa.binary()), pa.array([f"k{key}" for key, _ in rows])], ["payload", "key"]
                    )
                    done = await client.produce_arrow(QUEUE, batch, idempotency_key=f"{producer}/{number}/{start}")
                    self.counts.repeated += done.deduplicated
                    self.counts.produced += len(rows)

    # ---- consumers ------------------------------------------------------------------------------------------------

    async def _consume(self, chance: random.Random) -> None:
        async with AsyncClient(self._url, retry_for="0s", client_id=f"c{chance.random()}") as client:
            while not self._is_over:
                try:
                    began = time.monotonic()
                    leased = await client.lease_arrow(
                        QUEUE,
                        batch_size=BATCH,
                        request_timeout="1s",
                        lease_timeout=f"{LEASE:g}s",
                        max_partitions=max((self.plan.partitions, *self.plan.rebalances)),
                        runs=True,
                    )
                except SluicewayError:
                    # What it got, if anything, comes back when the lease runs out.
                    await asyncio.sleep(0.1)
                    continue
                if leased.table.num_rows < SMALL:
                    # So that there is something to get: few items cost as much as many.
                    await asyncio.sleep(0.05)
                if leased.leases:
                    runs = self.ledger.delivers(*bodies(leased.table.column("payload")), began + LEASE)
                    await self._handle(client, chance, leased.lease_ids, leased.ids().to_pylist(), leased.table, runs)

    async def _handle(
        self, client: AsyncClient, chance: random.Random, leases: list[str], ids: list[str], table: pa.Table, runs: list[Run]
    ) -> None:
        keys, upto = np.array([run.key for run in runs]), np.array([run.number + run.items for run in runs])
        act = chance.random()
        with contextlib.suppress(SluicewayError):
            if act < 0.02:
                self.counts.dropped += len(ids)
            elif act < 0.04:
                self.ledger.let_go(keys)
                self.counts.released += (await client.release(QUEUE, lease_ids=leases)).released
            elif act < 0.10:
                await self._fail_one(client, chance, ids, table, runs)
            else:
                await self._complete(client, leases, keys, upto, len(ids))
            return
        self.counts.unknown += len(ids)

    async def _complete(self, client: AsyncClient, leases: list[str], keys: Numbers, upto: Numbers, items: int) -> None:
        # Others may have what comes next before this one hears the answer.
        self.ledger.settles(keys, upto)
        self.ledger.let_go(keys)
        done = await client.complete(QUEUE, lease_ids=leases)
        if done.completed == items:
            self.ledger.settled(keys, upto)
        self.counts.completed += done.completed

    async def _fail_one(self, client: AsyncClient, chance: random.Random, ids: list[str], table: pa.Table, runs: list[Run]) -> None:
        """Of one key, an item fails: those before it are completed, and what is behind it comes back with it. All others are completed."""
        keys, _ = bodies(table.column("payload"))
        places = np.argsort(keys, kind="stable")
        failing = chance.choice(runs)
        fails_at = chance.randrange(failing.items)
        behind = set(places[failing.first + fails_at : failing.first + failing.items].tolist())
        done = [each for place, each in enumerate(ids) if place not in behind]
        upto = np.array([run.number + (fails_at if run is failing else run.items) for run in runs])
        settled = np.array([run.key for run in runs])
        self.ledger.settles(settled, upto)
        self.ledger.let_go(settled)
        answers = [await client.complete(QUEUE, done[at : at + BATCH]) for at in range(0, len(done), BATCH)]
        if sum(each.completed for each in answers) == len(done):
            self.ledger.settled(settled, upto)
        failed = ids[int(places[failing.first + fails_at])]
        self.counts.retried += (await client.retry(QUEUE, [Retry(failed, retry_after=chance.choice(["0s", "0s", "300ms"]))])).retried
        self.counts.completed += sum(each.completed for each in answers)

    # ---- rebalances -----------------------------------------------------------------------------------------------

    async def _rebalance(self, client: AsyncClient) -> None:
        """Begin each when another part of the items is produced, and wait for its end."""
        for number, requested in enumerate(self.plan.rebalances, 1):
            while self.counts.produced < number * self.plan.keys * self.plan.items // (len(self.plan.rebalances) + 1):  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.1)
            began, before = time.monotonic(), self.ledger.delivered
            found = await self._begun(client, requested)
            while found.is_open:
                await asyncio.sleep(0.2)
                with contextlib.suppress(SluicewayError):
                    found = await client.get_rebalance(found.id)
            if found.state != "done":
                self.counts.problems.append(f"the rebalance to {requested} partitions is {found.state}: {found.problem}")
            took, meanwhile = time.monotonic() - began, self.ledger.delivered - before
            self.counts.rebalances.append(f"to {requested} in {took:.1f} s, with {meanwhile:,} deliveries meanwhile")

    async def _begun(self, client: AsyncClient, requested: int) -> Rebalance:
        """Begin the rebalance once, whatever becomes of calls while the server is killed."""
        while True:
            with contextlib.suppress(SluicewayError):
                newest = (await client.list_rebalances(queue_name=QUEUE, limit=1)).items
                if newest and newest[0].requested_partitions == requested:
                    return newest[0]
                await client.rebalance(QUEUE, requested_partitions=requested)
            await asyncio.sleep(0.1)

    # ---- the end --------------------------------------------------------------------------------------------------

    async def _kill_again_and_again(self) -> None:
        while self.plan.kill_every:
            await asyncio.sleep(self.plan.kill_every * self._random.uniform(0.5, 1.5))
            await asyncio.to_thread(self._server.kill)
            self.counts.kills += 1
            self._server = await asyncio.to_thread(ServerProcess, self._data, self._url.removeprefix("http://"))

    async def _drain(self, client: AsyncClient) -> None:
        """Until the queue is empty. Raises if nothing is settled for three minutes."""
        last, moved_at = -1, time.monotonic()
        while True:
            with contextlib.suppress(SluicewayError):
                left = sum(each.total for each in (await client.stats(QUEUE)).partitions)
                if left == 0:
                    return
                if left != last:
                    last, moved_at = left, time.monotonic()
            if time.monotonic() - moved_at > 180:
                raise RuntimeError(f"{last} items are not delivered: nothing moves")
            await asyncio.sleep(0.5)
