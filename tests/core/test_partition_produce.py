"""Produce: offsets, blobs, scheduled rows, keys."""

from __future__ import annotations

import pytest

from sluiceway.core.partition import idempotency_keys
from sluiceway.core.partition import idempotency_keys as keys_module
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import BLOB_BYTES, GROUP_KEEP, KEY_WINDOW
from sluiceway.model.changes import RecordKind
from sluiceway.model.requests import Disposition, ProduceKey
from tests.core.core_model import START, Rig, Row, Served, batch_of, rows_of


def refused(rig: Rig, rows: list[Row], key: ProduceKey, now: int = START) -> str:
    with pytest.raises(SluicewayError) as caught:
        rig.produce(rows, now, key)
    return caught.value.code


def test_offsets_are_dense_and_rows_come_back_as_they_were() -> None:
    rig = Rig()
    assert rig.produce(rows_of("a", "b")) == (0, 2, False)
    assert rig.produce([Row(b"c", None, "k")]) == (2, 1, False)
    rig.commit()
    assert rig.ready() == [Served(0, 0, 0, b"a"), Served(1, 1, 0, b"b"), Served(2, 2, 0, b"c", "k")]


def test_small_produces_of_one_turn_share_a_blob_and_an_extent() -> None:
    rig = Rig()
    for n in range(5):
        rig.produce([Row(b"%d" % n, None, "k" if n == 3 else None)])
    changes = rig.commit()
    assert changes is not None
    assert set(changes.blobs) == {0}
    assert [key for key in changes.puts if key[0] is RecordKind.EXTENT] == [(RecordKind.EXTENT, "0")]
    assert [(served.payload, served.kind) for served in rig.ready()] == [(b"%d" % n, "k" if n == 3 else None) for n in range(5)]


def test_a_blob_grows_in_its_own_turn_only() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    rig.commit()
    rig.produce(rows_of("b"))
    changes = rig.commit()
    assert changes is not None
    assert set(changes.blobs) == {1}
    assert [served.payload for served in rig.ready()] == [b"a", b"b"]


def test_a_large_produce_stands_alone() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    rig.produce([Row(b"x" * BLOB_BYTES)])
    rig.produce(rows_of("b"))
    changes = rig.commit()
    assert changes is not None
    assert set(changes.blobs) == {0, 1, 2}


def test_an_item_that_is_put_back_between_two_produces_does_not_upset_the_rows() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    rig.commit()
    rig.lease(1)
    rig.produce(rows_of("b"))
    rig.settle([0], Disposition("retry"))
    rig.produce(rows_of("c"))
    rig.commit()
    assert rig.ready() == [Served(1, 1, 0, b"b"), Served(2, 0, 1, b"a"), Served(3, 3, 0, b"c")]


def test_scheduled_rows_wait_beside_the_line_and_leave_holes() -> None:
    rig = Rig()
    late, later = START + 10, START + 20
    rows = [Row(b"a"), Row(b"b", later), Row(b"c", START), Row(b"d", late), Row(b"e", later), Row(b"f", START - 5)]
    assert rig.produce(rows) == (0, 6, False)
    rig.commit()
    assert [(served.offset, served.payload) for served in rig.ready()] == [(0, b"a"), (2, b"c"), (5, b"f")]
    assert rig.machine.log.scheduled_count == 3
    assert len(rig.machine.log.dues) == 2
    assert rig.machine.next_timer() == late


def test_rows_that_are_due_at_many_times_wait_in_as_many_entries() -> None:
    rig = Rig()
    rig.produce([Row(b"%d" % n, START + 1 + n * 7 % 50) for n in range(100)])
    rig.commit()
    assert len(rig.machine.log.dues) == 50
    for at in range(50):
        assert rig.machine.tick(START + 1 + at) == 2
    rig.commit()
    assert [served.payload for served in rig.ready()] == [b"%d" % n for n in sorted(range(100), key=lambda n: (n * 7 % 50, n))]


def test_a_blob_that_is_settled_whole_in_its_first_turn_is_neither_written_nor_added_to() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    lease = rig.lease(1)
    rig.close(lease)
    rig.produce(rows_of("b"))
    changes = rig.commit()
    assert changes is not None
    assert set(changes.blobs) == {1}
    assert not changes.dropped_blobs
    assert rig.ready() == [Served(1, 1, 0, b"b")]


# Keys


@pytest.mark.parametrize("key", [ProduceKey("k"), ProduceKey("k", "g", 4)])
def test_a_repetition_is_answered_and_adds_nothing(key: ProduceKey) -> None:
    rig = Rig()
    assert rig.produce(rows_of("a", "b"), START, key) == (0, 2, False)
    assert rig.produce(rows_of("a", "b"), START, key) == (0, 2, True)
    rig.reload()
    assert rig.produce(rows_of("a", "b"), START + 5, key) == (0, 2, True)
    changes = rig.commit()
    assert changes is not None
    assert not changes.puts
    assert (rig.machine.log.header.produced, rig.machine.log.header.deduplicated, rig.machine.log.ready_count) == (2, 4, 2)


@pytest.mark.parametrize("key", [ProduceKey("k"), ProduceKey("k", "g", 4)])
def test_another_body_under_the_same_key_is_a_conflict_and_changes_nothing(key: ProduceKey) -> None:
    rig = Rig()
    rig.produce(rows_of("a"), START, key)
    rig.commit()
    assert refused(rig, rows_of("b"), key) == "key_conflict"
    assert refused(rig, [Row(b"a", START + 1)], key) == "key_conflict"
    assert rig.commit() is None


