"""A server whose partitions are in a bucket, and the way there from SQLite."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from sluiceway.client import Client
from tests.server.server_process import ServerProcess
from tests.servers import azurite_server
from tests.servers.azurite_server import AzuriteServer
from tests.servers.moto_server import MotoServer

BUCKET = """
[backends.bucket]
kind = "s3"
bucket = "tests"
prefix = "{prefix}"
region = "eu-central-1"
endpoint = "{endpoint}"
access_key_id = "tests"
secret_access_key = "env:TESTS_SECRET"
"""
AZURE = """
[backends.bucket]
kind = "azure"
bucket = "tests"
prefix = "{prefix}"
account = "tests"
access_key = "env:TESTS_SECRET"
endpoint = "{endpoint}"
"""


def config(path: Path, s3: MotoServer, *, default: float | None) -> Path:
    """A configuration with the bucket, and with the default backend if it has an affinity."""
    s3.bucket("tests")
    text = BUCKET.format(prefix=path.parent.name, endpoint=s3.endpoint)
    if default is not None:
        text += f'[backends.default]\nkind = "sqlite"\npartition_affinity = {default}\n'
    path.write_text(text)
    return path


def take_all(client: Client, queue: str, count: int) -> list[bytes]:
    """Lease and complete items until there were `count`."""
    taken: list[bytes] = []
    while len(taken) < count:
        leased = client.lease(queue, batch_size=1_000, max_partitions=100, request_timeout="20s")
        assert leased.items, f"{len(taken)} of {count} came"
        taken += [item.payload for item in leased.items]
        client.complete(queue, lease_ids=leased.lease_ids)
    return taken


@pytest.fixture(params=["s3", pytest.param("azure", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def only_in_bucket(kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with no backend but a bucket of that kind."""
    file = tmp_path / "sluiceway.toml"
    if kind == "azure":
        azurite: AzuriteServer = request.getfixturevalue("azurite")
        monkeypatch.setenv("TESTS_SECRET", azurite_server.ACCESS_KEY)
        file.write_text(AZURE.format(prefix=tmp_path.name, endpoint=azurite.url))
        return file
    monkeypatch.setenv("TESTS_SECRET", "tests")
    return config(file, request.getfixturevalue("s3"), default=None)


def test_items_outlive_the_machine(tmp_path: Path, kind: str, only_in_bucket: Path) -> None:
    data, file = tmp_path / "data", only_in_bucket
    with ServerProcess(data, config=file) as server, Client(server.url) as client:
        client.create_queue("orders", requested_partitions=2)
        client.produce("orders", [f"item {number}" for number in range(500)], idempotency_key="once")
        leased = client.lease("orders", batch_size=10)
        client.retry("orders", [each.id for each in leased.items])
        client.complete("orders", lease_ids=client.lease("orders", batch_size=10).lease_ids)
        assert {each["kind"] for each in client.list_backends()} == {kind}
        server.kill()
    with ServerProcess(data, config=file) as server, Client(server.url) as client:
        assert client.produce("orders", [f"item {number}" for number in range(500)], idempotency_key="once").deduplicated
        assert len(set(take_all(client, "orders", 490))) == 490
        server.kill()
    # Only the metadata is on the machine.
    assert not list(data.rglob("*-0.sqlite"))


def test_a_queue_moves_to_the_bucket_while_it_is_in_use(tmp_path: Path, s3: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_SECRET", "tests")
    data, file = tmp_path / "data", tmp_path / "sluiceway.toml"
    file.write_text("")
    sent: list[str] = []
    with ServerProcess(data, config=file) as server, Client(server.url) as client:
        client.create_queue("orders", requested_partitions=2)
        client.produce("orders", [f"before {number}" for number in range(1_000)])
        config(file, s3, default=0.0)
        client.reload_config()
        stop = threading.Event()

        def produce() -> None:
            with Client(server.url) as other:
                while not stop.is_set():
                    sent.append(f"meanwhile {len(sent)}")
                    other.produce("orders", [sent[-1]])

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            moved = client.rebalance("orders", drain="copy")
            *_, last = client.watch_rebalance(moved.id)
        finally:
            stop.set()
            producer.join()
        assert last.state == "done", last
        assert {each.backend for each in client.stats("orders").partitions} == {"bucket"}
        server.kill()
    shutil.rmtree(data / "partitions")
    with ServerProcess(data, config=file) as server, Client(server.url) as client:
        taken = take_all(client, "orders", 1_000 + len(sent))
        assert sorted(taken) == sorted(each.encode() for each in (*(f"before {number}" for number in range(1_000)), *sent))
