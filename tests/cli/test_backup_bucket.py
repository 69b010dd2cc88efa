"""Backups in a bucket that several commands use at once, each of which may be held up or killed at any of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluiceway.cli import backup_copy
from sluiceway.cli.backup_directory import BackupDirectory
from sluiceway.cli.backup_format import Manifest, Piece
from sluiceway.cli.backup_store import MAX_GAP, MAX_SPAN, Backups, spans
from sluiceway.contract.backup_answers import BackupBegun
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.object_store import UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server_cli import backup_bucket, backup_draft
from sluiceway.server_cli.backup_draft import ABANDONED, is_draft
from tests.cli.backup_processes import Held, KilledError, Process, World
from tests.server.server_process import wait_until

Command = Callable[[Process], object]


def with_small_packs(patch: pytest.MonkeyPatch) -> None:
    """Two blobs fill a pack, and nothing is waited for."""
    patch.setattr(backup_bucket, "PACK_BYTES", 250)
    patch.setattr(backup_draft, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with_small_packs(monkeypatch)
    with World() as world:
        yield world


def with_backups(world: World) -> list[str]:
    """Two backups, of which the first has a pack that the second does not need, and blobs for a third. Returns their ids."""
    world.server.put("a", "b", "c")
    world.process().create()
    del world.server.blobs[2]
    world.server.put("d", "e")
    world.process().create()
    world.server.put("f", "g", "h")
    return world.check()


def requests_of(command: Command) -> int:
    """How many requests the command makes when nothing disturbs it."""
    with pytest.MonkeyPatch.context() as patch, World() as world:
        with_small_packs(patch)
        with_backups(world)
        process = world.process()
        command(process)
        return process.objects.requests


CREATE, PRUNE = range(requests_of(Process.create)), range(requests_of(Process.prune))
"""Numbers of the requests of each command."""


def test_a_later_backup_writes_what_is_new(world: World) -> None:
    world.server.put("a", "b", "c")
    first = world.process().create()
    world.server.put("d")
    second = world.process().create()
    assert first.written == first.size
    assert second.written == len(b"meta" + b"records") + 100 < second.size
    assert world.check() == [first.backup_id, second.backup_id]
    assert world.leftovers() == []


def test_the_objects_are_the_files_of_a_directory(world: World, tmp_path: Path) -> None:
    with_backups(world)
    for name, data in world.bucket.objects.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    backups = Backups(BackupDirectory(tmp_path))
    assert backups.ids() == world.check()
    assert backups.damage(backups.last(), set()) == []


def test_a_removed_backup_takes_along_what_only_it_had(world: World) -> None:
    first, second = with_backups(world)
    assert f"packs/{first}.1" in world.bucket.objects
    assert world.process().backups.prune(1) == ([first], 100)
    assert f"packs/{first}.1" not in world.bucket.objects
    assert world.check() == [second]
    assert world.leftovers() == []


def test_missing_and_altered_objects_are_found(world: World) -> None:
    first, _ = with_backups(world)
    backups = world.process().backups
    del world.bucket.objects[f"packs/{first}.0"]
    world.bucket.objects[f"packs/{first}.1"] = b"x" * 100
    *missing, altered = backups.damage(backups.manifest(first), set())
    assert len(missing) == 4
    assert all(f"the pack {first}.0 cannot be read: there is no such object" in each for each in missing)
    assert f"the pack {first}.1 does not have its checksum" in altered
    with pytest.raises(SluicewayError, match=f"has no backup {first}x"):
        backups.manifest(f"{first}x")


@pytest.mark.parametrize("number", CREATE)
def test_a_backup_that_is_killed_leaves_the_others_and_goes_later(world: World, number: int) -> None:
    before = with_backups(world)
    killed = world.process()
    killed.die_at(number)
    with pytest.raises(KilledError):
        killed.create()
    assert world.check() == before
    # The next one need not wait, and removes nothing that may be of a live one.
    made = world.process().create()
    assert world.check() == [*before, made.backup_id]
    world.now += ABANDONED
    world.process().create()
    world.process().prune()
    assert world.leftovers() == []


@pytest.mark.parametrize("number", PRUNE)
def test_a_removal_that_is_killed_leaves_whole_backups_and_is_repeated(world: World, number: int) -> None:
    with_backups(world)
    killed = world.process()
    killed.die_at(number)
    with pytest.raises(KilledError):
        killed.prune()
    world.check()
    world.process().prune()
    assert len(world.check()) == 1
    assert world.leftovers() == []


def prune_if_it_may(process: Process) -> None:
    try:
        process.prune()
    except SluicewayError as error:
        # A backup is being written, or another removal was quicker.
        assert error.code == "unavailable" or error.field == "backup"


@pytest.mark.parametrize("second", ["create", "prune"])
@pytest.mark.parametrize("first", ["create", "prune"])
def test_commands_at_once_leave_whole_backups(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held at each of its requests, the second at each of its own, and a third removes backups then."""
    with_small_packs(monkeypatch)
    commands: dict[str, tuple[Command, range]] = {"create": (Process.create, CREATE), "prune": (prune_if_it_may, PRUNE)}
    (one, one_at), (other, other_at) = commands[first], commands[second]
    for held_at, also_at in itertools.product(one_at, other_at):
        with World() as world:
            with_backups(world)
            held, also_held = Held(world.process(), one, held_at), Held(world.process(), other, also_at)
            prune_if_it_may(world.process())
            for each in (held, also_held):
                each.finish()
                assert each.error is None
                world.check()
            made = [each.result.backup_id for each in (held, also_held) if isinstance(each.result, Manifest)]
            assert max(made, default=world.check()[-1]) == world.check()[-1]
            world.process().prune()
            assert len(world.check()) == 1
            assert world.leftovers() == []


