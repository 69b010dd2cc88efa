"""PostgresPartitionStore when the server dies, hangs, or the line is cut at the worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from sluiceway.adapters.storage import postgres_openings
from sluiceway.adapters.storage.postgres import PostgresPartitionStore
from sluiceway.adapters.storage.postgres_openings import TAKEOVER_TIMEOUT
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, FencedError, PartitionRef, Snapshot, StoreUnavailableError
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import FENCE, REF, after, cycle
from tests.instance.instance_rig import eventually
from tests.servers.postgres_server import PostgresServer

NEXT = Fence(1, 2, 1)
SYNC = b"S\x00\x00\x00\x04"
"""The message upon which the server commits a statement that has been carried out."""
PATIENT: Millis = 60_000
"""A time-out that nothing here reaches."""
numbers = itertools.count()


@pytest.fixture
def schema() -> str:
    return f"faults{next(numbers)}"


class Proxy:
    """A line to the server. `treat` sees what the client sends; what it gives back is sent on."""

    def __init__(self) -> None:
        self.treat: Callable[[bytes], bytes] = bytes
        self.answers = True
        """Whether what the server says reaches the client; the line is cut when it says something and this is off."""
        self.swallows = False
        """What the server says is lost, and the line stays."""
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[int]:
        """Yields the port to connect to."""

        async def line(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
            answers, to_server = await asyncio.open_connection("127.0.0.1", port)
            self._writers += [to_client, to_server]
            await asyncio.gather(self._requests(client, to_server), self._responses(answers, to_client), return_exceptions=True)
            self.cut()

        listener = await asyncio.start_server(line, "127.0.0.1", 0)
        try:
            yield listener.sockets[0].getsockname()[1]
        finally:
            self.cut()
            listener.close()

    async def _requests(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        with contextlib.closing(to_server):
            while data := await client.read(1 << 20):
                # The end of a message is the end of what has been read: the client waits for the answer.
                to_server.write(self.treat(data))
                await to_server.drain()

    async def _responses(self, answers: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        # Also where the server has reset the line: the client would wait for it to the end of its patience.
        with contextlib.closing(to_client):
            while data := await answers.read(1 << 20):
                if not self.answers:
                    self.cut()
                if not self.swallows:
                    to_client.write(data)

    def send(self, data: bytes) -> None:
        """To the server, on the newest line."""
        self._writers[-1].write(data)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def owner(server: PostgresServer, schema: str) -> AsyncIterator[tuple[PostgresPartitionStore, Proxy]]:
    """A store on a line of its own, with one connection that has applied turn 1, so that turn 2 is one prepared statement."""
    proxy = Proxy()
    async with proxy.to(server.port) as port:
        store = PostgresPartitionStore(server.dsn(port), schema=schema, max_connections=1, statement_timeout=PATIENT)
        await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE
        yield store, proxy
        await store.close()


@contextlib.asynccontextmanager
async def successor(server: PostgresServer, schema: str) -> AsyncIterator[PostgresPartitionStore]:
    store = PostgresPartitionStore(server.dsn(), schema=schema, statement_timeout=PATIENT)
    # So that what a test measures is no first connection.
    await store.browse(REF)
    yield store
    await store.close()


class Held:
    """Sends what the client says on up to the last `count` bytes, or nothing if `count` is none, and keeps the rest."""

    def __init__(self, proxy: Proxy, count: int | None) -> None:
        self._proxy = proxy
        self._count = count
        self._kept = b""
        self.holding = asyncio.Event()
        proxy.treat = self._treat

    def _treat(self, data: bytes) -> bytes:
        assert data.endswith(SYNC)
        at = 0 if self._count is None else len(data) - self._count
        self._kept = data[at:]
        self._proxy.treat = bytes
        self.holding.set()
        return data[:at]

    def release(self) -> None:
        self._proxy.send(self._kept)


def waiting_for_a_lock(server: PostgresServer) -> bool:
    with psycopg.connect(server.dsn()) as connection:
        return bool(connection.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchall())


def holds_the_row(server: PostgresServer) -> bool:
    """A turn is carried out, up to the message upon which it is committed."""
    with psycopg.connect(server.dsn()) as connection:
        look = "SELECT 1 FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND wait_event = 'ClientRead'"
        return bool(connection.execute(look).fetchall())


# A COMMIT that is cut off


@driven
async def test_a_commit_that_lands_after_the_next_owner_opened_is_shut_out(server: PostgresServer, schema: str) -> None:
    async with owner(server, schema) as (former, proxy), successor(server, schema) as present:
        held = Held(proxy, len(SYNC))
        late = asyncio.create_task(former.apply(REF, cycle(2, "b"), FENCE))
        await held.holding.wait()
        await eventually(lambda: holds_the_row(server))
        started = time.monotonic()
        assert await present.open(REF, NEXT) == after(1)
        assert time.monotonic() - started >= TAKEOVER_TIMEOUT / 1000  # the transaction held the row
        held.release()
        assert await late is Outcome.UNKNOWN
        assert await present.browse(REF) == after(1)
        assert await present.apply(REF, cycle(2), NEXT) is Outcome.DONE
        assert await present.browse(REF) == after(2)


@driven
async def test_a_commit_that_lands_while_the_next_owner_opens_is_seen(
    server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_openings, "TAKEOVER_TIMEOUT", PATIENT)
    async with owner(server, schema) as (former, proxy), successor(server, schema) as present:
        held = Held(proxy, len(SYNC))
        late = asyncio.create_task(former.apply(REF, cycle(2), FENCE))
        await held.holding.wait()
        await eventually(lambda: holds_the_row(server))
        opening = asyncio.create_task(present.open(REF, NEXT))
        await eventually(lambda: waiting_for_a_lock(server))
        assert not opening.done()
        held.release()
        assert await opening == after(2)
        assert await late is Outcome.DONE


@driven
async def test_a_turn_that_arrives_after_the_next_owner_opened_is_refused(server: PostgresServer, schema: str) -> None:
    async with owner(server, schema) as (former, proxy), successor(server, schema) as present:
        held = Held(proxy, None)
        late = asyncio.create_task(former.apply(REF, cycle(2, "b"), FENCE))
        await held.holding.wait()
        assert await present.open(REF, NEXT) == after(1)
        held.release()
        assert await late is Outcome.REFUSED
        assert await present.browse(REF) == after(1)


@driven
async def test_a_former_owner_ends_no_transaction_of_its_successor(server: PostgresServer, schema: str) -> None:
    async with owner(server, schema) as (present, proxy), successor(server, schema) as former:
        held = Held(proxy, len(SYNC))
        turning = asyncio.create_task(present.apply(REF, cycle(2), FENCE))
        await held.holding.wait()
        await eventually(lambda: holds_the_row(server))
        with pytest.raises(Exception, match="above"):
            await former.open(REF, Fence(0, 9, 9))
        held.release()
        assert await turning is Outcome.DONE


@driven
async def test_dropping_outwaits_a_turn_in_flight_and_leaves_nothing_of_it(server: PostgresServer, schema: str) -> None:
    async with owner(server, schema) as (former, proxy), successor(server, schema) as present:
        held = Held(proxy, len(SYNC))
        late = asyncio.create_task(former.apply(REF, cycle(2), FENCE))
        await held.holding.wait()
        await eventually(lambda: holds_the_row(server))
        dropping = asyncio.create_task(present.drop(REF))
        await eventually(lambda: waiting_for_a_lock(server))
        held.release()
        await dropping
        assert await late is Outcome.DONE
    with psycopg.connect(server.dsn(), options=f"-c search_path={schema}") as connection:
        for table in ("partition", "record", "blob"):
            assert not connection.execute(f"SELECT 1 FROM {table}".encode()).fetchall()


@pytest.mark.parametrize(("cut", "txn"), [("before it", 1), ("within it", 1), ("before its last message", 1), ("after it", 2)])
@driven
async def test_a_line_cut_at_commit(server: PostgresServer, schema: str, cut: str, txn: int) -> None:
    async with owner(server, schema) as (store, proxy):

        def treat(data: bytes) -> bytes:
            proxy.treat = bytes
            if cut == "after it":
                proxy.answers = False
                return data
            part = data[: {"before it": 0, "within it": len(data) // 2, "before its last message": len(data) - len(SYNC)}[cut]]
            proxy.send(part)
            asyncio.get_running_loop().call_soon(proxy.cut)
            return b""

        proxy.treat = treat
        assert await store.apply(REF, cycle(2), FENCE) is Outcome.UNKNOWN
        proxy.answers = True
        # The same store finds a new line by itself; the server may still be busy with the end of the old one.
        assert await store.open(REF, NEXT) == after(txn)
        assert await store.apply(REF, cycle(txn + 1), NEXT) is Outcome.DONE


@driven
async def test_a_line_cut_while_idle_is_noticed_before_use(server: PostgresServer, schema: str) -> None:
    async with owner(server, schema) as (store, proxy):
        proxy.cut()
        [link] = store._connections._idle
        await eventually(lambda: not link.still_there())
        assert await store.apply(REF, cycle(2), FENCE) is Outcome.DONE


# A server that hangs, dies, or waits for its standby


@driven
async def test_a_hung_server_makes_outcomes_unknown_in_time(server: PostgresServer, schema: str) -> None:
    store = PostgresPartitionStore(server.dsn(), schema=schema, statement_timeout=2_000, max_connections=2)
    refs = [REF._replace(partition=number) for number in range(3)]
    for ref in refs:
        await store.open(ref, FENCE)
    await asyncio.gather(*(store.apply(ref, cycle(1), FENCE) for ref in refs[:2]))
    server.pause()
    try:
        # The kernel would keep such a connection for minutes.
        async with asyncio.timeout(30):
            first = await asyncio.gather(*(store.apply(ref, cycle(2), FENCE) for ref in refs[:2]))
            assert first == [Outcome.UNKNOWN] * 2
            # Now there is not even a connection, so nothing can have been written.
            assert await store.apply(refs[2], cycle(1), FENCE) is Outcome.REFUSED
        with pytest.raises(StoreUnavailableError):
            await store.open(REF, NEXT)
    finally:
        server.resume()
    found = [(await store.open(ref, Fence(1, 3, 1))) for ref in refs]
    assert all(snapshot in (after(1), after(2)) for snapshot in found[:2])
    assert found[2].txn == 0
    for ref, snapshot in zip(refs, found, strict=True):
        assert await store.apply(ref, cycle(snapshot.txn + 1), Fence(1, 3, 1)) is Outcome.DONE
    await store.close()


@driven
@pytest.mark.parametrize("given", [{}, {"connect_timeout": "60"}], ids=["default", "given"])
async def test_a_dead_host_keeps_nobody_from_the_next_one(server: PostgresServer, schema: str, given: dict[str, str]) -> None:
    dead = Proxy()
    # As a machine without power: nothing comes from it, not even a refusal.
    dead.swallows = True
    async with dead.to(server.port) as port:
        dsn = make_conninfo(server.dsn(), host="127.0.0.1,127.0.0.1", port=f"{port},{server.port}", **given)
        store = PostgresPartitionStore(dsn, schema=schema, max_connections=1, statement_timeout=7_000)
        await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE
        await store.close()


@driven
async def test_a_commit_that_gave_up_on_a_standby_is_unknown(server: PostgresServer, schema: str) -> None:
    store = PostgresPartitionStore(server.dsn(), schema=schema)
    await store.open(REF, FENCE)

    def waiting() -> list[int]:
        with psycopg.connect(server.dsn()) as connection:
            return [row[0] for row in connection.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'").fetchall()]

    server.administer("ALTER SYSTEM SET synchronous_standby_names = 'absent'", "SELECT pg_reload_conf()")
    try:
        for txn in itertools.count(1):
            turning = asyncio.create_task(store.apply(REF, cycle(txn), FENCE))
            await eventually(lambda task=turning: task.done() or bool(waiting()))  # type: ignore[misc]
            if not turning.done():
                break
            assert await turning is Outcome.DONE  # the server has not read its new configuration yet
        server.administer(f"SELECT pg_cancel_backend({waiting()[0]})")
        assert await turning is Outcome.UNKNOWN
    finally:
        server.administer("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
    assert await store.open(REF, NEXT) == after(txn)
    await store.close()


class Load:
    """Turns on one partition, and what the store said of them."""

    def __init__(self, store: PostgresPartitionStore, partition: int) -> None:
        self.ref = PartitionRef("k7f3q2ma", partition)
        self.txn = 0
        self.outcomes: list[Outcome] = []
        self.stop = False
        self._store = store
        self._opening = 0
        self._blob = os.urandom(20_000)

    def changes(self, txn: int) -> Changes:
        changes = cycle(txn)
        changes.blobs[txn] = self._blob + b"%d" % txn
        return changes

    async def run(self) -> None:
        fence = await self._open(sure=True)
        while not self.stop:
            outcome = await self._store.apply(self.ref, self.changes(self.txn + 1), fence)
            self.outcomes.append(outcome)
            if outcome is Outcome.DONE:
                self.txn += 1
            else:
                fence = await self._open(sure=outcome is Outcome.REFUSED)

    async def _open(self, *, sure: bool) -> Fence:
        """Open until it works, and compare what is there with what the store has said."""
        while True:
            self._opening += 1
            fence = Fence(1, 1, self._opening)
            try:
                snapshot = await self._store.open(self.ref, fence)
            except StoreUnavailableError:
                await asyncio.sleep(0.01)
                continue
            assert snapshot.txn in ((self.txn,) if sure else (self.txn, self.txn + 1))
            self.txn = snapshot.txn
            assert snapshot == (after(snapshot.txn) if snapshot.txn else Snapshot(0, None, {}))
            return fence

    async def check(self) -> None:
        assert await self._store.browse(self.ref) == after(self.txn)
        blobs = await self._store.read(self.ref, range(self.txn + 2))
        assert blobs == {number: self._blob + b"%d" % number for number in (self.txn - 1, self.txn)}


@driven
async def test_a_server_killed_in_mid_load_keeps_what_was_done(server: PostgresServer, schema: str) -> None:
    store = PostgresPartitionStore(server.dsn(), schema=schema, max_connections=4, statement_timeout=PATIENT)
    loads = [Load(store, partition) for partition in range(6)]

    def done() -> int:
        return sum(load.txn for load in loads)

    async with asyncio.TaskGroup() as group:
        for load in loads:
            group.create_task(load.run())
        for _ in range(4):
            goal = done() + 150
            await eventually(lambda goal=goal: done() >= goal)  # type: ignore[misc]
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            # Served again soon, not after a long back-off.
            goal = done() + 1
            await eventually(lambda goal=goal: done() >= goal)  # type: ignore[misc]
        for load in loads:
            load.stop = True
    outcomes = [outcome for load in loads for outcome in load.outcomes]
    assert Outcome.UNKNOWN in outcomes
    for load in loads:
        await load.check()
    await store.close()


def test_the_killed_server_loses_what_was_not_asked_to_be_durable(server: PostgresServer) -> None:
    """The control group: without it, the test above could not fail."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE control (number int)")
        connection.execute("SET synchronous_commit = on")
        connection.execute("INSERT INTO control VALUES (1)")
        # It would write the log on its own when it likes.
        server.pause_wal_writer()
        connection.execute("SET synchronous_commit = off")
        connection.execute("INSERT INTO control VALUES (2)")
        server.kill()
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        assert connection.execute("SELECT number FROM control").fetchall() == [(1,)]
        connection.execute("DROP TABLE control")


