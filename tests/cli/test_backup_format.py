"""Manifests of backups that somebody else has written: their checksums are right, and nothing else need be."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.cli.backup_directory import BackupDirectory
from sluiceway.cli.backup_format import MAX_PIECE, Manifest, Piece, SavedBlob, SavedPartition, checksum, seal, unseal
from sluiceway.cli.backup_store import Backups
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server_cli.saved_backup import StoredBackup, restore_backup

AT = datetime(2026, 1, 31, 8, tzinfo=UTC)
ID = "2026-01-31T080000Z"
SECRET = b"not of any backup"


def manifest(meta: Piece, *blobs: SavedBlob) -> Manifest:
    partition = SavedPartition(queue_name="q", incarnation="k7f3q2ma", partition=0, backend="default", records=[meta], blobs=[*blobs])
    return Manifest(backup_id=ID, taken_at=AT, version="1", meta_layout=1, partition_layout=1, meta=[meta], partitions=[partition])


def sealed(content: object) -> bytes:
    """As `seal` does, of anything."""
    text = msgspec.json.encode(content)
    return text + b"\n" + checksum(text).encode() + b"\n"


def changed(place: list[Any], value: object) -> object:
    """A manifest in which the value at that place is another."""
    piece = Piece(f"{ID}.0", 0, 1, "")
    content = copy.deepcopy(msgspec.to_builtins(manifest(piece, SavedBlob(1, "1.0", piece))))
    inner = content
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return content


PACK, BLOB = ["meta", 0, 0], ["partitions", 0, "blobs", 0]
NAMES = ["../packs/x", "/etc/passwd", "a/b", "..", ".hidden", "", "a\n", "a\0", "x" * 300, "\x1b[2J", "a\\b", 5, None]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((PACK, name) for name in NAMES),
        *((place, name) for place in (["backup_id"], ["partitions", 0, "incarnation"]) for name in NAMES),
        *((["partitions", 0, name], "../x") for name in ("queue_name", "backend")),
        *((["meta", 0, place], value) for place in (1, 2) for value in (-1, 1 << 70, "1", 1.5)),
        (["meta", 0, 2], MAX_PIECE + 1),
        (["partitions", 0, "partition"], -1),
        ([*BLOB, 0], -1),
        ([*BLOB, 2, 0], "../x"),
        (["meta"], {}),
        (["taken_at"], "yesterday"),
    ],
)
def test_a_manifest_that_no_backup_wrote_is_refused(place: list[Any], value: object) -> None:
    with pytest.raises(SluicewayError, match=f"backup {ID} is damaged: backups/{ID}.json is no manifest"):
        unseal(sealed(changed(place, value)), ID)


@pytest.mark.parametrize("content", [[], "x", {}, {"format": "1"}, {"format": -1}, {"format": 1}])
def test_so_is_what_is_none(content: object) -> None:
    with pytest.raises(SluicewayError, match="is no manifest"):
        unseal(sealed(content), ID)


def test_what_is_not_json_is_refused() -> None:
    for text in (b"", b"\xff", b"[" * 100_000, b"{"):
        with pytest.raises(SluicewayError, match="is no manifest"):
            unseal(text + b"\n" + checksum(text).encode() + b"\n", ID)


def test_one_that_a_backup_wrote_is_read() -> None:
    written = manifest(Piece(f"{ID}.0", 5, MAX_PIECE, checksum(b"x")))
    assert unseal(seal(written), ID) == written


def saved(folder: Path, meta: Piece) -> Backups:
    """A directory with that one backup, beside a file that is not of it."""
    for name in ("backups", "packs"):
        (folder / "saved" / name).mkdir(parents=True)
    (folder / "secret").write_bytes(SECRET)
    (folder / f"saved/backups/{ID}.json").write_bytes(seal(manifest(meta)))
    return Backups(BackupDirectory(folder / "saved"))


@pytest.mark.parametrize("absolute", [False, True])
def test_nothing_outside_of_the_directory_is_read(tmp_path: Path, absolute: bool) -> None:
    """With the right checksum, it was taken for a piece of the backup."""
    name = str(tmp_path / "secret") if absolute else "../../secret"
    backups = saved(tmp_path, Piece(name, 0, len(SECRET), checksum(SECRET)))
    with pytest.raises(SluicewayError, match="is no manifest"):
        backups.manifest(ID)


@pytest.mark.parametrize("name", ["../backups/x", "a/b", ".x", "", "a\n"])
def test_an_id_is_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SluicewayError, match="is not the id of a backup"):
        saved(tmp_path, Piece(f"{ID}.0", 0, 1, "")).manifest(name)


def test_a_lock_that_is_a_link_harms_no_other_file(tmp_path: Path) -> None:
    """It was emptied."""
    backups = saved(tmp_path, Piece(f"{ID}.0", 0, 1, ""))
    (tmp_path / "saved/lock").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link"), backups.store.changing():
        raise AssertionError("it was locked")
    assert (tmp_path / "secret").read_bytes() == SECRET


def test_records_that_are_none_are_refused_in_words(tmp_path: Path) -> None:
    for number, records in enumerate((b"meta", b"\x92\x01\x90", msgspec.msgpack.encode([1, [["k", 1, 5]]]))):
        folder = tmp_path / str(number)
        backups = saved(folder, Piece(f"{ID}.0", 0, len(records), checksum(records)))
        (folder / f"saved/packs/{ID}.0").write_bytes(records)
        with pytest.raises(SluicewayError, match="nothing was restored: the backup has records that this version cannot read"):
            restore_backup(StoredBackup(backups.manifest(ID), backups), folder / "new", None, lambda _: None)
        assert not (folder / "new").exists()
