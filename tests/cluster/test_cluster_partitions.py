"""Partitions that come and go, while several instances serve their queue, some of which have not heard of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sluiceway.cluster import meta_watch, router, transfer_sender
from sluiceway.core.partition.key_slots import home_of
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.inspection import DeleteItems
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import Ask, PeerRequest
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import DONE, MOVE_GROUP, Lease, Produce, ProduceKey, Selection, Settle
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import MORTAL, Cluster, Gate, cluster, counts, put, shares
from tests.core.partitions_rig import add, change, drain, hand_over_keys, move, remove, set_slots, set_state, shut
from tests.instance.instance_rig import PATIENCE, eventually, fine, lease, payloads, produce, rows, settle, spec


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not follow is not waited for."""
    monkeypatch.setattr(meta_watch, "LEARN_TIMEOUT", 100)
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 2_000)


def deafen(made: Cluster, name: str) -> Gate:
    """That instance does not hear of changes of queues, until the gate is opened. Of what it owns it does."""
    gate = Gate(only=lambda keys: QUEUE in keys)
    made.metas[name].on_read = gate
    return gate


def is_move(request: PeerRequest) -> bool:
    asked = request.request if isinstance(request, Ask) else None
    key = asked.key if isinstance(asked, Produce) else None
    return key is not None and key.group is not None and key.group.startswith(MOVE_GROUP)


async def refused(work: Any) -> SluicewayError:
    with pytest.raises(SluicewayError) as raised:
        await work
    return raised.value


def of(number: int, *offsets: int) -> dict[int, list[Selection]]:
    return {number: [Selection(DONE, offsets=np.array(offsets, np.int64))]}


# ---- they come and go -----------------------------------------------------------------------------------------


@driven
async def test_new_partitions_are_served_and_removed_ones_forgotten_by_all(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        new = await add(a, "q", 4)
        await eventually(lambda: sorted(shares(a, "q") + shares(b, "q")) == list(range(6)))
        assert {len(shares(a, "q")), len(shares(b, "q"))} == {3}
        for number in new:
            for each in (a, b):
                assert (await put(each, "q", number, "x")).partition == number
        for number in (0, 1):
            await shut(a, "q", number, "read_only")
        await set_slots(a, "q", lambda _: 5)
        for number in (0, 1):
            await remove(b, "q", number)
        assert sorted(shares(a, "q") + shares(b, "q")) == new
        assert counts(await a.count("q")) == counts(await b.count("q")) == dict.fromkeys(new, (2, 0))
        # Also by who comes later.
        c = await made.start("c")
        await eventually(lambda: sorted(shares(a, "q") + shares(b, "q") + shares(c, "q")) == new)
        assert len(payloads((await lease(c, "q", 100, most=6)).batches)) + sum(r for r, _ in counts(await a.count("q")).values()) == 8


@pytest.mark.parametrize("first", ["record", "ownership"])
@driven
async def test_an_instance_may_be_given_a_partition_before_it_knows_of_it_and_after(tmp_path: Path, first: str) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 1))
        owner = made.owner("q", 0)
        other = b if owner is a else a
        name = made.name(other)
        gate = deafen(made, name) if first == "ownership" else Gate(only=lambda keys: QUEUE not in keys)
        made.metas[name].on_read = gate
        assert await add(owner, "q", 1) == [1]
        await gate.reached.wait()
        known = [each.partition for each in other.queue("q").partitions]
        assert known == ([0] if first == "ownership" else [0, 1])
        assert shares(other, "q") == []
        gate.open()
        made.metas[name].heal()
        await eventually(lambda: shares(other, "q") == [1])
        assert (await put(owner, "q", 1, "x")).partition == 1


