"""The meta store in a bucket: commits that share a write, lost answers, and its URL."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import obstore.store
import pytest

from simulation.bucket_objects import Bucket
from simulation.loop import Loop, simulated
from sluiceway.adapters.meta import bucket
from sluiceway.adapters.meta.bucket import REMEMBERED, TRACES, BucketMetaStore
from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import ConflictError, MetaUnknownError
from sluiceway.ports.object_store import Object, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.servers.faulty_bucket import faulty_bucket
from tests.servers.moto_server import MotoServer
from tests.storage.test_bucket_faults import Replaces, Seam, fails
from tests.storage.test_bucket_takeover import Slow, log_normal


@driven
async def test_commits_that_come_together_share_a_write() -> None:
    seam = Seam()
    store = BucketMetaStore(seam)
    await store.commit(puts={"first": b""})
    seam.calls.clear()
    stamps = await asyncio.gather(*(store.commit({f"key {number}": None}, puts={f"key {number}": b"%d" % number}) for number in range(50)))
    assert sorted(stamps) == list(range(2, 52))
    assert [call for call, _ in seam.calls] == ["replace"]
    view = await store.read(prefixes=["key "])
    assert {entry.stamp for entry in view.entries.values()} == set(stamps)


@driven
async def test_reads_of_the_same_moment_share_a_request() -> None:
    seam = Seam()
    store = BucketMetaStore(seam)
    await store.commit(puts={"key": b"0"})
    seam.calls.clear()
    views = await asyncio.gather(*(store.read(["key"]) for _ in range(20)))
    assert [view.entries["key"].value for view in views] == [b"0"] * 20
    assert [call for call, _ in seam.calls] == ["get"]


@driven
async def test_what_nobody_expected_is_told_to_whoever_waits() -> None:
    seam = Seam()
    store = BucketMetaStore(seam)
    await store.commit(puts={"key": b"0"})
    seam.before = fails(1, "replace", "meta", ZeroDivisionError("a bug"))
    with pytest.raises(MetaUnknownError, match="a bug"):
        await store.commit(puts={"key": b"1"})
    await store.commit(puts={"key": b"2"})


@driven
async def test_of_commits_in_one_write_each_sees_those_before_it() -> None:
    store = BucketMetaStore(Seam())
    first = asyncio.create_task(store.commit(puts={"other": b""}))
    await asyncio.sleep(0)
    answers = await asyncio.gather(
        *(store.commit({"key": None}, puts={"key": b"%d" % number}) for number in range(5)), return_exceptions=True
    )
    await first
    assert [isinstance(answer, ConflictError) for answer in answers] == [False, True, True, True, True]
    assert (await store.read(["key"])).entries["key"].value == b"0"


@driven
async def test_a_commit_whose_answer_is_lost_is_found_out() -> None:
    seam = Seam()
    store = BucketMetaStore(seam)
    await store.commit(puts={"key": b"0"})
    lost = fails(1, "replace", "meta", UnknownWriteError("no answer"))

    def after(call: str, name: str, answer: Any) -> Any:
        lost(call, name)
        return answer

    seam.after = after
    # With a check that would fail, were it carried out twice.
    stamp = (await store.read(["key"])).entries["key"].stamp
    assert await store.commit({"key": stamp}, puts={"key": b"1"}) == stamp + 1
    assert (await store.read(["key"])).entries["key"].value == b"1"


@driven
async def test_a_commit_whose_answer_is_lost_is_found_out_after_others() -> None:
    seam = Seam()
    store, other = BucketMetaStore(seam), BucketMetaStore(seam)
    await store.commit(puts={"key": b"0"})
    answered, others = [True], asyncio.Event()

    def after(call: str, name: str, answer: Any) -> Any:
        if call == "replace" and answered:
            answered.pop()
            others.set()
            raise UnknownWriteError("no answer")
        return answer

    seam.after = after
    commit = asyncio.create_task(store.commit(puts={"key": b"1"}))
    await others.wait()
    for number in range(5):
        await other.commit(puts={"other": b"%d" % number})
    assert await commit == 2
    assert (await store.read(["key"])).entries["key"].value == b"1"


@driven
@pytest.mark.parametrize("others", [2, 3], ids=["few others", "many others"])
async def test_a_lost_answer_that_is_found_out_no_more_is_no_conflict(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """So many others have committed, while the bucket did not answer this process, that the id of its write is no longer there."""
    monkeypatch.setattr(bucket, "REMEMBERED", 3)
    seam = Seam()
    store, other = BucketMetaStore(seam), BucketMetaStore(seam)
    stamp = await store.commit(puts={"key": b"0"})
    await other.commit(puts={"other": b""})
    await other.commit(puts={"other": b""})
    await store.read()
    answers, lost = asyncio.Event(), asyncio.Event()

    def is_lost(call: str, name: str, answer: Any) -> Any:
        if call == "replace" and not lost.is_set():
            lost.set()
            raise UnknownWriteError("no answer")
        return answer

    class Silent(BucketObjects):
        """The same bucket, which does not answer this process for a while."""

        async def get(self, name: str) -> Object | None:
            await answers.wait()
            return await seam.get(name)

        async def replace(self, name: str, data: bytes, tag: str) -> str | None:
            return await seam.replace(name, data, tag)

    seam.after = is_lost
    store._objects = Silent(obstore.store.MemoryStore())
    commit = asyncio.create_task(store.commit({"key": stamp}, puts={"key": b"1"}))
    await lost.wait()
    other = BucketMetaStore(seam)
    for _ in range(others):
        await other.commit(puts={"other": b""})
    answers.set()
    if others < 3:
        assert await commit == stamp + 3
    else:
        with pytest.raises(MetaUnknownError, match="cannot be found out"):
            await commit
    assert (await store.read(["key"])).entries["key"].value == b"1"


@driven
async def test_without_any_answer_the_outcome_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PATIENCE", 200)
    seam = Seam()
    store = BucketMetaStore(seam)
    await store.commit(puts={"key": b"0"})
    seam.before = fails(1_000, "replace", "meta", UnknownWriteError("no answer"))
    with pytest.raises(MetaUnknownError, match="no answer"):
        await store.commit(puts={"key": b"1"})
    seam.before = fails(1_000, "get", "meta", StoreUnavailableError("slow down"))
    with pytest.raises(StoreUnavailableError):
        await store.read(["key"])
    seam.before = lambda call, name: None
    assert await store.commit(puts={"key": b"2"}) == 2


@driven
async def test_it_does_not_grow_with_what_is_over() -> None:
    seam = Seam()
    store = BucketMetaStore(seam)
    for number in range(2 * TRACES // 50):
        keys = [f"{number}.{each}" for each in range(50)]
        await store.commit(puts=dict.fromkeys(keys, b""))
        await store.commit(deletes=keys)
    document = (await store._read()).document
    assert (len(document.deleted), len(document.writes), document.entries) == (TRACES, min(REMEMBERED, document.stamp), {})
    # What may be forgotten has changed, to be on the safe side.
    with pytest.raises(ConflictError):
        await store.commit(unchanged={"nowhere": 1}, puts={"key": b""})
    await store.commit(unchanged={"nowhere": document.stamp}, puts={"key": b""})


@driven
async def test_a_bucket_that_ignores_conditions_is_refused() -> None:
    store = BucketMetaStore(Replaces(obstore.store.MemoryStore()))
    with pytest.raises(StoreUnavailableError, match="If-Match"):
        await store.read(["key"])


@pytest.mark.parametrize("data", [b"something else", b"\x95\x01\x00\x81\xa3\xff\xff\xff"], ids=["text", "no UTF-8"])
@driven
async def test_what_is_no_meta_store_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(bucket, "PATIENCE", 100)
    objects = BucketObjects(obstore.store.MemoryStore())
    await objects.create("meta", data)
    store = BucketMetaStore(objects)
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        await store.read(["key"])
    with pytest.raises(MetaUnknownError, match="cannot be read"):
        await store.commit(puts={"key": b""})


@driven
async def test_it_is_opened_by_its_url(s3: MotoServer) -> None:
    s3.bucket("tests")
    url = f"s3://tests/by-url?region=none&endpoint={s3.endpoint}&access_key_id=tests&secret_access_key=tests"
    store, other = open_meta_store(url), open_meta_store(url)
    await store.commit(puts={"key": b"value"})
    assert (await other.read(["key"])).entries["key"].value == b"value"
    await store.close()
    await other.close()


@pytest.mark.parametrize("busy", [1, 3])
def test_who_commits_now_and_then_gets_a_turn_beside_those_who_always_do(busy: int) -> None:
    """With the latencies of S3, by the virtual clock. A commit that does not get in within PATIENCE raises."""
    objects, random = Bucket(), Random(busy)
    loop = Loop(random)

    async def commits(store: BucketMetaStore, key: str, pause: float) -> list[float]:
        took: list[float] = []
        while loop.time() < 120:
            began = loop.time()
            await store.commit(puts={key: b""})
            took.append(loop.time() - began)
            await asyncio.sleep(pause)
        return took

    async def all_of_them() -> list[list[float]]:
        stores = [BucketMetaStore(Slow(objects, log_normal(random)), nonce=lambda: random.randbytes(8)) for _ in range(busy + 1)]
        always = [commits(store, f"{number}.{each}", 0) for number, store in enumerate(stores[1:]) for each in range(4)]
        return await asyncio.gather(commits(stores[0], "now and then", 1), *always)

    with simulated(loop):
        now_and_then, *always = loop.run_until_complete(all_of_them())
    assert max(now_and_then) < 5
    assert sum(now_and_then) / len(now_and_then) < 1
    assert min(map(len, always)) > 200


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3:///folder", "s3://bucket/folder?colour=red", "gs://bucket/folder?region=x", "s3:bucket/folder"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SluicewayError, match="expected"):
        open_meta_store(url)


@driven
async def test_a_commit_that_meets_another_is_tried_again() -> None:
    """S3 answers 409 to one of two writes at the same time."""
    with faulty_bucket() as faulty:
        store = BucketMetaStore(
            in_s3("tests", "meta", region="none", endpoint=faulty.url, access_key_id="tests", secret_access_key="tests")
        )
        await store.commit(puts={"key": b"0"})
        faulty.inject("conflict", 1.0)
        committing = asyncio.create_task(store.commit(puts={"key": b"1"}))
        while not faulty.struck():  # noqa: ASYNC110 - another process has no event to await
            await asyncio.sleep(0.01)
        faulty.mend()
        await asyncio.wait_for(committing, 10)
        assert (await store.read(["key"])).entries["key"].value == b"1"
        await store.close()
