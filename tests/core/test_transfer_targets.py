"""Transfers and their targets: each goes to the queue that it was meant for, and one that takes nothing holds up no other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sluiceway.cluster import transfer_sender
from sluiceway.core.partition.records import unpack_lease
from sluiceway.core.queue.logical_queue import TRANSFER_RETRY
from sluiceway.core.queue.partition_executor import TRANSFERS_AT_ONCE
from sluiceway.core.queue.tickets import TakeOut, Transfer, TransferEnd
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.changes import RecordKind
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import TRANSFER_GROUP, Disposition, Produce, ProduceKey, QueuePatch, Redrive
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.core.queue_rig import Rig, array
from tests.core.queue_rig import settle as settle_offsets
from tests.instance.instance_rig import eventually, lease, payloads, produce, rows, serving, settle, spec, total

DEAD = Disposition("dead", reason="bad")


async def die(service: Service, *names: str) -> None:
    """Items of q, each dying by itself."""
    for name in names:
        await produce(service, "q", name)
        await settle(service, "q", await lease(service, "q"), DEAD)


# ---- the queue of that name, and no later one ------------------------------------------------------------------


@driven
async def test_a_redrive_in_flight_reaches_no_later_queue_of_the_same_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("a"))
        await produce(service, "dead", "x", "y")
        await service.pause("a", ["produce"], True)
        assert (await service.redrive("dead", Redrive(100, 10, "a"))).redriven == 0
        await service.delete_queue("a", True)
        await service.create_queue(spec("a"))
        await eventually(lambda: service.stats("dead").partitions[0].ready == 2)
        assert (total(service, "a"), total(service, "dead")) == (0, 2)
        # Asked anew, they go there.
        assert (await service.redrive("dead", Redrive(10_000, 10, "a"))).redriven == 2
        assert payloads((await lease(service, "a")).batches) == ["x", "y"]


@driven
async def test_what_a_redrive_is_bound_to_outlives_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        old = await service.create_queue(spec("a"))
        await produce(service, "dead", "x")
        await service.pause("a", ["produce"], True)
        await service.redrive("dead", Redrive(100, 10, "a"))
    async with serving(tmp_path) as (service, _):
        (transfer,) = service._drivers["dead"].queue.executors[0].partition.transfers.by_number.values()
        assert transfer.target_incarnation == old.incarnation
        await service.delete_queue("a", True)
        await service.create_queue(spec("a"))
        await eventually(lambda: service.stats("dead").partitions[0].ready == 1)
        assert total(service, "a") == 0


def redriven(rig: Rig, *targets: str, incarnation: str | None = "1") -> None:
    for at, target in enumerate(targets):
        rig.ask(TakeOut(0, array([at]), target, 1_000, None, incarnation))
        rig.end(0)


def test_a_record_without_an_incarnation_is_bound_before_it_is_sent() -> None:
    rig = Rig()
    rig.fill(0, 1)
    redriven(rig, "orders")
    number = rig.transfers[0].number
    name = (RecordKind.LEASE, str(number))
    records = rig.stores[0].records
    # As it was written before: the last three fields are not there.
    fields = msgspec.msgpack.decode(records[name])
    records[name] = msgspec.msgpack.encode(fields[:-3])
    assert unpack_lease(records[name]).target_incarnation is None
    after = Rig(opened=False)
    after.stores = rig.stores
    after.open(0)
    assert [each.incarnation for each in after.transfers] == [None]
    after.queue.transferred(0, number, TransferEnd(bound="7"), after.now)
    after.cycle()
    assert len(after.transfers) == 1, "not before it is durable"
    after.end(0)
    assert [(each.number, each.incarnation) for each in after.transfers[1:]] == [(number, "7")]
    assert unpack_lease(records[name]).target_incarnation == "7"
    # And not to another one, whatever is said later.
    after.queue.transferred(0, number, TransferEnd(bound="8"), after.now)
    after.cycle()
    assert unpack_lease(records[name]).target_incarnation == "7"


def test_dead_items_are_bound_to_the_dead_queue_that_there_is() -> None:
    rig = Rig(keeps_dead=True)
    rig.configure(dead_queue="dead", dead_incarnation="7")
    rig.take(0, 3)
    kill(rig, 0, 1)
    assert [(each.target, each.incarnation, each.instead) for each in rig.transfers] == [("dead", "7", None)]
    number = rig.transfers[0].number
    # A new queue of that name: nothing is sent there before the record says so.
    rig.configure(dead_queue="dead", dead_incarnation="8")
    rig.queue.transferred(0, number, TransferEnd(), rig.now)
    rig.wait(TRANSFER_RETRY)
    assert [(each.number, each.incarnation, each.instead) for each in rig.transfers[1:]] == [(number, "7", "dead")]
    rig.queue.transferred(0, number, TransferEnd(elsewhere="dead"), rig.now)
    rig.cycle()
    assert len(rig.transfers) == 2, "not before it is durable"
    rig.end_all()
    # The second one, and then the first under a new number.
    assert shown(rig.transfers[2:]) == [(number + 1, "dead", "dead")]
    rig.queue.transferred(0, number + 1, TransferEnd(elsewhere="dead"), rig.now)
    rig.cycle()
    rig.end_all()
    assert [(each.number, each.incarnation, each.instead) for each in rig.transfers[3:]] == [(number + 2, "8", None)]
    # Those that die from now on belong there at once.
    rig.queue.transferred(0, number + 2, TransferEnd(done=True), rig.now)
    kill(rig, 2)
    after = Rig(opened=False, keeps_dead=True)
    after.stores = rig.stores
    after.configure(dead_queue="dead", dead_incarnation="8")
    after.open(0)
    assert [each.incarnation for each in after.transfers] == ["8"]


def test_dead_items_of_a_record_without_an_incarnation_go_to_the_queue_of_that_name() -> None:
    rig = Rig(keeps_dead=True)
    rig.take(0, 1)
    kill(rig, 0)
    (sent,) = rig.transfers
    assert (sent.target, sent.incarnation) == ("dead", None)
    name = (RecordKind.LEASE, str(sent.number))
    records = rig.stores[0].records
    fields = msgspec.msgpack.decode(records[name])
    records[name] = msgspec.msgpack.encode(fields[:-3])
    after = Rig(opened=False)
    after.stores = rig.stores
    after.configure(dead_queue="dead", dead_incarnation="8")
    after.open(0)
    assert [(each.target, each.incarnation, each.instead) for each in after.transfers] == [("dead", None, None)]


class Held:
    """The transfers of q, none of which is tried until they may go."""

    def __init__(self, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self._transfers = service._drivers["q"].transfers
        self._send = self._transfers._bury
        self._patch = monkeypatch
        monkeypatch.setattr(self._transfers, "_bury", self._not_now)

    async def _not_now(self, *_: object) -> TransferEnd:
        return TransferEnd()

    def go(self) -> None:
        self._patch.setattr(self._transfers, "_bury", self._send)


@driven
async def test_a_new_queue_of_a_dead_queues_name_gets_nothing_that_was_on_its_way_to_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        held = Held(service, monkeypatch)
        await die(service, "x")
        # Without a dead queue in the setting, what is on its way still goes where it was to go, as long as there is such a queue.
        await service.update_queue("q", QueuePatch({"dead_queue": None}))
        await service.delete_queue("dead", True)
        await service.create_queue(spec("dead"))
        assert (total(service, "q"), total(service, "dead")) == (1, 0)
        # Nothing is on its way to this one: it could be deleted without force.
        await service.delete_queue("dead", False)
        await service.create_queue(spec("dead"))
        held.go()
        await eventually(lambda: total(service, "q") == 0)
        assert total(service, "dead") == 0
        assert "1 dead items of queue q are dropped: their dead queue dead was deleted, and the queue has no other" in caplog.text
        assert service.stats("q").partitions[0].dead == 1


@driven
async def test_dead_items_follow_the_setting_to_a_new_queue_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, _):
        old = await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        held = Held(service, monkeypatch)
        await die(service, "x", "y")
        transfers = service._drivers["q"].queue.executors[0].partition.transfers.by_number
        assert {each.target_incarnation for each in transfers.values()} == {old.incarnation}
        await service.update_queue("q", QueuePatch({"dead_queue": None}))
        await service.delete_queue("dead", True)
        new = await service.create_queue(spec("dead"))
        await service.update_queue("q", QueuePatch({"dead_queue": "dead"}))
        await die(service, "z")
        assert {each.target_incarnation for each in transfers.values()} == {old.incarnation, new.incarnation}
        held.go()
        await eventually(lambda: total(service, "q") == 0)
        assert sorted(payloads((await lease(service, "dead")).batches)) == ["x", "y", "z"]
        assert service.stats("q").partitions[0].dead == 3


@driven
async def test_an_owner_that_has_not_heard_of_a_dead_queue_looks_before_it_drops_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its predecessor knew the queue, and the setting that names it."""
    source = QueueRecord("q", "q1", 0, 0, (), lease_timeout=1_000)
    known: dict[str, QueueRecord] = {"q": source}
    sent: list[str] = []

    class Routes:
        async def produce(self, target: QueueRecord, _: Produce) -> None:
            sent.append(target.incarnation)

    async def fresh(_: int) -> None:
        known["dead"] = QueueRecord("dead", "7", 0, 0, (), lease_timeout=1_000)
        known["q"] = msgspec.structs.replace(source, dead_queue="dead")

    monkeypatch.setattr(transfer_sender, "dead_rows", lambda *_: rows("x"))
    sender = transfer_sender.TransferSender(Routes(), known.get, fresh)  # type: ignore[arg-type]
    assert await sender.send(source, 0, Transfer(0, 1, "bad", [], "dead", incarnation="7"), []) == TransferEnd(done=True)
    assert sent == ["7"]
    # It dies for a queue that is gone, and the setting names one: it stays.
    with pytest.raises(SluicewayError, match="there is no dead queue 'dead'"):
        await sender.send(source, 0, Transfer(0, 1, "bad", [], "dead", incarnation="6"), [])


