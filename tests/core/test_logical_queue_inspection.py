"""Items that are deleted by id, produced into one partition, and partitions that are loaded again while they work."""

from __future__ import annotations

import pyarrow as pa

from sluiceway.core.queue.tickets import TakeOut, Ticket, TransferBegun
from sluiceway.model.inspection import Deleted, DeleteItems, MadeReady, RunNow
from sluiceway.model.items import TIME
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Produce
from tests.core.queue_rig import Rig, array, lease, produce, settle


def into(partition: int, count: int = 1) -> Produce:
    request = produce(count)
    request.partition = partition
    return request


def test_items_of_several_partitions_are_deleted_and_the_rest_is_told() -> None:
    rig = Rig(2)
    held = rig.take(0, 2)
    rig.fill(0, 3)
    rig.fill(1, 1)
    asked = DeleteItems({0: array([0, 2, 3, 99]), 1: array([0])}, 1_000, ["other.0.1"])
    ticket = rig.ask(asked)
    assert ticket not in rig.answers, "told before it is durable"
    rig.end_all()
    answer = rig.answers[ticket]
    assert isinstance(answer, Deleted)
    assert answer.deleted == 3
    assert sorted(answer.ignored) == [("other.0.1", "unknown"), ("q.0.0", "leased"), ("q.0.99", "unknown")]
    assert [rig.durable(number) for number in (0, 1)] == [(1, held.items, 0), (0, 0, 0)]
    again = rig.ask(asked)
    rig.end_all()
    told = rig.answers[again]
    assert isinstance(told, Deleted)
    assert (told.deleted, dict(told.ignored)["q.0.2"]) == (0, "gone")


def test_scheduled_items_are_made_ready_and_a_waiting_lease_gets_them() -> None:
    rig = Rig(2)
    held = rig.take(1, 1)
    rig.fill(0, 1)
    due = produce(2)
    due.partition, due.batch = 0, due.batch.append_column("enqueue_at", pa.array([rig.now + 60_000] * 2, TIME))
    rig.ask(due)
    rig.end_all()
    assert rig.durable(0) == (1, 0, 2)
    waiting = [rig.ask(lease(1, 30_000)) for _ in range(2)]
    rig.end_all()
    assert waiting[1] not in rig.answers
    ticket = rig.ask(RunNow({0: array([0, 2, 99]), 1: array([0])}, 1_000, ["other.0.1"]))
    assert ticket not in rig.answers, "told before it is durable"
    rig.end_all()
    answer = rig.answers[ticket]
    assert isinstance(answer, MadeReady)
    assert answer.ready == 1
    assert sorted(answer.ignored) == [("other.0.1", "unknown"), ("q.0.0", "leased"), ("q.0.99", "unknown"), ("q.1.0", "leased")]
    assert held.items == 1
    assert rig.offsets(waiting[1]) == [3], "under a new offset"
    assert rig.durable(0) == (0, 2, 1)


def test_waiting_items_are_sent_to_another_queue_and_the_rest_is_told() -> None:
    rig = Rig(1)
    rig.fill(0, 2)
    rig.take(0, 1)
    due = produce(1)
    due.batch = due.batch.append_column("enqueue_at", pa.array([rig.now + 60_000], TIME))
    rig.ask(due)
    rig.end_all()
    ticket = rig.ask(TakeOut(0, array([0, 1, 3, 9]), "orders", 1_000, scheduled=True))
    rig.end_all()
    answer = rig.answers[ticket]
    assert isinstance(answer, TransferBegun)
    assert (answer.items, list(answer.ignored)) == (2, [("q.0.0", "leased"), ("q.0.9", "unknown")])


def test_a_deletion_ends_with_its_partition() -> None:
    rig = Rig(1)
    rig.fill(0, 2)
    ticket = rig.ask(DeleteItems({0: array([0])}, 1_000))
    rig.end(0, Outcome.REFUSED)
    assert rig.code(ticket) == "unavailable"
    rig.open(0)
    assert rig.durable(0) == (2, 0, 0)


def test_a_produce_into_one_partition_goes_nowhere_else() -> None:
    rig = Rig(2)
    rig.fill(0, 5)
    first = rig.ask(into(0))
    rig.end_all()
    assert rig.produced(first).partition == 0
    failing = rig.ask(into(0))
    rig.end(0, Outcome.REFUSED)
    assert not rig.commits, "another partition took it"
    rig.open(0)
    rig.end_all()
    assert rig.produced(failing).partition == 0


def test_a_produce_into_one_partition_is_not_taken_from_it_because_it_hangs() -> None:
    rig = Rig(2)
    rig.ask(into(0))
    waiting = rig.ask(into(0))
    free = rig.ask(produce())
    rig.end(1)
    rig.wait(3_000)
    assert waiting not in rig.answers
    assert rig.produced(free).partition == 1
    rig.end_all()
    assert rig.produced(waiting).partition == 0


def reload(rig: Rig) -> None:
    rig.queue.retry_now(rig.queue.executors, rig.now, anew=True)
    rig.cycle()


def test_a_partition_is_loaded_again_with_a_higher_fence() -> None:
    rig = Rig(2)
    held = rig.take(0, 3)
    before = [executor.opening for executor in rig.queue.executors.values()]
    reload(rig)
    assert sorted(rig.opens) == [0, 1]
    assert [effect.opening for _, effect in sorted(rig.opens.items())] == [opening + 1 for opening in before]
    rig.open(0)
    rig.open(1)
    ticket = rig.ask(settle({0: [0, 1, 2]}))
    rig.end_all()
    assert rig.settled(ticket).completed == held.items


def test_what_is_in_flight_while_a_partition_is_loaded_again_is_answered_by_what_is_stored() -> None:
    def flying(landed: bool) -> tuple[Rig, Ticket]:
        rig = Rig(1)
        ticket = rig.ask(produce(2))
        reload(rig)
        if landed:
            rig.land(0)
        del rig.commits[0]
        rig.open(0)
        return rig, ticket

    rig, ticket = flying(landed=True)
    assert rig.produced(ticket).items == 2
    assert rig.durable(0) == (2, 0, 0)
    rig, ticket = flying(landed=False)
    assert ticket not in rig.answers
    rig.end_all()
    assert rig.produced(ticket).items == 2
    assert rig.durable(0) == (2, 0, 0), "written twice"


def test_a_stopped_partition_is_loaded_again_when_it_is_asked_for() -> None:
    rig = Rig(1)
    rig.fill(0, 1)
    rig.queue.stop_executor(0, "damaged", rig.now)
    rig.wait(60_000)
    assert not rig.opens
    reload(rig)
    rig.open(0)
    ticket = rig.ask(lease(1))
    rig.end_all()
    assert len(rig.grants(ticket)) == 1
