"""`sluiceway backup` and `restore` against real servers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sluiceway.cli.backup_directory import BackupDirectory
from sluiceway.cli.backup_store import Backups
from sluiceway.client import Client
from tests.server.backup_rounds import command, drained, run
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess


def ends(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_backups_under_load_have_what_was_acknowledged(tmp_path: Path, workers: int) -> None:
    made = run(tmp_path, 1, workers, workers)
    code, said, _ = ends("backup", "verify", str(tmp_path / "backups"))
    assert code == 0
    assert said.count(": good") == len(made) == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a server's data, and two backups of it in `backups`."""
    folder = tmp_path_factory.mktemp("saved")
    with ServerProcess(folder / "data") as server, Client(server.url) as client:
        client.create_queue("orders-dead")
        client.create_queue("orders", requested_partitions=2, dead_queue="orders-dead")
        for number in range(20):
            client.produce("orders", [f"{number}-" + "x" * 10_000])
        command("backup", str(folder / "backups"), "--url", server.url)
        client.produce("orders", ["new"])
        client.complete("orders", client.lease("orders", batch_size=5, max_partitions=2).ids)
        command("backup", str(folder / "backups"), "--url", server.url)
    return folder


def listed(folder: Path) -> list[Any]:
    code, said, _ = ends("backup", "list", str(folder / "backups"), "--json")
    assert code == 0
    return [json.loads(line) for line in said.splitlines()]


def test_a_second_backup_copies_what_is_new(saved: Path) -> None:
    first, second = listed(saved)
    assert first["new_bytes"] == first["bytes"] > 200_000
    assert second["bytes"] > 150_000 > second["new_bytes"]
    assert (second["queues"], second["partitions"], second["backup"] > first["backup"]) == (2, first["partitions"], True)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (saved / "backups").glob("*/*"))


def test_each_backup_can_be_restored(saved: Path, tmp_path: Path) -> None:
    for number, (each, items) in enumerate(zip(listed(saved), (20, 16), strict=True)):
        data = tmp_path / str(number)
        command("restore", str(saved / "backups"), "--data", str(data), "--backup", each["backup"])
        with ServerProcess(data) as server, Client(server.url) as client:
            found = drained(client)
        assert (len(found), found["new"]) == (items, number)
    code, _, said = ends("restore", str(saved / "backups"), "--data", str(data))
    assert code == 3
    assert "is not empty" in said


def copied(saved: Path, to: Path) -> tuple[Path, Backups]:
    to.mkdir()
    for path in (saved / "backups").glob("*/*"):
        (to / path.parent.name).mkdir(exist_ok=True)
        (to / path.parent.name / path.name).write_bytes(path.read_bytes())
    return to, Backups(BackupDirectory(to))


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "manifest"])
def test_damage_is_found_by_verify_and_refused_by_restore(saved: Path, tmp_path: Path, damage: str) -> None:
    folder, directory = copied(saved, tmp_path / "backups")
    first, second = directory.ids()
    piece = next(piece for piece in directory.manifest(second).pieces() if piece.pack.startswith(f"{first}."))
    pack = folder / "packs" / piece.pack
    if damage == "changed":
        data = bytearray(pack.read_bytes())
        data[piece.at + piece.size // 2] ^= 1
        pack.write_bytes(data)
    elif damage == "truncated":
        pack.write_bytes(pack.read_bytes()[: piece.at + piece.size - 1])
    elif damage == "missing":
        pack.unlink()
    else:
        manifest = folder / "backups" / f"{second}.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"taken_at":"2', b'"taken_at":"1'))
    code, said, _ = ends("backup", "verify", str(folder))
    assert code == 3
    assert f"{second}: damaged" in said
    assert (f"{first}: good" in said) == (damage == "manifest")
    code, _, said = ends("restore", str(folder), "--data", str(tmp_path / "new"))
    assert code == 3
    assert "is damaged" in said
    assert not (tmp_path / "new").exists()


def test_what_an_interrupted_backup_left_goes_with_the_next(saved: Path, tmp_path: Path) -> None:
    folder, directory = copied(saved, tmp_path / "backups")
    left = folder / "packs" / "2020-01-01T000000Z.0"
    left.write_bytes(b"half")
    assert "2020" not in "".join(directory.ids())
    with ServerProcess(tmp_path / "data") as server:
        command("backup", str(folder), "--url", server.url)
    assert not left.exists()
    assert len(directory.ids()) == 3


def test_a_damaged_pack_is_not_relied_on(saved: Path, tmp_path: Path) -> None:
    """A backup into a directory that has lost an earlier pack is whole."""
    folder, directory = copied(saved, tmp_path / "backups")
    for path in (folder / "packs").iterdir():
        path.unlink()
    with ServerProcess(saved / "data") as server:
        made = command("backup", str(folder), "--url", server.url)
    assert made["new_bytes"] == made["bytes"]
    code, said, _ = ends("backup", "verify", str(folder), "--backup", str(made["backup"]))
    assert (code, said) == (0, f"{made['backup']}: good\n")
    assert len(directory.ids()) == 3


def test_old_backups_are_pruned_and_the_others_stay_whole(saved: Path, tmp_path: Path) -> None:
    folder, directory = copied(saved, tmp_path / "backups")
    first, second = directory.ids()
    # The newer one has most of its blobs in the pack of the older one.
    assert ends("backup", "prune", str(folder), "--keep", "2") == (0, "0 backups removed, 0 bytes freed\n", "")
    pruned = command("backup", "prune", str(folder), "--keep", "1")
    assert (pruned["removed"], pruned["freed_bytes"]) == ([first], 0)
    assert directory.ids() == [second]
    assert ends("backup", "verify", str(folder))[0] == 0
    with ServerProcess(tmp_path / "data") as server:
        made = command("backup", str(folder), "--url", server.url)
    # Nor did that remove what the one before still needs.
    assert ends("backup", "verify", str(folder))[0] == 0
    pruned = command("backup", "prune", str(folder), "--keep", "1")
    assert pruned["removed"] == [second]
    assert int(str(pruned["freed_bytes"])) > 200_000
    assert [path.name.partition(".")[0] for path in (folder / "packs").iterdir()] == [made["backup"]]
    assert ends("backup", "verify", str(folder))[0] == 0


def test_nothing_is_pruned_while_a_manifest_is_damaged(saved: Path, tmp_path: Path) -> None:
    folder, directory = copied(saved, tmp_path / "backups")
    manifest = folder / "backups" / f"{directory.ids()[-1]}.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    code, _, said = ends("backup", "prune", str(folder), "--keep", "1")
    assert (code, "is damaged" in said) == (3, True)
    assert len(directory.ids()) == 2


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    code, _, said = ends("backup", "list", str(tmp_path))
    assert (code, "has no backups" in said) == (3, True)
    code, _, said = ends("restore", str(tmp_path), "--data", str(tmp_path / "new"))
    assert (code, "has no backups" in said) == (3, True)
    with ServerProcess(tmp_path / "data") as server:
        command("backup", str(tmp_path / "backups"), "--url", server.url)
    code, _, said = ends("restore", str(tmp_path / "backups"), "--data", str(tmp_path / "new"), "--backup", "other")
    assert (code, "has no backup other" in said) == (3, True)


def test_where_there_is_no_backup_none_is_verified(tmp_path: Path) -> None:
    """Where the first backup failed, or in the folder of another name."""
    for folder in ("packs", "backups"):
        (tmp_path / folder).mkdir()
    code, _, said = ends("backup", "verify", str(tmp_path))
    assert (code, "has no complete backup" in said) == (3, True)
