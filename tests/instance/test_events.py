"""Events: what two looks tell, what is remembered of it, and what a stream sends of that."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster.instance_view import Instances
from sluiceway.cluster.ownership import SoleOwnership
from sluiceway.contract.queue_stats import CircuitStats, LogicalQueueStats, PartitionStats, QueueStats
from sluiceway.instance.event_feed import EVENT_TYPES, Ring, Sight, Watch, counts_of, tell
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.backend_pool import BackendInfo
from sluiceway.model.access import ANYBODY, SYSTEM, Actor, Caller, Scope
from sluiceway.model.audit import AuditEntry
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import QueuePatch
from sluiceway.server.events import EventsQuery, EventStreams, Reader
from sluiceway.server.http import BodyMemory, DisconnectedError, Message, Request
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import down, eventually, produce, serving, spec

ORDERS = Caller("orders", (Scope("read", "orders-*"),))
AUDITOR = Caller("auditor", (Scope("admin"),))
EVERYTHING = frozenset([*EVENT_TYPES, "stats"])


def record(name: str, incarnation: str = "k7f3q2ma", **settings: Any) -> QueueRecord:
    return QueueRecord(name, incarnation, 0, 0, (PartitionRecord(0),), **settings)


def told(before: Sight, after: Sight) -> list[tuple[str, dict[str, Any]]]:
    ring = Ring()
    tell(ring, before, after)
    return [(event.type, msgspec.json.decode(event.data)) for event in ring.after(0) or ()]


def queues(*records: QueueRecord) -> Sight:
    return Sight({each.queue_name: each for each in records}, {}, {})


def test_queues_that_come_change_and_go() -> None:
    old, paused = record("q"), record("q", version=2, paused=("lease",))
    assert told(queues(), queues(old)) == [("queue.created", {"queue_name": "q", "incarnation": "k7f3q2ma"})]
    assert told(queues(old), queues()) == [("queue.deleted", {"queue_name": "q", "incarnation": "k7f3q2ma"})]
    assert told(queues(old), queues(old)) == []
    assert told(queues(old), queues(paused)) == [("queue.paused", {"queue_name": "q", "version": 2, "paused": ["lease"]})]
    changed = msgspec.structs.replace(old, version=3, lease_timeout=5, max_attempts=2)
    expected = {"queue_name": "q", "version": 3, "changed": ["lease_timeout", "max_attempts"]}
    assert told(queues(old), queues(changed)) == [("queue.updated", expected)]


def test_a_queue_that_was_made_anew_was_deleted_first() -> None:
    assert [kind for kind, _ in told(queues(record("q")), queues(record("q", "aaaaaaaa")))] == ["queue.deleted", "queue.created"]


def test_partitions_that_change_and_those_of_a_new_queue_that_are_not_well() -> None:
    def seen(*states: tuple[str, bool]) -> Sight:
        return Sight({}, {("q", "k7f3q2ma", number): state for number, state in enumerate(states)}, {})

    assert told(seen(), seen(("available", False))) == []
    assert told(seen(), seen(("failed", False)))[0][1]["state"] == "failed"
    assert told(seen(("available", False)), seen(("available", True))) == [
        ("partition.state", {"queue_name": "q", "partition": 0, "state": "available", "degraded": True})
    ]
    assert told(seen(("failed", False)), seen(("available", False)))[0][1]["state"] == "available"


def test_circuit_breakers_that_open_and_close() -> None:
    def seen(*names: str) -> Sight:
        return queues(record("q"), record("r"))._replace(circuits=frozenset(names))

    assert told(seen("r"), seen("q", "r")) == [("circuit.opened", {"queue_name": "q"})]
    assert told(seen("q", "r"), seen("r")) == [("circuit.closed", {"queue_name": "q"})]
    assert [kind for kind, _ in told(seen("q"), Sight({}, {}, {}))] == ["queue.deleted", "queue.deleted"], "it has not closed: it is gone"


@pytest.mark.parametrize(("states", "count"), [([None], 0), (["closed"], 0), (["open"], 1), (["open", "half_open", "closed", None], 2)])
def test_open_circuit_breakers_are_counted_over_all_instances(states: list[str | None], count: int) -> None:
    shares = [LogicalQueueStats(circuit=None if state is None else CircuitStats(state=state)) for state in states]
    assert counts_of(QueueStats(queue_name="q", logical_queues=shares))["circuits_open"] == count


def test_instances_where_consumers_wait_for_a_limit_are_counted() -> None:
    shares = [LogicalQueueStats(limited_by=each) for each in ("rate", None, "rate")]
    assert counts_of(QueueStats(queue_name="q", logical_queues=shares))["limited_by_rate"] == 2


def test_backends_that_go_down_and_come_up() -> None:
    up, gone = Sight({}, {}, {"shared": None}), Sight({}, {}, {"shared": "it does not answer"})
    assert told(up, gone) == [("backend.down", {"backend": "shared", "problem": "it does not answer"})]
    assert told(gone, up) == [("backend.up", {"backend": "shared"})]
    assert told(gone, Sight({}, {}, {"shared": "in other words"})) == []


@given(st.integers(1, 20), st.integers(0, 60), st.integers(-5, 70))
def test_a_ring_gives_all_that_came_after_or_says_that_it_cannot(most: int, added: int, number: int) -> None:
    ring = Ring(most)
    for _ in range(added):
        ring.add("audit")
    found = ring.after(number)
    if max(0, added - most) <= number <= added:
        assert found is not None
        assert [event.number for event in found] == list(range(number + 1, added + 1))
    else:
        assert found is None


def test_counts_are_those_of_all_partitions() -> None:
    counts = counts_of(
        LogicalQueueStats(
            produce_waiting=1,
            lease_waiting=2,
            complete_waiting=3,
            in_flight=4,
            partitions=[
                PartitionStats(partition=0, total=11, ready=5, total_leased=6),
                PartitionStats(partition=1, total=7, ready=7, produced=8),
            ],
        )
    )
    assert (counts["ready"], counts["total_leased"], counts["total"], counts["produced"]) == (12, 6, 18, 8)
    assert (counts["produce_waiting"], counts["in_flight"]) == (1, 4)


class Scene:
    """What a watch looks at."""

    def __init__(self) -> None:
        self.audit = AuditTrail(MemoryMetaStore())
        self.records: list[QueueRecord] = []
        self.ready: dict[str, int] = {}
        self.elsewhere: dict[str, PartitionStats | Exception] = {}
        """What another instance says of the queue's only partition."""
        self.asked: list[str] = []
        self.instances = Instances(SoleOwnership(), self.queues)

    def queues(self) -> list[QueueRecord]:
        return self.records

    def stats(self, queue_name: str) -> LogicalQueueStats:
        if queue_name not in self.ready:
            raise SluicewayError("queue_not_found", "gone")
        if queue_name in self.elsewhere:
            return LogicalQueueStats(partitions=[])
        return LogicalQueueStats(partitions=[PartitionStats(partition=0, ready=self.ready[queue_name])])

    async def count(self, queue_name: str) -> QueueStats:
        self.asked.append(queue_name)
        said = self.elsewhere[queue_name]
        if isinstance(said, Exception):
            raise said
        return QueueStats(queue_name=queue_name, logical_queues=[LogicalQueueStats(partitions=[said])])

    def backends(self) -> list[BackendInfo]:
        return []


