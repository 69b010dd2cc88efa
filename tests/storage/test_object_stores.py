"""What partitions in a bucket ask of an object store, asked of each server that the tests have."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_s3
from sluiceway.adapters.storage.bucket_proof import Proof
from sluiceway.ports.object_store import UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.server.server_process import PATIENCE
from tests.servers.azurite_server import AzuriteServer
from tests.servers.fake_gcs_server import FakeGcsServer
from tests.servers.faulty_bucket import FaultyBucket, faulty_bucket
from tests.servers.moto_server import MotoServer
from tests.servers.versity_server import VersityServer

AT_ONCE, TIMES = 16, 8


@pytest.fixture(scope="module")
def faulty() -> Iterator[FaultyBucket]:
    with faulty_bucket() as bucket:
        yield bucket


def in_faulty(bucket: FaultyBucket, key_id: str = "tests") -> BucketObjects:
    return in_s3("tests", "", region="none", endpoint=bucket.url, access_key_id=key_id, secret_access_key="tests")


INSTALLED = [pytest.param(name, marks=pytest.mark.slow) for name in ("versity", "azurite", "gcs")]
"""Servers that `make test-bucket` installs."""


@pytest.fixture(params=["moto", *INSTALLED, "faulty"])
def objects(request: pytest.FixtureRequest) -> BucketObjects:
    server: MotoServer | VersityServer | AzuriteServer | FakeGcsServer | FaultyBucket = request.getfixturevalue(
        "s3" if request.param == "moto" else request.param
    )
    if isinstance(server, FaultyBucket):
        return in_faulty(server)
    return BucketObjects(server.bucket()) if isinstance(server, MotoServer) else server.objects("objects")


@driven
async def test_it_is_fit_for_partitions(objects: BucketObjects) -> None:
    await Proof(objects, lambda: os.urandom(8)).give()


@driven
async def test_of_several_that_create_an_object_at_once_one_does(objects: BucketObjects) -> None:
    for number in range(TIMES):
        created = await asyncio.gather(*(objects.create(f"created-{number}", bytes([each])) for each in range(AT_ONCE)))
        found = await objects.get(f"created-{number}")
        assert created.count(True) == 1
        assert found is not None
        assert found.data == bytes([created.index(True)])


@driven
async def test_of_several_that_replace_an_object_at_once_one_does(objects: BucketObjects) -> None:
    await objects.create("replaced", b"new")
    for number in range(TIMES):
        before = await objects.get("replaced")
        assert before is not None
        replaced = await asyncio.gather(*(objects.replace("replaced", bytes([number, each]), before.tag) for each in range(AT_ONCE)))
        found = await objects.get("replaced")
        assert found is not None
        assert [each for each in replaced if each is not None] == [found.tag]


@driven
async def test_the_sizes_of_objects_are_listed(objects: BucketObjects) -> None:
    for name, size in {"sizes/a": 0, "sizes/b/c": 5, "sizesx": 1}.items():
        await objects.create(name, b"x" * size)
    assert await objects.sizes("sizes/") == {"sizes/a": 0, "sizes/b/c": 5}
    assert await objects.sizes("none/") == {}


@driven
@pytest.mark.parametrize(
    ("fault", "said", "is_there"),
    [
        ("slow-down", UnknownWriteError, False),
        ("internal-error", UnknownWriteError, False),
        ("reset", UnknownWriteError, False),
        ("lost-answer", UnknownWriteError, True),
        ("late-error", UnknownWriteError, True),
        ("expired-token", StoreUnavailableError, False),
        ("access-denied", StoreUnavailableError, False),
        ("no-bucket", StoreUnavailableError, False),
    ],
)
async def test_a_write_that_fails_is_unknown_unless_it_surely_was_not_done(
    faulty: FaultyBucket, fault: str, said: type[Exception], is_there: bool
) -> None:
    objects = in_faulty(faulty)
    faulty.inject(fault, 1.0)
    with pytest.raises(said):
        await objects.create(fault, b"data")
    assert faulty.mend() == 1
    assert (await objects.get(fault) is not None) == is_there


@driven
async def test_a_write_that_meets_another_is_not_done(faulty: FaultyBucket) -> None:
    """S3 answers 409 to one of two conditional writes at the same time."""
    objects = in_faulty(faulty)
    await objects.create("met", b"data")
    found = await objects.get("met")
    assert found is not None
    faulty.inject("conflict", 1.0)
    try:
        with pytest.raises(StoreUnavailableError):
            await objects.create("meeting", b"data")
        with pytest.raises(StoreUnavailableError):
            await objects.replace("met", b"other", found.tag)
    finally:
        assert faulty.mend() == 2
    assert await objects.get("met") == found


@driven
@pytest.mark.parametrize("fault", ["slow-down", "internal-error", "reset", "truncated", "expired-token", "access-denied", "no-bucket"])
async def test_a_read_that_fails_is_no_missing_object(faulty: FaultyBucket, fault: str) -> None:
    objects, name = in_faulty(faulty), f"read-{fault}"
    await objects.create(name, b"data")
    for read in (lambda: objects.get(name), lambda: objects.get_range(name, 1, 2), lambda: objects.list("", ""), lambda: objects.sizes("")):
        faulty.inject(fault, 1.0)
        with pytest.raises(StoreUnavailableError):
            await read()
        assert faulty.mend() == 1


LISTS = """
import asyncio, sys
from sluiceway.adapters.storage.bucket_objects import in_s3

async def main():
    objects = in_s3("tests", "", region="none", endpoint=sys.argv[1], access_key_id="tests", secret_access_key="tests")
    given_up = asyncio.ensure_future(objects.get("name"))
    await objects.list("", "")
    given_up.cancel()
    await objects.close()

asyncio.run(main())
"""


def test_a_process_may_end_right_after_it_has_closed_the_bucket(faulty: FaultyBucket) -> None:
    """The library's threads come back into Python after the last answer, and abort a process that is ending."""
    for _ in range(4):
        processes = [
            subprocess.Popen([sys.executable, "-c", LISTS, faulty.url], stderr=subprocess.PIPE, text=True) for _ in range(AT_ONCE // 4)
        ]
        for each in processes:
            _, said = each.communicate(timeout=PATIENCE)
            assert (each.returncode, said) == (0, "")
