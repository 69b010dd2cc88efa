"""What the history of a partition's writes can show."""

from __future__ import annotations

import psycopg
import pytest

from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_objects import in_s3
from sluiceway.adapters.storage.postgres import PostgresPartitionStore
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Fence, PartitionRef
from sluiceway.testing.drive import driven
from sluiceway.testing.partition_store_suite import cycle
from tests.campaigns.kit.history import BucketHistory, PostgresHistory, Write, faults, instance_of, newest, written_too_late
from tests.servers.faulty_bucket import faulty_bucket
from tests.servers.postgres_server import PostgresServer

PLACE = ("k7f3q2ma", 0)
OLD, NEW = (2, 1, 1), (2, 2, 1)


def writes(*each: tuple[tuple[int, int, int], int, str]) -> list[Write]:
    return [Write(number, PLACE, *parts) for number, parts in enumerate(each, 1)]


def test_one_owner_after_another_is_no_fault() -> None:
    assert not faults(writes((OLD, 0, "i0.1"), (OLD, 1, "i0.1"), (NEW, 1, "i1.1"), (NEW, 2, "i1.1")))


@pytest.mark.parametrize(
    ("last", "word"),
    [((OLD, 3, "i0.1"), "fence"), ((NEW, 1, "i1.1"), "turn"), ((NEW, 3, "i0.1"), "under one fence"), ((NEW, 3, "i1.2"), "under one fence")],
)
def test_an_older_fence_an_older_turn_and_a_second_writer_are_found(last: tuple[tuple[int, int, int], int, str], word: str) -> None:
    found = faults(writes((OLD, 1, "i0.1"), (NEW, 2, "i1.1"), last))
    assert len(found) == 1
    assert word in found[0]


def test_a_write_of_who_had_the_partition_before_is_too_late_unless_it_is_given_to_him_again() -> None:
    at = {PLACE: Write(2, PLACE, NEW, 2, "i1.1")}
    stale, mine, again = writes((NEW, 3, "i0.1"), (NEW, 4, "i1.1"), ((2, 3, 1), 5, "i0.1"))
    assert written_too_late([stale, mine, again], at, "i0") == [stale]
    assert instance_of("i0.1") == "i0"


@driven
async def test_the_trigger_notes_openings_and_turns_with_their_writer(postgres: PostgresServer) -> None:
    ref = PartitionRef("k7f3q2ma", 3)
    dsn = postgres.dsn()
    first, second = (PostgresPartitionStore(f"{dsn} application_name={name}") for name in ("i0.1", "i1.1"))
    await first.browse(ref)
    history = PostgresHistory(dsn)
    old, new = Fence(*OLD), Fence(*NEW)
    await first.open(ref, old)
    assert await first.apply(ref, cycle(1), old) is Outcome.DONE
    await second.open(ref, new)
    assert await first.apply(ref, cycle(2), old) is Outcome.REFUSED
    assert await second.apply(ref, cycle(2), new) is Outcome.DONE
    seen = [(write.place, write.fence, write.txn, write.writer) for write in history.writes()]
    place = ("k7f3q2ma", 3)
    assert seen == [(place, OLD, 0, "i0.1"), (place, OLD, 1, "i0.1"), (place, NEW, 1, "i1.1"), (place, NEW, 2, "i1.1")]
    assert newest(history.writes())[place].writer == "i1.1"
    # The control group: what the store would never do.
    with psycopg.connect(f"{dsn} application_name=i0.1", autocommit=True) as zombie:
        zombie.execute("UPDATE sluiceway.partition SET txn = txn + 1")
    assert len(faults(history.writes())) == 1
    assert len(written_too_late(history.writes(after=4), {place: history.writes()[3]}, "i0")) == 1
    await first.close()
    await second.close()


@driven
async def test_a_bucket_notes_openings_and_turns_with_their_writer() -> None:
    ref, old, new = PartitionRef("k7f3q2ma", 3), Fence(*OLD), Fence(*NEW)
    with faulty_bucket() as bucket:
        history = BucketHistory(bucket, "here")
        objects, others, elsewhere = (
            in_s3("tests", prefix, region="none", endpoint=bucket.url, access_key_id=name, secret_access_key="tests")
            for prefix, name in (("here", "i0.1"), ("here", "i1.1"), ("there", "i2.1"))
        )
        first, second, third = (BucketPartitionStore(each, 1_000) for each in (objects, others, elsewhere))
        await first.open(ref, old)
        await third.open(ref, old)
        assert await first.apply(ref, cycle(1), old) is Outcome.DONE
        await second.open(ref, new)
        assert await first.apply(ref, cycle(2), old) is Outcome.REFUSED
        assert await second.apply(ref, cycle(2), new) is Outcome.DONE
        seen = [(write.place, write.fence, write.txn, write.writer) for write in history.writes()]
        place = ("k7f3q2ma", 3)
        assert seen == [(place, OLD, 0, "i0.1"), (place, OLD, 1, "i0.1"), (place, NEW, 1, "i1.1"), (place, NEW, 2, "i1.1")]
        assert not faults(history.writes())
        assert history.writes(after=history.writes()[-1].id) == []
        # The control group: what the store would never do.
        log = next(name for name, _, _, fence, txn in bucket.cycles(0) if fence == OLD and txn == 1 and name.startswith("here"))
        entry = await objects.get(log.removeprefix("here/"))
        assert entry is not None
        await objects.replace(log.removeprefix("here/"), entry.data, entry.tag)
        assert [fault.split(" by ")[-1] for fault in faults(history.writes())] == ["i0.1", "i0.1"]
    for store in (first, second, third):
        await store.close()
