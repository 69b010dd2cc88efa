"""`sluiceway backup` into a bucket, and `restore` from there, with real servers; and kills, into a directory and into a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from sluiceway.client import Client
from tests.server import backup_kills, backup_rounds
from tests.server.backup_campaign import bucket_url
from tests.server.backup_rounds import command, drained
from tests.server.server_process import ServerProcess, closed_port
from tests.server.test_backup_commands import ends
from tests.servers import azurite_server, versity_server
from tests.servers.azurite_server import AzuriteServer
from tests.servers.moto_server import ENVIRONMENT, MotoServer
from tests.servers.versity_server import VersityServer


@pytest.fixture(scope="module")
def s3() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture
def url(s3: MotoServer, tmp_path: Path) -> str:
    return bucket_url(s3, tmp_path.name)


def fill(client: Client) -> None:
    client.create_queue("orders-dead")
    client.create_queue("orders", requested_partitions=2, dead_queue="orders-dead")
    for number in range(20):
        client.produce("orders", [f"{number}-" + "x" * 10_000])


def taken_twice(data: Path, target: str) -> tuple[str, str]:
    """Two backups of a server: the first has 20 items, the second 16."""
    with ServerProcess(data) as server, Client(server.url) as client:
        fill(client)
        first = command("backup", target, "--url", server.url)
        client.produce("orders", ["new"])
        client.complete("orders", client.lease("orders", batch_size=5, max_partitions=2).ids)
        second = command("backup", target, "--url", server.url)
    assert first["new_bytes"] == first["bytes"]
    assert int(str(second["bytes"])) > 150_000 > int(str(second["new_bytes"]))
    return str(first["backup"]), str(second["backup"])


def items_of(target: str, backup: str, data: Path) -> int:
    """How many items a server has that was restored from the backup."""
    command("restore", target, "--data", str(data), "--backup", backup)
    with ServerProcess(data) as server, Client(server.url) as client:
        return drained(client).total()


def check_target(target: str, folder: Path) -> None:
    """Use every command."""
    first, second = taken_twice(folder / "data", target)
    code, said, _ = ends("backup", "list", target, "--json")
    assert (code, [json.loads(line)["backup"] for line in said.splitlines()]) == (0, [first, second])
    assert ends("backup", "verify", target)[:2] == (0, f"{first}: good\n{second}: good\n")
    assert items_of(target, first, folder / "first") == 20
    assert command("backup", "prune", target, "--keep", "1")["removed"] == [first]
    assert ends("backup", "verify", target)[:2] == (0, f"{second}: good\n")
    assert items_of(target, second, folder / "second") == 16


def test_backups_in_a_bucket_are_as_those_in_a_directory(url: str, tmp_path: Path) -> None:
    check_target(url, tmp_path)


@pytest.mark.slow
def test_backups_in_azure(azurite: AzuriteServer, tmp_path: Path) -> None:
    key = azurite_server.ACCESS_KEY.replace("=", "%3D")
    check_target(f"az://tests/{tmp_path.name}?account={azurite_server.ACCOUNT}&access_key={key}&endpoint={azurite.url}", tmp_path)


@pytest.mark.slow
def test_backups_in_versitygw(versity: VersityServer, tmp_path: Path) -> None:
    keys = f"access_key_id={versity_server.KEY_ID}&secret_access_key={versity_server.SECRET}"
    check_target(f"s3://tests/{tmp_path.name}?region={versity_server.REGION}&endpoint={versity.url}&{keys}", tmp_path)


@pytest.fixture(scope="module")
def versity() -> Iterator[VersityServer]:
    with VersityServer.started_or_skipped() as server:
        yield server


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer.started_or_skipped() as server:
        yield server


def test_keys_and_the_url_come_from_the_environment(s3: MotoServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.bucket("tests")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    url = f"s3://tests/{tmp_path.name}?endpoint={s3.endpoint}"
    monkeypatch.setenv("BACKUPS", url)
    with ServerProcess(tmp_path / "data") as server:
        made = command("backup", "env:BACKUPS", "--url", server.url)
    assert ends("backup", "verify", url)[1] == f"{made['backup']}: good\n"


def test_damage_in_a_bucket_is_found_and_refused(s3: MotoServer, url: str, tmp_path: Path) -> None:
    first, second = taken_twice(tmp_path / "data", url)
    bucket = s3.bucket("tests", tmp_path.name)
    obstore.delete(bucket, f"packs/{first}.0")
    code, said, why = ends("backup", "verify", url)
    assert code == 3
    assert f"{second}: damaged" in said
    assert f"2 backups in s3://tests/{tmp_path.name} cannot be restored" in why
    code, _, why = ends("restore", url, "--data", str(tmp_path / "new"))
    assert code == 3
    assert f"backup {first} is damaged: the pack {first}.0 cannot be read: there is no such object" in why
    assert not (tmp_path / "new").exists()
    # The next backup does not rely on it.
    with ServerProcess(tmp_path / "data") as server:
        made = command("backup", url, "--url", server.url)
    assert ends("backup", "verify", url, "--backup", str(made["backup"]))[0] == 0


def test_refusals_show_no_key(tmp_path: Path) -> None:
    for url, said in {
        "s3://bucket?secret_access_key=hidden": "expected s3://BUCKET/FOLDER, and of options only region, endpoint",
        "gs://bucket/folder?secret_access_key=hidden": "expected gs://BUCKET/FOLDER, and no options",
        "ftp://bucket/folder?secret_access_key=hidden": "expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER",
        "s3:/bucket/folder": "expected s3://BUCKET/FOLDER",
        "env:NO_SUCH_VARIABLE": "the environment variable 'NO_SUCH_VARIABLE' is not set",
    }.items():
        code, _, why = ends("backup", "list", url)
        assert (code, said in why, "hidden" in why) == (3, True, False), why
    with closed_port() as port:
        url = f"s3://bucket/folder?region=none&endpoint=http://127.0.0.1:{port}&access_key_id=tests&secret_access_key=hidden"
        code, _, why = ends("restore", url, "--data", str(tmp_path / "new"))
    assert (code, "s3://bucket/folder: " in why, "hidden" in why) == (4, True, False), why


def test_a_bucket_without_backups(url: str, tmp_path: Path) -> None:
    code, said, why = ends("backup", "list", url)
    assert (code, said, why) == (0, "", f"No complete backup in s3://tests/{tmp_path.name}\n")
    for words in (["restore", url, "--data", str(tmp_path / "new")], ["backup", "verify", url]):
        code, _, why = ends(*words)
        assert (code, "has no complete backup" in why) == (3, True)


def test_backups_in_a_bucket_under_load_have_what_was_acknowledged(url: str, tmp_path: Path) -> None:
    backup_rounds.run(tmp_path, 1, 3, target=url)
    backup_kills.verify(url)


@pytest.mark.crash
@pytest.mark.parametrize("target", ["directory", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_kill_leaves_the_earlier_backups_and_the_next_succeeds(tmp_path: Path, url: str, target: str) -> None:
    backup_kills.run(tmp_path, backup_kills.KINDS, 7, url if target == "s3" else str(tmp_path / "backups"))