# Openings in groups


REFS = [REF._replace(partition=number) for number in range(8)]


@contextlib.asynccontextmanager
async def group_owner(server: PostgresServer, schema: str) -> AsyncIterator[tuple[PostgresPartitionStore, Proxy]]:
    """As `owner`, of all REFS."""
    async with owner(server, schema) as (store, proxy):
        for ref in REFS[1:]:
            await store.open(ref, FENCE)
            assert await store.apply(ref, cycle(1), FENCE) is Outcome.DONE
        yield store, proxy


async def opened(store: PostgresPartitionStore, fence: Fence, refs: Sequence[PartitionRef] = REFS) -> list[Snapshot | BaseException]:
    """Open all at once."""
    return await asyncio.gather(*(store.open(ref, fence) for ref in refs), return_exceptions=True)


@driven
async def test_a_partition_whose_former_owner_hangs_holds_up_no_other(
    server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group_owner(server, schema) as (former, proxy), successor(server, schema) as present:
        monkeypatch.setattr(postgres_openings, "TAKEOVER_TIMEOUT", PATIENT)
        held = Held(proxy, len(SYNC))
        late = asyncio.create_task(former.apply(REFS[3], cycle(2), FENCE))
        await held.holding.wait()
        await eventually(lambda: holds_the_row(server))
        opening = [asyncio.create_task(present.open(ref, NEXT)) for ref in REFS]
        assert await asyncio.gather(*(opening[number] for number in range(8) if number != 3)) == [after(1)] * 7
        await eventually(lambda: waiting_for_a_lock(server))
        assert not opening[3].done()
        held.release()
        assert await opening[3] == after(2)
        assert await late is Outcome.DONE


@driven
async def test_a_group_ends_the_transaction_of_a_former_owner_that_hangs(server: PostgresServer, schema: str) -> None:
    async with group_owner(server, schema) as (former, proxy), successor(server, schema) as present:
        held = Held(proxy, len(SYNC))
        late = asyncio.create_task(former.apply(REFS[3], cycle(2, "b"), FENCE))
        await held.holding.wait()
        await eventually(lambda: holds_the_row(server))
        assert await opened(present, NEXT) == [after(1)] * 8
        held.release()
        assert await late is Outcome.UNKNOWN
        assert await present.apply(REFS[3], cycle(2), NEXT) is Outcome.DONE


@driven
async def test_a_turn_that_arrives_after_a_group_was_opened_is_refused(server: PostgresServer, schema: str) -> None:
    async with group_owner(server, schema) as (former, proxy), successor(server, schema) as present:
        held = Held(proxy, None)
        late = asyncio.create_task(former.apply(REFS[3], cycle(2, "b"), FENCE))
        await held.holding.wait()
        assert await opened(present, NEXT) == [after(1)] * 8
        held.release()
        assert await late is Outcome.REFUSED
        assert await present.browse(REFS[3]) == after(1)


@driven
async def test_a_group_waits_for_a_partition_that_another_owner_is_creating(server: PostgresServer, schema: str) -> None:
    async with successor(server, schema) as store:
        assert await store.open(REFS[0], FENCE) == Snapshot(0, None, {})
        with psycopg.connect(server.dsn(), options=f"-c search_path={schema}") as other:
            columns = "incarnation, partition, fence_era, fence_grant, fence_opening, txn, crc"
            place = f"'{REF.incarnation}', 4"
            other.execute(f"INSERT INTO partition ({columns}) VALUES ({place}, 0, 0, 1, 0, 0)".encode())
            opening = asyncio.create_task(opened(store, NEXT))
            # It hangs: its transaction is ended, and what it has created is gone.
            assert await opening == [Snapshot(0, None, {})] * 8
            with contextlib.suppress(psycopg.Error):
                other.rollback()
        assert [await store.apply(ref, cycle(1), NEXT) for ref in REFS] == [Outcome.DONE] * 8


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("message", range(1, 13))
@driven
async def test_a_line_cut_while_a_group_is_opened(server: PostgresServer, schema: str, message: int, whole: bool) -> None:
    """At each of the messages of the transaction: before it reaches the server, or before its answer comes back."""
    async with group_owner(server, schema) as (store, proxy), successor(server, schema) as other:
        for ref in REFS[1::2]:
            await store.drop(ref)
        seen = 0

        def treat(data: bytes) -> bytes:
            nonlocal seen
            seen += 1
            if seen < message:
                return data
            proxy.treat = bytes
            if whole:
                proxy.answers = False
                return data
            asyncio.get_running_loop().call_soon(proxy.cut)
            return b""

        proxy.treat = treat
        results = await opened(store, NEXT)
        proxy.treat, proxy.answers = bytes, True
        was = [Snapshot(0, None, {}) if number % 2 else after(1) for number in range(8)]
        if not all(isinstance(result, StoreUnavailableError) for result in results):
            # The group has fewer messages than that.
            assert results == was
        # All or none: what the store has not said of them was carried out in one transaction.
        raised = [await other.apply(ref, cycle(snapshot.txn + 1), NEXT) for ref, snapshot in zip(REFS, was, strict=True)]
        assert len(set(raised)) == 1
        assert raised[0] is Outcome.DONE or not any(isinstance(result, Snapshot) for result in results)
        after_all = [after(snapshot.txn + 1) for snapshot in was] if raised[0] is Outcome.DONE else was
        # The next fence settles it, by the same store, which finds a new line by itself.
        assert await opened(store, Fence(1, 3, 1)) == after_all
        assert [await other.apply(ref, cycle(9), NEXT) for ref in REFS] == [Outcome.REFUSED] * 8


@driven
async def test_groups_on_a_hung_server_end_in_time(server: PostgresServer, schema: str) -> None:
    store = PostgresPartitionStore(server.dsn(), schema=schema, statement_timeout=1_000)
    assert await opened(store, FENCE) == [Snapshot(0, None, {})] * 8
    server.pause()
    try:
        async with asyncio.timeout(30):
            results = await opened(store, NEXT)
    finally:
        server.resume()
    assert all(isinstance(result, StoreUnavailableError) for result in results)
    assert await opened(store, Fence(1, 3, 1)) == [Snapshot(0, None, {})] * 8
    await store.close()


@driven
async def test_fences_that_a_killed_server_has_confirmed_hold(server: PostgresServer, schema: str) -> None:
    """Two owners take the same partitions from one another in groups, while the server is killed. No fence that was reported as raised is
    below one that the partition has later."""
    stores = [PostgresPartitionStore(server.dsn(), schema=schema, statement_timeout=PATIENT) for _ in range(2)]
    highest = dict.fromkeys(REFS, Fence(0, 0, 0))
    grants = itertools.count(1)
    rounds, stop = 0, False

    async def take(store: PostgresPartitionStore) -> None:
        nonlocal rounds
        while not stop:
            fence = Fence(1, next(grants), 1)
            before = dict(highest)
            for ref, result in zip(REFS, await opened(store, fence), strict=True):
                if isinstance(result, Snapshot):
                    assert fence > before[ref]
                    highest[ref] = max(highest[ref], fence)
                    rounds += 1
                else:
                    assert isinstance(result, StoreUnavailableError | FencedError)

    async with asyncio.TaskGroup() as group:
        for store in stores:
            group.create_task(take(store))
        for _ in range(3):
            goal = rounds + 80
            await eventually(lambda goal=goal: rounds >= goal)  # type: ignore[misc]
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        goal = rounds + 80
        await eventually(lambda: rounds >= goal)
        stop = True
    for ref, fence in highest.items():
        with pytest.raises(FencedError):
            await stores[0].open(ref, Fence(1, fence.grant - 1, 9))
    for store in stores:
        await store.close()
