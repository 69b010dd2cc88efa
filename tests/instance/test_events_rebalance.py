"""What is told of rebalances, and of partitions that go."""

from __future__ import annotations

import msgspec

from sluiceway.instance.event_feed import Ring, Sight, Watch, tell
from sluiceway.model.access import Actor
from sluiceway.model.queue import PartitionRecord
from sluiceway.testing.drive import driven
from tests.instance.test_events import Scene, record


@driven
async def test_a_rebalance_is_told_from_its_entries_whoever_carries_it_out() -> None:
    scene = Scene()
    watch = Watch(scene)
    await watch.look()
    about = {"rebalance": "7-a"}
    for action, detail in (
        ("queue.rebalance", {"requested_partitions": 2}),
        ("rebalance.flip", {"partitions": {"count": 99}}),
        ("rebalance.drain", {"partitions": [1]}),
        ("rebalance.problem", {"problem": "i-2 does not answer"}),
        ("rebalance.finish", {"state": "done"}),
        ("rebalance.failed", {"state": "failed"}),
        ("rebalances.cancel", {}),
    ):
        await scene.audit.record(action, Actor("alice"), "q", about | detail)
    await watch.look()
    found = [(event.type, msgspec.json.decode(event.data)) for event in watch.ring.after(0) or () if event.type != "audit"]
    named = {"queue_name": "q", "rebalance": "7-a"}
    assert found == [
        ("rebalance.started", named),
        ("rebalance.step", {**named, "step": "flip", "partitions": []}),
        ("rebalance.step", {**named, "step": "drain", "partitions": [1]}),
        ("rebalance.problem", {**named, "problem": "i-2 does not answer"}),
        ("rebalance.ended", {**named, "state": "done"}),
        ("rebalance.ended", {**named, "state": "failed"}),
    ]
    await scene.audit.close()


def test_a_partition_that_is_removed_is_told_once_and_one_of_a_deleted_queue_not() -> None:
    ring = Ring()
    two = msgspec.structs.replace(record("q"), partitions=(PartitionRecord(0, state="draining"), PartitionRecord(1)))
    one = msgspec.structs.replace(two, partitions=(PartitionRecord(1),), updated_at=two.updated_at + 1)
    states = {("q", two.incarnation, 0): ("draining", False), ("q", two.incarnation, 1): ("available", False)}
    before = Sight({"q": two}, states, {})
    after = Sight({"q": one}, {("q", two.incarnation, 1): ("available", False)}, {})
    tell(ring, before, after)
    tell(ring, after, after)
    tell(ring, after, Sight({}, {}, {}))
    assert [(event.type, msgspec.json.decode(event.data)) for event in ring.after(0) or ()] == [
        ("partition.state", {"queue_name": "q", "partition": 0, "state": "removed", "degraded": False}),
        ("queue.deleted", {"queue_name": "q", "incarnation": two.incarnation}),
    ]