def events_in(parts: list[bytes]) -> list[tuple[str, str, dict[str, Any]]]:
    """Id, type and data of each."""
    found = []
    for block in b"".join(parts).decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in fields:
            found.append((fields.get("id", ""), fields["event"], msgspec.json.decode(fields["data"])))
    return found


def read(reader: Reader, caller: Caller = ANYBODY) -> list[tuple[str, str, dict[str, Any]]]:
    return events_in(list(reader.parts(caller)))


@driven
async def test_a_reader_sees_what_its_key_may_see_and_nothing_else() -> None:
    watch = Watch(Scene())
    readers = {caller: Reader(watch, EVERYTHING, None, b"") for caller in (ANYBODY, ORDERS, AUDITOR)}
    watch.counts = {"orders-1": {"ready": 1}, "secret": {"ready": 2}}
    watch.ring.add("queue.created", "orders-1")
    watch.ring.add("queue.created", "secret")
    watch.ring.add("audit", "orders-1", id="a")
    watch.ring.add("backend.down", backend="shared", problem="p")
    seen = {caller.name: [(kind, data.get("queue_name")) for _, kind, data in read(reader, caller)] for caller, reader in readers.items()}
    assert seen["orders"] == [("queue.created", "orders-1"), ("stats", "orders-1")]
    assert seen["auditor"] == [("audit", "orders-1"), ("backend.down", None)]
    assert len(seen["anybody"]) == 6


