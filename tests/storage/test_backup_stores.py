"""Backups of a server whose partitions are in SQLite, PostgreSQL and a bucket, and restores into other storage of these kinds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psycopg
import psycopg.sql
import pytest

from sluiceway.client import Client
from tests.server.backup_rounds import command
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until
from tests.server.test_backup_commands import ends
from tests.servers.moto_server import MotoServer
from tests.servers.postgres_server import PostgresServer
from tests.storage.test_bucket_server import BUCKET
from tests.storage.test_bucket_server import take_all as taken

POSTGRES = """
[backends.postgres]
kind = "postgres"
url = "{dsn}"
schema = "{schema}"

[backends.default]
kind = "sqlite"
"""
CLUSTER = """
[cluster]
meta = "s3://tests/{prefix}-meta?region=eu-central-1&endpoint={endpoint}&access_key_id=tests&secret_access_key=tests"
"""


def config(path: Path, s3: MotoServer, server: PostgresServer, name: str) -> Path:
    s3.bucket("tests")
    where = {"prefix": f"{path.parent.name}-{name}", "endpoint": s3.endpoint, "dsn": server.dsn(), "schema": name}
    path.write_text((BUCKET + POSTGRES).format(**where))
    return path


def test_each_kind_of_storage_is_backed_up_and_restored(
    tmp_path: Path, s3: MotoServer, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_SECRET", "tests")
    first, second = (config(tmp_path / f"{name}.toml", s3, server, name) for name in ("first", "second"))
    folder = str(tmp_path / "backups")
    with ServerProcess(tmp_path / "data", config=first) as running, Client(running.url) as client:
        queue = client.create_queue("orders", requested_partitions=6)
        assert {each.backend for each in queue.partitions} == {"bucket", "default", "postgres"}
        for number in range(60):
            client.produce("orders", [f"{number}"])
        leased = client.lease("orders", batch_size=10, lease_timeout="1h", max_partitions=6)
        command("backup", folder, "--url", running.url)
        taken(client, "orders", 50)
    code, _, said = ends("restore", folder, "--data", str(tmp_path / "new"))
    assert code == 3
    assert "pass the --config of the server" in said
    code, _, said = ends("restore", folder, "--data", str(tmp_path / "new"), "--config", str(first))
    assert code == 3
    assert "of queue 'orders' already; restore into empty storage" in said
    assert not (tmp_path / "new").exists()
    command("restore", folder, "--data", str(tmp_path / "new"), "--config", str(second))
    with ServerProcess(tmp_path / "new", config=second) as running, Client(running.url) as client:
        assert client.complete("orders", lease_ids=leased.lease_ids).completed == 10
        left = {f"{number}".encode() for number in range(60)} - {each.payload for each in leased.items}
        assert sorted(taken(client, "orders", 50)) == sorted(left)
        client.produce("orders", ["new"])


@pytest.mark.crash
def has_partitions(server: PostgresServer, schema: str) -> bool:
    with psycopg.connect(server.dsn(), autocommit=True) as link:
        if link.execute("SELECT to_regclass(%s)", [f"{schema}.partition"]).fetchone() == (None,):
            return False
        return link.execute(psycopg.sql.SQL("SELECT count(*) FROM {}.partition").format(psycopg.sql.Identifier(schema))).fetchone() != (0,)


def test_a_restore_that_was_killed_is_repeated(
    tmp_path: Path, s3: MotoServer, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun partitions in PostgreSQL and in a bucket."""
    monkeypatch.setenv("TESTS_SECRET", "tests")
    first, second = (config(tmp_path / f"{name}.toml", s3, server, name) for name in ("third", "fourth"))
    folder = str(tmp_path / "backups")
    with ServerProcess(tmp_path / "data", config=first) as running, Client(running.url) as client:
        client.create_queue("orders", requested_partitions=12)
        for number in range(120):
            client.produce("orders", [f"{number}"])
        command("backup", folder, "--url", running.url)
    restore = ("restore", folder, "--config", str(second), "--data")
    log = tmp_path / ".new.restoring/restoring.log"
    killed = subprocess.Popen([*COMMAND, *restore, str(tmp_path / "new")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and has_partitions(server, "fourth"), "partitions elsewhere")
    killed.kill()
    assert killed.wait(PATIENCE) == -9
    assert not (tmp_path / "new").exists()
    code, _, said = ends(*restore, str(tmp_path / "other"))
    assert (code, "If an interrupted restore left it, repeat that one" in said) == (3, True), said
    command(*restore, str(tmp_path / "new"))
    assert not log.parent.exists()
    with ServerProcess(tmp_path / "new", config=second) as running, Client(running.url) as client:
        assert sorted(taken(client, "orders", 120)) == sorted(f"{number}".encode() for number in range(120))


def test_a_restored_server_is_brought_into_a_cluster(tmp_path: Path, s3: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_SECRET", "tests")
    s3.bucket("tests")
    file = tmp_path / "cluster.toml"
    file.write_text((CLUSTER + BUCKET).format(prefix=tmp_path.name, endpoint=s3.endpoint))
    with ServerProcess(tmp_path / "data") as running, Client(running.url) as client:
        client.create_queue("orders", requested_partitions=2)
        client.produce("orders", [f"{number}" for number in range(10)])
        command("backup", str(tmp_path / "backups"), "--url", running.url)
    command("restore", str(tmp_path / "backups"), "--data", str(tmp_path / "new"))
    code, _, said = ends("cluster", "adopt", str(tmp_path / "new"), "--config", str(file))
    assert code == 0, said
    # The cluster is backed up in turn, and restored into its storage under another name.
    with ServerProcess(tmp_path / "a", config=file) as running, ServerProcess(tmp_path / "b", config=file), Client(running.url) as client:
        client.produce("orders", ["of the cluster"])
        made = command("backup", str(tmp_path / "backups"), "--url", running.url)
        assert made["partitions"] == 2
        assert len(taken(client, "orders", 11)) == 11
    other = tmp_path / "other.toml"
    other.write_text(BUCKET.format(prefix=f"{tmp_path.name}-other", endpoint=s3.endpoint))
    command("restore", str(tmp_path / "backups"), "--data", str(tmp_path / "newest"), "--config", str(other))
    with ServerProcess(tmp_path / "newest", config=other) as running, Client(running.url) as client:
        assert b"of the cluster" in taken(client, "orders", 11)