# ---- one target holds up no other ------------------------------------------------------------------------------


@driven
async def test_a_target_that_takes_nothing_holds_up_no_other(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        for name in ("dead", "a", "b"):
            await service.create_queue(spec(name))
        await service.create_queue(spec("q", dead_queue="dead"))
        await produce(service, "q", "x", "y")
        await service.pause("a", ["produce"], True)
        assert (await service.redrive("q", Redrive(100, 1, "a"))).redriven == 0
        assert (await service.redrive("q", Redrive(10_000, 1, "b"))).redriven == 1
        await die(service, "z")
        await eventually(lambda: total(service, "dead") == 1)
        assert payloads((await lease(service, "b")).batches) == ["y"]
        await service.pause("a", ["produce"], False)
        await eventually(lambda: total(service, "a") == 1)


@driven
async def test_another_dead_queue_frees_what_was_on_its_way_to_one_that_takes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        for name in ("dead", "other"):
            await service.create_queue(spec(name))
        await service.create_queue(spec("q", dead_queue="dead"))
        await service.pause("dead", ["produce"], True)
        await die(service, "x", "y", "z")
        assert total(service, "q") == 3
        await service.update_queue("q", QueuePatch({"dead_queue": "other"}))
        await eventually(lambda: total(service, "q") == 0)
        assert sorted(payloads((await lease(service, "other")).batches)) == ["x", "y", "z"]
        await service.pause("dead", ["produce"], False)
        assert total(service, "dead") == 0
        assert service.stats("q").partitions[0].dead == 3


@driven
async def test_what_a_dead_queue_has_taken_unheard_of_does_not_go_to_another_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 300)
    async with serving(tmp_path) as (service, store):
        dead = await service.create_queue(spec("dead"))
        await service.create_queue(spec("other"))
        await service.create_queue(spec("q", dead_queue="dead"))

        async def lost(ref: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN if ref.incarnation == dead.incarnation else None

        async def unheard(ref: PartitionRef) -> None:
            if ref.incarnation == dead.incarnation:
                # It is there, and while the queue takes nothing nobody hears of it.
                store.on_apply = lost

        store.on_applied = unheard
        store.on_open = unheard
        await produce(service, "q", "x")
        leased = await lease(service, "q")
        await settle(service, "q", leased, DEAD)
        await eventually(lambda: store.on_apply is lost)
        await service.pause("dead", ["produce"], True)
        await service.update_queue("q", QueuePatch({"dead_queue": "other"}))

        async def fine(_: PartitionRef) -> None:
            return None

        store.on_applied = store.on_open = store.on_apply = fine
        await eventually(lambda: total(service, "q") == 0)
        assert (total(service, "dead"), total(service, "other")) == (1, 0)
        assert service.stats("q").partitions[0].dead == 1


@driven
async def test_what_was_taken_back_is_sent_though_the_setting_was_changed_back(tmp_path: Path) -> None:
    """Its owner stopped after the old dead queue had refused it for ever, and before it had recorded where it goes instead."""
    async with serving(tmp_path) as (service, _):
        for name in ("dead", "other"):
            await service.create_queue(spec(name))
        record = await service.create_queue(spec("q", dead_queue="dead"))
        await service.pause("dead", ["produce"], True)
        await die(service, "x")
        (number,) = service._drivers["q"].queue.executors[0].partition.transfers.by_number
        group = f"{TRANSFER_GROUP}{record.incarnation}.0"
        await service.produce("dead", Produce(rows("x").slice(0, 0), 10_000, ProduceKey(f"{group}/{number}", group, number)))
        await service.pause("dead", ["produce"], False)
        await eventually(lambda: total(service, "q") == 0)
        assert payloads((await lease(service, "dead")).batches) == ["x"]


def kill(rig: Rig, *offsets: int) -> None:
    for offset in offsets:
        rig.ask(settle_offsets({0: [offset]}, DEAD))
        rig.end_all()


def shown(transfers: list[Transfer]) -> list[tuple[int, str | None, str | None]]:
    return [(each.number, each.target, each.instead) for each in transfers]


def test_only_the_first_to_a_former_dead_queue_may_be_there_and_is_taken_back() -> None:
    rig = Rig(keeps_dead=True)
    rig.take(0, 3)
    kill(rig, 0, 1, 2)
    first = rig.transfers[0].number
    rig.queue.transferred(0, first, TransferEnd(), rig.now)
    rig.configure(dead_queue="other")
    assert len(rig.transfers) == 1, "those that follow have their new target durably before they are sent"
    rig.cycle()
    rig.end_all()
    rig.wait(TRANSFER_RETRY)
    assert shown(rig.transfers[1:]) == [(first + 3, "other", None), (first, "dead", "other")]
    # Numbers rise for each target, so that it takes what comes.
    rig.queue.transferred(0, first, TransferEnd(elsewhere="other"), rig.now)
    rig.queue.transferred(0, first + 3, TransferEnd(done=True), rig.now)
    rig.cycle()
    rig.end_all()
    rig.queue.transferred(0, first + 4, TransferEnd(done=True), rig.now)
    rig.cycle()
    rig.end_all()
    assert shown(rig.transfers[3:]) == [(first + 4, "other", None), (first + 5, "other", None)]
    rig.queue.transferred(0, first + 5, TransferEnd(done=True), rig.now)
    rig.cycle()
    rig.end_all()
    stats = rig.queue.stats().partitions[0]
    assert (stats.dead, stats.transferring) == (3, 0)


def test_targets_that_do_not_answer_cannot_take_all_places() -> None:
    rig = Rig()
    count = TRANSFERS_AT_ONCE + 1
    rig.fill(0, count)
    redriven(rig, *(f"t{n}" for n in range(count)))
    assert [each.target for each in rig.transfers] == [f"t{n}" for n in range(TRANSFERS_AT_ONCE)]
    rig.queue.transferred(0, rig.transfers[0].number, TransferEnd(), rig.now)
    rig.cycle()
    assert [each.target for each in rig.transfers[TRANSFERS_AT_ONCE:]] == [f"t{count - 1}"]