@driven
async def test_a_reader_may_ask_for_one_queue_and_for_some_types() -> None:
    watch = Watch(Scene())
    one = Reader(watch, EVERYTHING, "b", b"")
    some = Reader(watch, frozenset(["queue.deleted"]), None, b"")
    watch.counts = {"a": {"ready": 1}, "b": {"ready": 2}}
    for name in ("a", "b"):
        watch.ring.add("queue.created", name)
        watch.ring.add("queue.deleted", name)
    watch.ring.add("config.reloaded", changed=[])
    assert [(kind, data["queue_name"]) for _, kind, data in read(one)] == [("queue.created", "b"), ("queue.deleted", "b"), ("stats", "b")]
    assert [(kind, data["queue_name"]) for _, kind, data in read(some)] == [("queue.deleted", "a"), ("queue.deleted", "b")]


@driven
async def test_a_reader_that_comes_back_goes_on_where_it_was() -> None:
    watch = Watch(Scene())
    reader = Reader(watch, EVERYTHING, None, b"")
    assert reader.place() == f"id: {watch.process}-0\n\n".encode()
    for _ in range(5):
        watch.ring.add("audit", id="a")
    first = read(reader)
    assert [each for each, _, _ in first] == [f"{watch.process}-{number}" for number in range(1, 6)]
    assert read(reader) == []
    assert read(Reader(watch, EVERYTHING, None, first[2][0].encode())) == first[3:]
    assert read(Reader(watch, EVERYTHING, None, b"")) == []


@driven
@pytest.mark.parametrize(
    "resume", ["other---1", "{process}-99", "{process}--1", "{process}-x", "{process}-", "x", "é", "{process}-" + "9" * 30]
)
async def test_a_reader_that_has_missed_something_is_told_so_once(resume: str) -> None:
    watch = Watch(Scene())
    watch.ring.add("audit", id="a")
    reader = Reader(watch, EVERYTHING, None, resume.format(process=watch.process).encode("latin-1"))
    assert [(each, kind) for each, kind, _ in read(reader)] == [(f"{watch.process}-1", "reset")]
    watch.ring.add("audit", id="b")
    assert [kind for _, kind, _ in read(reader)] == ["audit"]


@driven
async def test_a_reader_that_is_too_slow_for_the_ring_is_told_so() -> None:
    watch = Watch(Scene())
    watch.ring = Ring(3)
    reader = Reader(watch, EVERYTHING, None, b"")
    for _ in range(4):
        watch.ring.add("audit", id="a")
    assert [kind for _, kind, _ in read(reader)] == ["reset"]


@driven
async def test_counts_come_whole_first_and_then_only_what_changed() -> None:
    watch = Watch(Scene())
    reader = Reader(watch, frozenset(["stats"]), None, b"")
    watch.counts = {"q": {"ready": 1, "leased": 2}}
    assert [data for _, _, data in read(reader)] == [{"queue_name": "q", "ready": 1, "leased": 2}]
    assert read(reader) == []
    watch.counts = {"q": {"ready": 3, "leased": 2}}
    assert [data for _, _, data in read(reader)] == [{"queue_name": "q", "ready": 3}]
    watch.counts = {}
    assert read(reader) == []
    watch.counts = {"q": {"ready": 3, "leased": 2}}
    assert [data for _, _, data in read(reader)] == [{"queue_name": "q", "ready": 3, "leased": 2}]


@driven
async def test_a_queue_that_was_made_anew_has_all_of_its_counts_sent() -> None:
    scene = Scene()
    scene.records, scene.ready = [record("q")], {"q": 0}
    watch = Watch(scene)
    await watch.look()
    reader = Reader(watch, frozenset(["stats", "queue.deleted"]), None, b"")
    ((_, _, whole),) = read(reader)
    scene.records = [record("q", "anew")]
    await watch.look()
    assert [(kind, data == whole) for _, kind, data in read(reader)] == [("queue.deleted", False), ("stats", True)]
    watch.ring = Ring(1)
    watch.ring.last = 99
    assert [(kind, data == whole) for _, kind, data in read(reader)] == [("reset", False), ("stats", True)]


@driven
async def test_what_is_sent_at_a_time_is_bounded() -> None:
    watch = Watch(Scene())
    reader = Reader(watch, EVERYTHING, None, b"")
    for _ in range(5_000):
        watch.ring.add("audit", id="x" * 100)
    parts = list(reader.parts(ANYBODY))
    assert max(map(len, parts)) < 80_000
    assert len(events_in(parts)) == 5_000


