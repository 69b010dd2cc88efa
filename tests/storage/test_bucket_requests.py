"""Requests to buckets are counted: by kind and outcome, with their latencies, bytes and price."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import obstore.store
import pytest

from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from sluiceway.adapters.storage.bucket_requests import META, BackendRequests, BucketRequests, CountedObjects
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.local.stores import open_store
from sluiceway.model.backends import S3Backend
from sluiceway.model.bucket_prices import S3_EXPRESS, S3_STANDARD, prices_of
from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.servers.moto_server import REGION, MotoServer
from tests.storage.test_hedged_reads import Stuck


def counted(objects: ObjectStore) -> tuple[CountedObjects, BackendRequests]:
    counts = BackendRequests(S3_STANDARD)
    return CountedObjects(objects, counts), counts


@pytest.fixture(params=["memory", "s3"])
def bucket(request: pytest.FixtureRequest, s3: MotoServer) -> BucketObjects:
    return BucketObjects(obstore.store.MemoryStore() if request.param == "memory" else s3.bucket(prefix="counted"))


@driven
async def test_each_request_is_counted_with_its_outcome(bucket: BucketObjects) -> None:
    objects, counts = counted(bucket)
    assert await objects.create("a/1", b"four")
    assert not await objects.create("a/1", b"other")
    found = await objects.get("a/1")
    assert found is not None
    assert await objects.get("a/2") is None
    assert await objects.get_range("a/1", 1, 2) == b"ou"
    assert await objects.replace("a/1", b"seven..", found.tag) is not None
    assert await objects.replace("a/1", b"other", found.tag) is None
    assert list(await objects.list("a/", "a/")) == ["a/1"]
    assert await objects.sizes("a/") == {"a/1": 7}
    await objects.delete(["a/1"])
    assert counts.outcomes == {
        ("create", "ok"): 1,
        ("create", "precondition_failed"): 1,
        ("get", "ok"): 2,
        ("get_range", "ok"): 1,
        ("replace", "ok"): 1,
        ("replace", "precondition_failed"): 1,
        ("list", "ok"): 2,
        ("delete", "ok"): 1,
    }
    assert (counts.read, counts.written) == (4 + 2, 4 + 7)
    assert {request: sum(each.buckets) for request, each in counts.latencies.items()} == {
        "create": 2,
        "get": 2,
        "get_range": 1,
        "replace": 2,
        "list": 2,
        "delete": 1,
    }
    assert all(each.seconds > 0 for each in counts.latencies.values())


@driven
async def test_a_list_and_a_deletion_take_a_request_for_each_thousand_names() -> None:
    objects, counts = counted(BucketObjects(obstore.store.MemoryStore()))
    names = [f"{number:04}" for number in range(1_001)]
    for name in names:
        await objects.create(name, b"")
    assert len(await objects.list("", "")) == 1_001
    assert not await objects.list("none", "")
    await objects.delete(names)
    assert (counts.outcomes["list", "ok"], counts.outcomes["delete", "ok"]) == (2 + 1, 2)


class Refusal(BaseHTTPRequestHandler):
    """Answers every request with the status that its server has."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_PUT = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "read", "write"),
    [
        (503, "throttled", "throttled"),
        (429, "throttled", "throttled"),
        (500, "unavailable", "unknown"),
        (403, "unavailable", "unavailable"),
    ],
)
@driven
async def test_a_store_that_wants_fewer_requests_is_told_from_one_that_fails(
    refusing: ThreadingHTTPServer, status: int, read: str, write: str
) -> None:
    refusing.status = status  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{refusing.server_port}"
    objects, counts = counted(in_s3("b", "", region=REGION, endpoint=url, access_key_id="x", secret_access_key="x"))
    for call in (objects.get("a"), objects.get_range("a", 0, 1), objects.list("", ""), objects.delete(["a"])):
        with pytest.raises(StoreUnavailableError):
            await call
    for write_call in (objects.create("a", b"data"), objects.replace("a", b"data", '"tag"\n')):
        with pytest.raises((UnknownWriteError, StoreUnavailableError)):
            await write_call
    reads = {(request, read): 1 for request in ("get", "get_range", "list", "delete")}
    assert counts.outcomes == reads | {("create", write): 1, ("replace", write): 1}
    assert counts.written == 0
    assert counts.throttled == (6 if status in (429, 503) else 0)


@driven
async def test_both_of_two_hedged_reads_count() -> None:
    stuck = Stuck(1)
    await stuck.create("name", b"data")
    objects, counts = counted(stuck)
    await HedgedReads(objects).get("name")
    await asyncio.sleep(0)
    assert counts.outcomes == {("get", "ok"): 1, ("get", "cancelled"): 1}


def test_the_estimate_has_the_prices_of_each_kind() -> None:
    counts = BackendRequests(S3_STANDARD)
    counts.outcomes.update({("create", "ok"): 600_000, ("replace", "unknown"): 300_000, ("list", "ok"): 100_000})
    assert counts.dollars == pytest.approx(5.0)
    counts.outcomes.update({("get", "ok"): 400_000, ("get_range", "cancelled"): 600_000, ("delete", "ok"): 10**9})
    assert counts.dollars == pytest.approx(5.4)


def test_bytes_cost_only_where_they_do() -> None:
    for prices, dollars in ((S3_STANDARD, 0.0), (S3_EXPRESS, 3.2 + 0.6)):
        counts = BackendRequests(prices)
        counts.written = counts.read = 1_000 << 30
        assert counts.dollars == pytest.approx(dollars)


@pytest.mark.parametrize(
    ("kind", "bucket_name", "prices"),
    [
        ("s3", "queues", "S3 Standard"),
        ("s3", "queues--euc1-az1--x-s3", "S3 Express"),
        ("gcs", "queues--x-s3", "GCS Standard, one region"),
        ("azure", "queues", "Azure hot, LRS"),
    ],
)
def test_a_buckets_name_and_kind_tell_its_prices(kind: str, bucket_name: str, prices: str) -> None:
    assert prices_of(kind, bucket_name).name == prices


def test_a_backend_keeps_its_counts_until_its_prices_change() -> None:
    requests = BucketRequests()
    first = requests.of("b", S3_STANDARD)
    assert requests.of("b", S3_STANDARD) is first
    assert requests.of("b", S3_EXPRESS) is not first
    assert [*requests.backends] == ["b"]


@driven
async def test_stores_of_partitions_and_of_metadata_are_counted_apart(s3: MotoServer, tmp_path: Path) -> None:
    s3.bucket()
    requests = BucketRequests()
    given = {"region": REGION, "endpoint": s3.endpoint, "access_key_id": "tests", "secret_access_key": "tests"}
    partitions = open_store(
        "disk", msgspec.convert({"bucket": "tests", "prefix": "apart", "kind": "s3", **given}, S3Backend), tmp_path, requests=requests
    )
    meta = open_meta_store("s3://tests/apart-meta?" + "&".join(f"{name}={value}" for name, value in given.items()), requests)
    await partitions.identify("name")
    await meta.commit(puts={"key": b"value"})
    await partitions.close()
    await meta.close()
    assert {name: each.prices.name for name, each in requests.backends.items()} == {"disk": "S3 Standard", META: "S3 Standard"}
    assert all(each.outcomes["create", "ok"] for each in requests.backends.values())