@driven
async def test_a_queue_that_changes_under_load_on_three_instances_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """No call fails, and each item is completed once."""
    async with cluster(tmp_path, "a", "b", "c") as (_, services):
        a = services[0]
        await a.create_queue(spec("q", 3))
        done: Counter[str] = Counter()
        sent: list[str] = []
        over = False

        async def feed(service: Service, name: str) -> None:
            n = 0
            while not over:
                texts = [f"{name}-{n}-{at}" for at in range(3)]
                key = ProduceKey(f"{name}-{n}") if n % 2 else None
                await produce(service, "q", *texts, key=key, timeout=60_000)
                if key is not None and n % 3 == 0:
                    assert (await produce(services[n % 2], "q", *texts, key=key, timeout=60_000)).deduplicated
                sent.extend(texts)
                n += 1

        async def work(service: Service) -> None:
            while not over or sum(done.values()) < len(sent):
                leased = await lease(service, "q", 7, 50, most=2)
                assert not (await settle(service, "q", leased)).ignored
                done.update(payloads(leased.batches))

        feeding = [asyncio.create_task(feed(service, f"{n}")) for n, service in enumerate(services)]
        working = [asyncio.create_task(work(service)) for service in services]
        await eventually(lambda: len(sent) > 60)
        assert await add(a, "q", 3) == [3, 4, 5]
        for number in (0, 1, 2):
            await drain(a, "q", number, number + 3)
            await hand_over_keys(a, "q", number, number + 3, 100 + number)
            async with asyncio.timeout(PATIENCE):
                while (await shut(a, "q", number, "sealed")).shutting != "sealed":
                    assert not over
            await remove(a, "q", number)
        now = len(sent)
        await eventually(lambda: len(sent) > now + 60)
        over = True
        await asyncio.gather(*feeding, *working)
        assert done == Counter(sent)
        assert sorted(counts(await a.count("q"))) == [3, 4, 5]


# ---- who has not heard of it ----------------------------------------------------------------------------------


@driven
async def test_who_has_not_heard_that_its_partition_is_shut_takes_nothing_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        (own,) = shares(b, "q")
        gate = deafen(made, "b")
        await set_state(a, "q", [own], "draining")
        assert (await shut(a, "q", own, "read_only")).shutting == "read_only"
        assert b.queue("q").partitions[own].state == "available"
        assert {(await produce(b, "q", "x")).partition for _ in range(3)} == {1 - own}
        assert (await refused(b.produce("q", Produce(rows("x"), 50, partition=own)))).code == "unavailable"
        gate.open()
        assert counts(await a.count("q"))[own] == (0, 0)