def test_a_lone_key_and_a_group_of_the_same_name_are_two() -> None:
    rig = Rig()
    rig.produce(rows_of("a"), START, ProduceKey("n"))
    assert rig.produce(rows_of("b"), START, ProduceKey("n", "n", 0)) == (1, 1, False)


def test_a_group_forgets_its_keys_when_its_sequence_moves_on_and_refuses_the_past() -> None:
    rig = Rig()
    rig.produce(rows_of("a"), START, ProduceKey("k", "g", 1))
    rig.produce(rows_of("b"), START, ProduceKey("l", "g", 1))
    assert rig.produce(rows_of("a"), START, ProduceKey("k", "g", 1)) == (0, 1, True)
    assert rig.produce(rows_of("c"), START, ProduceKey("k", "g", 2)) == (2, 1, False)
    rig.reload()
    assert refused(rig, rows_of("b"), ProduceKey("l", "g", 1)) == "stale_sequence"
    assert rig.produce(rows_of("c"), START, ProduceKey("k", "g", 2)) == (2, 1, True)
    assert list(rig.machine.keys.records["gg"].seen) == ["k"]


def test_a_lone_key_lives_for_its_window_and_a_groups_does_not_end_with_it() -> None:
    rig = Rig()
    lone, grouped = ProduceKey("k"), ProduceKey("k", "g", 1)
    rig.produce(rows_of("a"), START, lone)
    rig.produce(rows_of("b"), START, grouped)
    rig.reload()
    assert rig.produce(rows_of("a"), START + KEY_WINDOW - 1, lone)[2]
    assert not rig.produce(rows_of("a"), START + KEY_WINDOW, lone)[2]
    assert rig.produce(rows_of("b"), START + KEY_WINDOW, grouped)[2]
    rig.commit()


def test_a_group_is_forgotten_long_after_its_last_produce_and_the_servers_own_never() -> None:
    rig = Rig()
    client, own = ProduceKey("k", "g", 1), ProduceKey("k", "transfer/q.0", 1)
    rig.produce(rows_of("a"), START, client)
    rig.produce(rows_of("a"), START, own)
    rig.produce(rows_of("b"), START + 1_000, client._replace(key="l"))
    rig.reload()
    assert rig.produce(rows_of("a"), START + GROUP_KEEP + 999, client)[2], "used since"
    rig.reload()
    assert not rig.produce(rows_of("a"), START + GROUP_KEEP + 1_000, client)[2]
    assert rig.produce(rows_of("a"), START + 9 * GROUP_KEEP, own)[2]
    rig.commit()
    assert [key for kind, key in rig.disk.records if kind is RecordKind.KEY] == ["gtransfer/q.0"]


def test_old_keys_leave_the_store_with_later_turns() -> None:
    rig = Rig()
    for n in range(3):
        rig.produce(rows_of("a"), START + n, ProduceKey(f"k{n}"))
    rig.reload()
    rig.produce(rows_of("a"), START + KEY_WINDOW + 1)
    rig.commit()
    assert [key for kind, key in rig.disk.records if kind is RecordKind.KEY] == ["kk2"]


def test_a_shorter_window_ends_sooner_than_keys_that_came_before() -> None:
    rig = Rig()
    long, short = ProduceKey("long"), ProduceKey("short", window=60_000)
    rig.produce(rows_of("a"), START, long)
    rig.produce(rows_of("b"), START + 1, short)
    rig.reload()
    assert rig.produce(rows_of("b"), START + 60_000, short)[2]
    assert not rig.produce(rows_of("b"), START + 60_001, short)[2]
    assert rig.produce(rows_of("a"), START + 60_001, long)[2]
    rig.commit()


def test_keys_that_are_too_many_are_refused_until_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MAX_KEYS", 2)
    rig = Rig()
    rig.produce(rows_of("a"), START, ProduceKey("k"))
    rig.produce(rows_of("a"), START, ProduceKey("l"))
    rig.commit()
    assert refused(rig, rows_of("a"), ProduceKey("m")) == "too_many_requests"
    assert rig.produce(rows_of("a"), START, ProduceKey("l"))[2]
    assert not rig.produce(rows_of("a"), START + KEY_WINDOW, ProduceKey("m"))[2]
    rig.commit()


def test_a_repetition_does_not_depend_on_how_the_rows_lie_in_memory() -> None:
    rig = Rig()
    batch = batch_of(rows_of("x", "a", "b", "y"))
    rig.machine.produce(batch.slice(1, 2), START, ProduceKey("k"))
    assert rig.produce(rows_of("a", "b"), START, ProduceKey("k")) == (0, 2, True)
    rig.commit()
    assert [served.payload for served in rig.ready()] == [b"a", b"b"]


def test_a_group_takes_so_many_keys_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_keys, "MAX_GROUP_KEYS", 3)
    rig = Rig()
    for name in "abc":
        assert rig.produce(rows_of("x"), key=ProduceKey(name, "group", 1))[1:] == (1, False)
    with pytest.raises(SluicewayError) as refused:
        rig.produce(rows_of("x"), key=ProduceKey("d", "group", 1))
    assert (refused.value.code, refused.value.field) == ("invalid_request", "idempotency_group")
    assert rig.machine.log.header.next == 3
    assert rig.produce(rows_of("x"), key=ProduceKey("a", "group", 1)) == (0, 1, True)
    assert rig.produce(rows_of("x"), key=ProduceKey("d", "group", 2)) == (3, 1, False)
    assert rig.produce(rows_of("x"), key=ProduceKey("d", "another", 1)) == (4, 1, False)
