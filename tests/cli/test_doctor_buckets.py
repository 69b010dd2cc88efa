"""`sluiceway doctor` and buckets: whether they are fit, how quickly they answer, and what a server's requests cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import obstore.store
import pytest

from sluiceway.adapters.storage.bucket_objects import BucketObjects
from sluiceway.client import Client
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server_cli import doctor, doctor_buckets
from sluiceway.server_cli.doctor_buckets import measure, usage
from sluiceway.testing.drive import driven
from tests.cli.cli_shell import Shell
from tests.server.server_process import ServerProcess, closed_port
from tests.servers.moto_server import MotoServer
from tests.storage.test_bucket_server import config

NOW = 1_700_000_000.0
HOUR = 3_600.0


class Forgetful(BucketObjects):
    """A bucket that ignores the condition of a create."""

    async def create(self, name: str, data: bytes) -> bool:
        await super().create(name, data)
        return True


@driven
async def test_a_bucket_is_timed_and_left_as_it_was() -> None:
    bucket = obstore.store.MemoryStore()
    create, read = await measure(BucketObjects(bucket))
    assert create > 0
    assert read > 0
    assert not await BucketObjects(bucket).list("", "")


@driven
async def test_a_bucket_that_ignores_conditions_is_not_timed() -> None:
    with pytest.raises(StoreUnavailableError, match="If-None-Match"):
        await measure(Forgetful(obstore.store.MemoryStore()))


def metrics(started: float | None) -> str:
    """Those of a server with two buckets, one of which has throttled a tenth of its requests."""
    lines = [
        'sluiceway_bucket_requests_total{backend="default",request="create",outcome="ok"} 900.0',
        'sluiceway_bucket_requests_total{backend="default",request="create",outcome="throttled"} 100.0',
        'sluiceway_bucket_requests_total{backend="(meta)",request="get",outcome="ok"} 3600.0',
        'sluiceway_bucket_request_dollars_total{backend="default",prices="S3 Standard"} 0.005',
        'sluiceway_bucket_request_dollars_total{backend="(meta)",prices="S3 Express"} 0.000108',
    ]
    if started is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started}"]
    return "\n".join(lines) + "\n"


def test_the_requests_of_a_server_are_told_by_day() -> None:
    default, meta = usage(metrics(NOW - HOUR), NOW)
    assert (default.name, default.state, meta.name, meta.state) == ("requests default", "ok", "requests (meta)", "ok")
    assert default.figures == {"requests_per_day": 24_000, "dollars_per_day": 0.12, "throttled": 100}
    assert meta.figures == {"requests_per_day": 86_400, "dollars_per_day": 0.0026, "throttled": 0}
    assert default.detail.startswith("24,000 a day, for $0.12 at the list prices of S3 Standard")
    assert "since its start, 1h ago" in default.detail


@pytest.mark.parametrize("started", [NOW - 59, NOW + 5, None])
def test_a_server_that_has_just_started_has_no_rate(started: float | None) -> None:
    (check, _) = usage(metrics(started), NOW)
    assert (check.state, check.figures) == ("skipped", {})
    assert check.detail.startswith("1,000 so far")


def test_a_server_without_buckets_has_nothing_to_tell() -> None:
    assert not list(usage("process_start_time_seconds 1.0\n", NOW))


# -- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[MotoServer]:
    with MotoServer(mended=False) as server:
        yield server


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    return Shell("", monkeypatch, capsysbinary)


def checks(shell: Shell, *arguments: str) -> dict[str, dict[str, object]]:
    return {each["name"]: each for each in json.loads(shell.ends("doctor", "--json", *arguments)[1])["checks"]}


def test_a_server_and_its_bucket(tmp_path: Path, s3: MotoServer, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_SECRET", "tests")
    monkeypatch.setattr(doctor_buckets, "MIN_AGE", 0.0)
    # The header's time is cut to whole seconds, and so may be before the server's start.
    monkeypatch.setattr(doctor, "_date", lambda answer: None)
    file = config(tmp_path / "sluiceway.toml", s3, default=None)
    with ServerProcess(tmp_path / "data", config=file) as server, Client(server.url) as client:
        client.create_queue("orders")
        client.produce("orders", ["item"])
        found = checks(shell, "--url", server.url, "--config", str(file))
    probe, requests = found["bucket bucket"], found["requests bucket"]
    assert (probe["state"], requests["state"]) == ("ok", "ok")
    assert [*probe["figures"]] == ["create_p50_ms", "read_p50_ms"]  # type: ignore[misc]
    assert "honours both conditions" in str(probe["detail"])
    assert requests["figures"]["requests_per_day"] > 0  # type: ignore[index]


def test_a_bucket_that_does_not_answer_has_failed(tmp_path: Path, s3: MotoServer, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_SECRET", "tests")
    file = config(tmp_path / "sluiceway.toml", s3, default=None)
    with closed_port() as port:
        file.write_text(file.read_text().replace(s3.endpoint, f"http://127.0.0.1:{port}"))
        check = checks(shell, "--url", f"http://127.0.0.1:{port}", "--config", str(file))["bucket bucket"]
    assert check["state"] == "failed"
    assert "endpoint" in str(check["fix"])


def test_a_meta_store_in_a_bucket_is_tried_too(tmp_path: Path, s3: MotoServer, shell: Shell) -> None:
    s3.bucket("tests")
    options = f"region=eu-central-1&endpoint={s3.endpoint}&access_key_id=tests&secret_access_key=tests"
    file = tmp_path / "sluiceway.toml"
    file.write_text(f'[cluster]\nmeta = "s3://tests/{tmp_path.name}?{options}"\n')
    with closed_port() as port:
        check = checks(shell, "--url", f"http://127.0.0.1:{port}", "--config", str(file))["bucket (meta)"]
    assert check["state"] == "ok", check