@driven
async def test_who_has_not_heard_of_a_keys_new_home_learns_it_before_it_takes_the_key(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        (own,) = shares(b, "q")
        key = next(key for key in (ProduceKey(f"{n}") for n in range(99)) if home_of(b.queue("q"), key) == own)
        fresh = next(key for key in (ProduceKey(f"{n}") for n in range(99, 199)) if home_of(b.queue("q"), key) == own)
        first = await produce(b, "q", "x", key=key)
        gate = deafen(made, "b")
        await hand_over_keys(a, "q", own, 1 - own)
        assert home_of(b.queue("q"), key) == own
        waiting = [asyncio.create_task(produce(b, "q", "x", key=key)), asyncio.create_task(produce(b, "q", "y", key=fresh))]
        assert (await refused(produce(b, "q", "x", key=key, timeout=100))).code == "unavailable"
        assert not any(each.done() for each in waiting)
        gate.open()
        again, new = await asyncio.gather(*waiting)
        assert (again[:3], again.deduplicated) == (first[:3], True)
        assert (new.partition, new.deduplicated) == (1 - own, False)
        assert await produce(a, "q", "x", key=key) == again
        assert sum(ready for ready, _ in counts(await a.count("q")).values()) == 2


@driven
async def test_who_was_not_told_looks_when_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key's new home, a new partition, and one that was removed: at the call that needs it, though nothing is ever heard of them."""
    monkeypatch.setattr(meta_watch, "LOOK_AGAIN", 3_600_000)
    monkeypatch.setattr(router, "OLD", 0)
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        record = await a.create_queue(spec("q", 2))
        (own,) = shares(b, "q")
        key = next(key for key in (ProduceKey(f"{n}") for n in range(99)) if home_of(b.queue("q"), key) == own)

        async def deaf(keys: Sequence[str]) -> None:
            if QUEUE in keys:
                raise StoreUnavailableError("it cannot be read")

        made.metas["b"].on_read = deaf
        await hand_over_keys(a, "q", own, 1 - own)
        made.metas["b"].heal()
        assert b.queue("q").slots == ()
        assert (await produce(b, "q", "x", key=key)).partition == 1 - own
        made.metas["b"].on_read = deaf
        await shut(a, "q", own, "read_only")
        await remove(a, "q", own)
        made.metas["b"].heal()
        assert b.queue("q").partition(own) is not None
        assert (await b.settle("q", Settle(of(own, 0), 10_000))).ignored == [(f"{record.incarnation}.{own}.0", "settled")]


@driven
async def test_keys_on_their_way_hold_up_their_calls_at_all_instances(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, (a, b)):
        await a.create_queue(spec("q", 2))
        keys = [ProduceKey(f"{n}") for n in range(10)]
        first = [await produce((a, b)[n % 2], "q", key.key, key=key) for n, key in enumerate(keys)]
        await set_slots(a, "q", lambda _: MOVING)
        waiting = [asyncio.create_task(produce(each, "q", key.key, key=key)) for key in keys for each in (a, b)]
        assert (await refused(produce(b, "q", "x", key=ProduceKey("x"), timeout=20))).code == "unavailable"
        assert not any(each.done() for each in waiting)
        # As if nothing had happened: the former homes stay it.
        await change(b, "q", _without_slots)
        again = await asyncio.gather(*waiting)
        assert [each[:3] for each in again] == [each[:3] for each in first for _ in (a, b)]


def _without_slots(record: QueueRecord) -> QueueRecord:
    return msgspec.structs.replace(record, slots=())


@driven
async def test_ids_of_a_new_partition_are_not_unknown_to_who_has_not_heard_of_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 1))
        gate = deafen(made, "b")
        (new,) = await add(a, "q", 1)
        await eventually(lambda: clustered_owner(a, new))
        if new not in shares(a, "q"):
            # It was given to who knows nothing of it, and so serves it later.
            gate.open()
            await eventually(lambda: new in shares(b, "q"))
            gate = deafen(made, "b")
            (new,) = await add(a, "q", 1)
            await eventually(lambda: new in shares(a, "q"))
        await put(a, "q", new, "x", "y")
        leased = await lease(a, "q")
        assert leased.leases[0].partition == new
        assert b.queue("q").partition(new) is None
        assert (await refused(b.settle("q", Settle(of(new, 0), 100)))).code == "unavailable"
        completing = asyncio.create_task(b.settle("q", Settle(of(new, 0, 1), 10_000)))
        explaining = asyncio.create_task(b.explain("q", new, 0))
        unknown = asyncio.create_task(b.settle("q", Settle(of(99, 0), 10_000)))
        await asyncio.sleep(0)
        gate.open()
        assert (await explaining).state in ("leased", "gone")
        settled = await completing
        assert (settled.completed, settled.ignored) == (2, [])
        assert [reason for _, reason in (await unknown).ignored] == ["unknown"]


def clustered_owner(service: Service, number: int) -> bool:
    return service.ownership.owner(service.queue("q").incarnation, number) is not None