@pytest.mark.parametrize("number", CREATE)
def test_a_backup_that_was_taken_for_dead_is_not_completed(world: World, number: int) -> None:
    """Its process was suspended, say, and a removal has taken its packs."""
    with_backups(world)
    suspended = Held(world.process(), Process.create, number)
    has_draft = any(is_draft(data) for name, data in world.bucket.objects.items() if name.startswith("backups/"))
    world.now += ABANDONED
    world.process().prune()
    suspended.finish()
    if has_draft:
        assert isinstance(suspended.error, SluicewayError)
        assert "no sign of life" in suspended.error.detail
    world.check()
    world.now += ABANDONED
    world.process().prune()
    assert world.leftovers() == []


@pytest.mark.parametrize("number", range(2 * len(PRUNE)))
def test_a_backup_that_wakes_up_while_it_is_removed_is_complete_or_gone(world: World, number: int) -> None:
    """It is suspended right before its end, and goes on when the removal has come to each of its requests."""
    with_backups(world)
    suspended = Held(world.process(), Process.create, CREATE[-1])
    world.now += ABANDONED
    removal = Held(world.process(), prune_if_it_may, number)
    suspended.finish()
    removal.finish()
    assert removal.error is None
    if isinstance(suspended.result, Manifest):
        assert suspended.result.backup_id in world.check()
    else:
        assert isinstance(suspended.error, SluicewayError)
    world.check()
    world.process().prune()
    assert world.leftovers() == []


def test_a_backup_that_takes_long_keeps_its_draft(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_draft, "BEAT", 0.001)
    with_backups(world)
    process = world.process()
    with process.backups.written(world.server.begin_backup().taken_at) as writer:
        writer.add(b"x" * 1_000)
        writer.add(b"y")
        world.now += 2 * ABANDONED
        name = f"backups/{writer.backup_id}.json"
        wait_until(lambda: str(world.now).encode() in world.bucket.objects[name], "a sign of life")
        with pytest.raises(SluicewayError, match="a backup is being written to s3://tests/backups"):
            world.process().prune()
    # It was given up, and so goes at once.
    assert world.leftovers() == []


@pytest.mark.parametrize("takes_effect", [True, False])
@pytest.mark.parametrize("number", CREATE)
def test_a_write_without_an_answer_is_repeated(world: World, number: int, takes_effect: bool) -> None:
    with_backups(world)
    process = world.process()

    def lose(current: int, call: str) -> None:
        if current == number and call in ("create", "replace"):
            raise UnknownWriteError("no answer")

    setattr(process.objects, "after" if takes_effect else "before", lose)
    try:
        made = process.create()
    except SluicewayError as error:
        # The proof that the bucket is fit is not repeated.
        assert number < 6
        assert error.code == "unavailable"
        return
    assert world.check()[-1] == made.backup_id
    assert world.leftovers() == []


@pytest.mark.parametrize("number", CREATE)
def test_a_bucket_that_fails_fails_the_backup_and_leaves_the_others(world: World, number: int) -> None:
    before = with_backups(world)
    process = world.process()

    def fail(current: int, call: str) -> None:
        if current >= number:
            raise UnknownWriteError("reset") if call in ("create", "replace") else StoreUnavailableError("reset")

    process.objects.before = fail
    with pytest.raises(SluicewayError) as caught:
        process.create()
    assert caught.value.code == "unavailable"
    assert "s3://tests/backups: reset" in caught.value.detail
    assert world.check() == before


def test_a_backup_is_complete_though_the_server_has_gone_by_then(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_backup(backup_id: str) -> None:
        raise SluicewayError("unavailable", "cannot reach the server")

    monkeypatch.setattr(world.server, "end_backup", end_backup)
    assert world.process().create().backup_id == world.check()[0]


def test_another_backup_of_the_server_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup_copy, "PAUSE", 0.0)
    refusals = [SluicewayError("too_many_requests", "another backup of this server is being read")] * (2 * backup_copy.TRIES)
    begin = world.server.begin_backup

    def begin_backup() -> BackupBegun:
        if refusals:
            raise refusals.pop()
        return begin()

    monkeypatch.setattr(world.server, "begin_backup", begin_backup)
    assert world.process().create().backup_id == world.check()[0]
    refusals.append(SluicewayError("too_many_requests", "another backup of this server is being read"))
    monkeypatch.setattr(backup_copy, "OTHER_BACKUP", -1.0)
    with pytest.raises(SluicewayError, match="another backup"):
        world.process().create()


def test_pieces_are_read_together_where_they_follow_one_another() -> None:
    def piece(pack: str, at: int, size: int = 10) -> Piece:
        return Piece(pack, at, size, "")

    near = [piece("a", 0), piece("a", 10), piece("a", 20 + MAX_GAP)]
    assert list(spans(near)) == [near]
    apart = [piece("a", 0), piece("a", 11 + MAX_GAP), piece("b", 21 + MAX_GAP), piece("a", 0), piece("a", 10, MAX_SPAN)]
    assert list(spans(apart)) == [[each] for each in apart]
    assert list(spans([])) == []