@driven
async def test_looks_tell_what_happened_between_them_and_the_first_tells_nothing() -> None:
    scene = Scene()
    watch = Watch(scene)
    scene.records, scene.ready = [record("q")], {"q": 1}
    await scene.audit.record("queues.create", SYSTEM, "q")
    await watch.look()
    assert watch.ring.last == 0
    assert watch.counts["q"]["ready"] == 1
    same = watch.counts["q"]
    await watch.look()
    assert watch.counts["q"] is same
    scene.records, scene.ready = [record("q", version=2, paused=("produce",))], {"q": 2}
    await scene.audit.record("queue.pause", SYSTEM, "q")
    await scene.audit.record("config.reload", SYSTEM, detail={"changed": ["log.level"]})
    await watch.look()
    await watch.look()
    found = [(event.type, msgspec.json.decode(event.data)) for event in watch.ring.after(0) or ()]
    assert [kind for kind, _ in found] == ["queue.paused", "audit", "audit", "config.reloaded"]
    assert found[3][1] == {"changed": ["log.level"]}
    assert found[1][1].keys() == {"queue_name", "id"}
    assert watch.counts["q"]["ready"] == 2
    await scene.audit.close()


@driven
async def test_a_queue_that_goes_while_it_is_looked_at_is_passed_over() -> None:
    scene = Scene()
    scene.records = [record("q")]
    watch = Watch(scene)
    await watch.look()
    assert watch.counts == {}


@driven
async def test_nobody_looks_while_nobody_reads() -> None:
    scene = Scene()
    watch = Watch(scene)
    looks = 0
    see = watch.look

    async def counted() -> None:
        nonlocal looks
        looks += 1
        await see()

    watch.look = counted  # type: ignore[method-assign]
    async with watch.reading(), watch.reading():
        await watch.looked()
        assert looks == 1
    assert watch._task is None
    async with watch.reading():
        await watch.looked()
    assert looks == 2
    await scene.audit.close()


@driven
async def test_a_failed_partition_and_its_return_are_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        watch = Watch(service)
        await watch.look()
        store.on_open, fine = down, store.on_open

        async def unknown(_: object) -> Any:
            raise OSError("cut off")

        store.on_apply, works = unknown, store.on_apply
        with pytest.raises(SluicewayError):
            await produce(service, "q", "a", timeout=50)
        await watch.look()
        store.on_open, store.on_apply = fine, works
        await eventually(lambda: service.stats("q").partitions[0].state == "available")
        await watch.look()
        states = [msgspec.json.decode(event.data)["state"] for event in watch.ring.after(0) or () if event.type == "partition.state"]
        assert states[0] != "available"
        assert states[-1] == "available"


@driven
async def test_a_change_by_a_caller_is_told_with_the_id_of_its_entry(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        watch = Watch(service)
        await watch.look()
        await service.update_queue("q", QueuePatch({"reference": "r"}), Actor("alice"))
        await watch.look()
        newest: AuditEntry = (await service.audit.list(1))[0]
        found = {event.type: msgspec.json.decode(event.data) for event in watch.ring.after(0) or ()}
        assert found["audit"] == {"queue_name": "q", "id": newest.id}
        assert found["queue.updated"]["changed"] == ["reference"]


# ---- the stream itself ----------------------------------------------------------------------------------------


class Exchange:
    """One request, and what is sent to it."""

    def __init__(self, query: str = "", **headers: str) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.stuck = asyncio.Event()
        self.stuck.set()
        """Cleared: the reader does not read."""
        scope = {
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
            "query_string": query.encode(),
        }
        self.request = Request(scope, self._receive, BodyMemory())
        self.request.request_id, self.request.action = b"r-1", "read"

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.stuck.wait()
        self.sent.append(message)

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind, _ in events_in([message["body"] for message in self.sent[1:]])]


async def stay(request: Request) -> Caller:
    return request.caller


@driven
async def test_a_stream_ends_when_its_reader_goes() -> None:
    streams, exchange = EventStreams(Watch(Scene()), stay), Exchange()
    stream = asyncio.create_task(streams.stream(exchange.request, exchange.send))
    await eventually(lambda: len(exchange.sent) >= 2)
    assert exchange.sent[0]["status"] == 200
    exchange.gone.set()
    await stream