@driven
async def test_ids_of_a_removed_partition_are_settled_also_to_who_has_not_heard_of_that(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        record = await a.create_queue(spec("q", 2))
        await set_slots(a, "q", lambda _: 0)
        await shut(a, "q", 1, "read_only")
        gate = deafen(made, "b")
        await remove(a, "q", 1)
        late = asyncio.create_task(b.settle("q", Settle(of(1, 0), 10_000)))
        await asyncio.sleep(0)
        assert (await a.settle("q", Settle(of(1, 0), 100))).ignored == [(f"{record.incarnation}.1.0", "settled")]
        gate.open()
        assert (await late).ignored == [(f"{record.incarnation}.1.0", "settled")]
        for each in (a, b):
            deleted = await each.delete_items("q", DeleteItems({1: np.array([3], np.int64)}, 100))
            assert deleted.ignored == [(f"{record.incarnation}.1.3", "gone")]
            assert (await each.explain("q", 1, 0)).state == "gone"
        assert not made.wires.requests(Settle)


@driven
async def test_what_waits_in_a_partition_that_is_removed_is_settled(tmp_path: Path) -> None:
    """At another instance, too, which has not heard of it when it asks."""
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        record = await a.create_queue(spec("q", 2))
        (own,) = shares(b, "q")
        await set_slots(a, "q", lambda _: 1 - own)
        await shut(a, "q", own, "read_only")
        release = Gate()
        made.stores["b"].on_apply = release
        # A commit is under way in which nothing is at stake.
        shutting = asyncio.create_task(shut(a, "q", own, "sealed", 20))
        await release.reached.wait()
        late = asyncio.create_task(a.settle("q", Settle({own: [Selection(DONE, lease=7)]}, 10_000)))
        await eventually(lambda: b.stats("q").complete_waiting == 1)
        driver = b._drivers["q"]
        kept = tuple(each for each in record.partitions if each.partition != own)
        driver.configure(msgspec.structs.replace(driver.record, partitions=kept, next_partition=2))
        deaf = deafen(made, "a")
        shutting.cancel()
        looking = asyncio.create_task(deaf.reached.wait())
        await asyncio.wait((late, looking), return_when=asyncio.FIRST_COMPLETED)
        assert not late.done()
        # Now it is so for all.
        release.open()
        await change(b, "q", lambda record: msgspec.structs.replace(record, partitions=kept, next_partition=2), told=False)
        deaf.open()
        assert (await late).ignored == [(f"{record.incarnation}.{own}.L7", "settled")]


@driven
async def test_who_still_counts_a_removed_partition_is_not_believed(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 4))
        own, other = shares(b, "q")
        await set_slots(a, "q", lambda _: other)
        await shut(a, "q", own, "read_only")
        deaf = deafen(made, "b")
        held = Gate(only=lambda keys: QUEUE not in keys)
        made.metas["b"].on_read = lambda keys: deaf(keys) if QUEUE in keys else held(keys)
        await remove(a, "q", own)
        assert shares(b, "q") == [own, other]
        assert sorted(counts(await a.count("q"))) == sorted({0, 1, 2, 3} - {own})
        deaf.open()
        held.open()


@driven
async def test_nonsense_does_not_keep_the_meta_store_busy(tmp_path: Path) -> None:
    """Ids of partitions that never were must be looked up; calls that come together share a look."""
    async with cluster(tmp_path, "a", "b") as (made, (a, _)):
        await a.create_queue(spec("q", 2))
        looks = 0

        async def count(keys: Sequence[str]) -> None:
            nonlocal looks
            looks += QUEUE in keys

        made.metas["a"].on_read = count
        many = await asyncio.gather(*(a.settle("q", Settle(of(7, n), 10_000)) for n in range(200)))
        assert all(each.ignored[0][1] == "unknown" for each in many)
        assert looks <= 3


# ---- leases with a key ----------------------------------------------------------------------------------------


@driven
async def test_two_instances_do_not_both_take_themselves_for_the_home_of_a_leases_key(tmp_path: Path) -> None:
    """Else a repetition of a call would get other items, and those of the first would lie until their lease runs out."""
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        (own,) = shares(b, "q")
        names = (f"{n}" for n in range(99))
        name = next(name for name in names if home_of(b.queue("q"), ProduceKey(f"c\n{name}")) == own)
        gate = deafen(made, "b")
        await hand_over_keys(a, "q", own, 1 - own)
        await put(a, "q", 1 - own, "1")
        await put(a, "q", own, "2")
        first = await a.lease("q", Lease("c", 1, 0, 60_000, lease_key=name))
        repeated = asyncio.create_task(b.lease("q", Lease("c", 1, 10_000, 60_000, lease_key=name)))
        assert (await refused(b.lease("q", Lease("c", 1, 50, 60_000, lease_key=name)))).code == "unavailable"
        gate.open()
        assert (await repeated).leases == first.leases
        assert payloads((await repeated).batches) == payloads(first.batches)


