"""From one machine to a cluster that has nothing but a bucket: `sluiceway cluster adopt`, with real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sluiceway.client import Client
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until
from tests.servers.moto_server import MotoServer
from tests.storage.test_bucket_server import BUCKET

CLUSTER = """
[cluster]
meta = "s3://tests/{prefix}-meta?region=eu-central-1&endpoint={endpoint}&access_key_id=tests&secret_access_key=tests"
"""


def config(path: Path, s3: MotoServer) -> Path:
    s3.bucket("tests")
    path.write_text((CLUSTER + BUCKET).format(prefix=path.parent.name, endpoint=s3.endpoint))
    return path


def sluiceway(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_cluster_takes_over_from_a_server(tmp_path: Path, s3: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_SECRET", "tests")
    data, file = tmp_path / "data", config(tmp_path / "sluiceway.toml", s3)
    with ServerProcess(data) as server, Client(server.url) as client:
        client.create_queue("dead")
        client.create_queue("orders", requested_partitions=3, dead_queue="dead", max_attempts=1)
        for batch in range(9):
            client.produce("orders", [f"{batch}.{number}" for number in range(100)])
        first = client.produce("orders", ["once"], idempotency_key="once")
        client.retry("orders", [each.id for each in client.lease("orders", batch_size=5).items])
        wait_until(lambda: sum(each.ready for each in client.stats("dead").partitions) == 5, "the burial")
        leased = client.lease("orders", batch_size=50, lease_timeout="1h")
        refused = sluiceway("cluster", "adopt", data, "--config", file)
        assert refused.returncode == 4
        assert "stop that server first" in refused.stderr
        assert server.interrupt() == 0

    adopted = sluiceway("cluster", "adopt", data, "--config", file)
    assert adopted.returncode == 0, adopted.stderr
    assert adopted.stdout.startswith("Adopted 2 queues, 4 partitions and 0 API keys; copied 4 partitions, "), adopted.stdout
    again = sluiceway("cluster", "adopt", data, "--config", file, "--json")
    assert json.loads(again.stdout) | {"copied_bytes": 0} == {
        "queues": 2,
        "partitions": 4,
        "api_keys": 0,
        "copied_partitions": 0,
        "copied_bytes": 0,
        "was_done": True,
    }
    alone = sluiceway("serve", "--data", data, "--listen", "127.0.0.1:0")
    assert alone.returncode == 3
    assert f"the queues of {data} are in the cluster with the meta store s3://tests/{tmp_path.name}-meta since" in alone.stderr

    with ServerProcess(data, config=file), ServerProcess(tmp_path / "other", config=file) as other, Client(other.url) as client:
        assert client.complete("orders", lease_ids=leased.lease_ids).completed == 50
        assert client.produce("orders", ["once"], idempotency_key="once").ids == first.ids
        dead = client.lease("dead", batch_size=100, request_timeout="20s")
        assert len(dead.items) == 5
        taken: set[str] = set()
        while len(taken) < 901 - 50 - 5:
            found = client.lease("orders", batch_size=1_000, max_partitions=3, request_timeout="20s")
            assert found.items
            taken |= {each.origin for each in found.items}
            client.complete("orders", lease_ids=found.lease_ids)
        assert not client.lease("orders", batch_size=1).items
        assert not taken & {each.origin for each in leased.items}
        assert [each.detail["queues"] for each in client.list_audit(action="cluster.adopt").items] == [2]