@driven
async def test_a_stream_ends_whole_when_the_server_stops_and_no_other_begins() -> None:
    streams, exchange = EventStreams(Watch(Scene()), stay), Exchange()
    stream = asyncio.create_task(streams.stream(exchange.request, exchange.send))
    await eventually(lambda: len(exchange.sent) >= 2)
    streams.stop()
    await stream
    assert exchange.sent[-1]["more_body"] is False
    with pytest.raises(SluicewayError, match="stopping"):
        await streams.stream(Exchange().request, exchange.send)


@driven
async def test_a_stream_ends_when_its_caller_is_not_let_in_any_more() -> None:
    revoked = asyncio.Event()

    async def recheck(request: Request) -> Caller:
        if revoked.is_set():
            raise SluicewayError("unauthenticated", "revoked")
        return request.caller

    scene = Scene()
    watch, exchange = Watch(scene), Exchange()
    stream = asyncio.create_task(EventStreams(watch, recheck).stream(exchange.request, exchange.send))
    await eventually(lambda: len(exchange.sent) >= 2)
    revoked.set()
    watch.ring.add("audit", id="secret")
    await stream
    assert exchange.kinds == []
    assert exchange.sent[-1]["more_body"] is False


@driven
async def test_a_reader_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.events.STREAM_SEND_TIMEOUT", 50)
    watch, exchange = Watch(Scene()), Exchange()
    streams = EventStreams(watch, stay)
    stream = asyncio.create_task(streams.stream(exchange.request, exchange.send))
    await eventually(lambda: len(exchange.sent) >= 2)
    exchange.stuck.clear()
    watch.ring.add("audit", id="a")
    with pytest.raises(DisconnectedError):
        await stream


@driven
async def test_readers_are_bounded_and_one_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.events.MAX_STREAMS", 1)
    streams, exchange = EventStreams(Watch(Scene()), stay), Exchange()
    stream = asyncio.create_task(streams.stream(exchange.request, exchange.send))
    await eventually(lambda: len(exchange.sent) >= 2)
    with pytest.raises(SluicewayError) as raised:
        await streams.stream(Exchange().request, exchange.send)
    assert raised.value.code == "too_many_requests"
    exchange.gone.set()
    await stream
    exchange = Exchange()
    exchange.gone.set()
    await streams.stream(exchange.request, exchange.send)
    assert exchange.sent[0]["status"] == 200


@driven
async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.events.HEARTBEAT", 0.0)
    exchange = Exchange("types=audit")
    stream = asyncio.create_task(EventStreams(Watch(Scene()), stay).stream(exchange.request, exchange.send))
    await eventually(lambda: any(message.get("body") == b":\n\n" for message in exchange.sent))
    exchange.gone.set()
    await stream


@driven
async def test_a_reader_resumes_by_its_header() -> None:
    watch = Watch(Scene())
    watch.ring.add("audit", id="a")
    watch.ring.add("audit", id="b")
    exchange = Exchange(last_event_id=f"{watch.process}-1")
    stream = asyncio.create_task(EventStreams(watch, stay).stream(exchange.request, exchange.send))
    await eventually(lambda: exchange.kinds == ["audit"])
    exchange.gone.set()
    await stream


@pytest.mark.parametrize(
    ("query", "caller", "code"),
    [
        ("types=audit,nothing", ANYBODY, "invalid_request"),
        ("types=", ANYBODY, "invalid_request"),
        ("queue_name=no/name", ANYBODY, "invalid_request"),
        ("other=1", ANYBODY, "invalid_request"),
        ("queue_name=secret", ORDERS, "forbidden"),
        ("queue_name=orders-1", AUDITOR, "forbidden"),
        ("", Caller("producer", (Scope("produce"),)), "forbidden"),
    ],
)
@driven
async def test_what_is_asked_for_wrongly_or_without_the_right_is_refused(query: str, caller: Caller, code: str) -> None:
    exchange = Exchange(query)
    exchange.request.caller = caller
    with pytest.raises(SluicewayError) as raised:
        await EventStreams(Watch(Scene()), stay).stream(exchange.request, exchange.send)
    assert (raised.value.code, exchange.sent) == (code, [])


def test_all_types_are_wanted_unless_some_are_named() -> None:
    assert EventsQuery().wanted() == EVERYTHING
    assert EventsQuery(types="stats,audit").wanted() == {"stats", "audit"}