@driven
async def test_a_leases_key_is_found_again_in_a_partition_that_its_home_had_not_heard_of(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        (own,) = shares(a, "q")
        name = next(name for name in (f"{n}" for n in range(99)) if home_of(a.queue("q"), ProduceKey(f"c\n{name}")) == own)
        deaf = deafen(made, "a")
        new = (await add(b, "q", 4))[-4:]
        await eventually(lambda: len(shares(b, "q")) == 3)
        theirs = next(number for number in new if number in shares(b, "q"))
        await put(b, "q", theirs, "x", "y")
        first = asyncio.create_task(a.lease("q", Lease("c", 1, 10_000, 60_000, lease_key=name)))
        await deaf.reached.wait()
        await eventually(lambda: counts(b.stats("q"))[theirs] == (1, 1))
        # Its answer is not given before a repetition would find it.
        await asyncio.sleep(0)
        assert not first.done()
        deaf.open()
        found = await first
        assert found.leases[0].partition == theirs
        assert (await a.lease("q", Lease("c", 1, 10_000, 60_000, lease_key=name))).leases == found.leases


# ---- moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["none", "unreachable", "answer lost", "refused"])
@driven
async def test_a_move_to_another_instance_brings_each_item_once(tmp_path: Path, trouble: str) -> None:
    async with cluster(tmp_path, "a", "b") as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        (source,), (target,) = shares(a, "q"), shares(b, "q")
        await put(a, "q", source, *"abc")
        await shut(b, "q", source, "read_only")
        tries = 0

        async def before(_: str, request: PeerRequest) -> None:
            nonlocal tries
            tries += is_move(request)
            if is_move(request) and tries < 3 and trouble == "unreachable":
                raise PeerRefusedError("cut off")

        async def after(_: str, request: PeerRequest) -> None:
            if is_move(request) and tries < 3 and trouble == "answer lost":
                raise PeerUnknownError("lost")

        async def refuse(ref: PartitionRef) -> Outcome | None:
            nonlocal tries
            tries += ref.partition == target
            return Outcome.REFUSED if ref.partition == target and tries < 3 and trouble == "refused" else None

        made.wires.on_ask, made.wires.on_answer, made.stores["b"].on_apply = before, after, refuse
        assert await move(a, "q", source, target, timeout=60_000) == (3, 3)
        assert tries >= (3 if trouble != "none" else 1)
        assert counts(await a.count("q")) == {source: (0, 0), target: (3, 0)}
        assert payloads((await lease(a, "q")).batches) == ["a", "b", "c"]


@pytest.mark.parametrize("lands", [True, False])
@driven
async def test_a_move_whose_targets_owner_dies_brings_each_item_once(tmp_path: Path, lands: bool) -> None:
    async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (made, (a, b)):
        await a.create_queue(spec("q", 2))
        await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 1)
        (source,), (target,) = shares(a, "q"), shares(b, "q")
        await put(a, "q", source, *"abc")
        await shut(a, "q", source, "read_only")
        died = asyncio.Event()

        async def before(ref: PartitionRef) -> Outcome | None:
            if ref.partition == target and not lands:
                made.die("b")
                died.set()
                return Outcome.UNKNOWN
            return None

        async def after(ref: PartitionRef) -> None:
            if ref.partition == target and not died.is_set():
                made.die("b")
                died.set()

        made.stores["b"].on_apply, made.stores["b"].on_applied = before, after
        moving = asyncio.create_task(move(a, "q", source, target, timeout=60_000))
        await died.wait()
        await eventually(lambda: target in shares(a, "q"))
        assert await moving == (3, 3)
        assert counts(await a.count("q")) == {source: (0, 0), target: (3, 0)}


@driven
async def test_a_move_goes_on_at_who_gets_its_source(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b", "c") as (made, services):
        a = services[0]
        await a.create_queue(spec("q", 3))
        source, target = 0, 1
        await put(a, "q", source, *"abc")
        await shut(a, "q", source, "read_only")
        owner, aim = made.owner("q", source), made.owner("q", target)
        gate = Gate(only=lambda ref: ref.partition == target)
        made.stores[made.name(aim)].on_apply = gate
        moving = asyncio.create_task(move(owner, "q", source, target, timeout=1_000))
        await gate.reached.wait()
        leaving = asyncio.create_task(made.leave(made.name(owner)))
        await eventually(lambda: source not in shares(owner, "q"))
        gate.open()
        made.stores[made.name(aim)].on_apply = fine
        await leaving
        await asyncio.wait((moving,))
        _ = moving.exception()
        other = next(each for each in services if each not in (owner, aim))
        await eventually(lambda: made.owner("q", source) is not owner)
        await move(other, "q", source, target)
        assert counts(await other.count("q"))[target] == (3, 0)
        assert (await shut(other, "q", source, "sealed")).shutting == "sealed"
