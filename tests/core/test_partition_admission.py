"""What a partition durably takes: shut and sealed, with homes of keys that come and go; and the edges of items that move."""

from __future__ import annotations

import pytest

from sluiceway.core.partition import admission, idempotency_keys
from sluiceway.core.partition.key_slots import slot
from sluiceway.core.partition.partition import Placed
from sluiceway.core.partition.queries import explain, lives_of, open_slices, stats_of
from sluiceway.core.partition.records import Header, pack, unpack_header, unpack_lease
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import KEY_WINDOW
from sluiceway.model.peers import Shutting
from sluiceway.model.requests import DONE, CallPart, Disposition, MovedItem, ProduceKey
from tests.core.core_model import EVERYTHING, START, Rig, Row, batch_of, rows_of

OF = 8
ALL = range(OF)


def code(error: pytest.ExceptionInfo[SluicewayError]) -> str:
    return error.value.code


# ---- what is stored -------------------------------------------------------------------------------------------


def test_a_header_from_before_rebalances_is_open() -> None:
    old = pack([7, 3, 1, 0, START, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    header = unpack_header(old)
    assert (header.next, header.head, header.redriven) == (7, 3, 0)
    assert (header.moved, header.moved_in, header.shut, header.closed_slots, header.taken_cursor) == (0, 0, 0, b"", 0)


def test_a_header_grows_by_less_than_fifty_bytes_though_all_slots_are_closed() -> None:
    rig = Rig()
    before = len(pack(rig.machine.log.header))
    rig.machine.admission.give_keys(range(256), 256, 1_000, 0)
    assert len(pack(rig.machine.log.header)) - before < 50
    assert len(pack(Header())) <= 30


def test_a_lease_from_before_rebalances_is_loaded() -> None:
    assert unpack_lease(pack([[[0, 2]], "c", 5, None, None, b"", [], [], None, False])).dues == []


# ---- shut -----------------------------------------------------------------------------------------------------


def test_a_partition_is_sealed_only_when_it_has_nothing() -> None:
    rig = Rig()
    rig.produce(rows_of("ready"))
    for step in ("ready", "leased", "due", "moving"):
        rig.machine.admission.shut("sealed", 1)
        assert rig.machine.admission.shutting == "open", step
        if step == "ready":
            rig.lease(1)
        elif step == "leased":
            rig.settle([0], Disposition("retry", retry_after=50))
        elif step == "due":
            number, _ = rig.machine.transfers.move_out(1, EVERYTHING, 1, True, START)
        rig.reload()
    rig.machine.transfers.end(number)
    rig.machine.admission.shut("sealed", 1)
    rig.reload()
    assert rig.machine.admission.shutting == "sealed"
    assert rig.machine.admission.is_empty


def test_shut_follows_the_highest_cursor() -> None:
    rig = Rig()
    rig.machine.admission.shut("read_only", 2)
    shown: list[str] = []
    wishes: list[Shutting] = ["open", "sealed", "read_only"]
    for shutting in wishes:
        rig.machine.admission.shut(shutting, 2)
        shown.append(rig.machine.admission.shutting)
    assert shown == ["read_only", "sealed", "sealed"], "under one cursor it is only shut further"
    with pytest.raises(SluicewayError) as error:
        rig.machine.admission.shut("open", 1)
    assert code(error) == "version_conflict"
    rig.machine.admission.shut("open", 3)
    rig.reload()
    assert rig.machine.admission.shutting == "open"
    with pytest.raises(SluicewayError) as error:
        rig.machine.admission.follow_cursor(2)
    assert code(error) == "version_conflict"


def test_a_seal_that_fails_still_shuts_out_older_coordinators() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    rig.machine.admission.shut("sealed", 5)
    rig.reload()
    assert rig.machine.admission.shutting == "open"
    with pytest.raises(SluicewayError):
        rig.machine.admission.shut("read_only", 4)


def test_to_be_shut_as_it_is_writes_nothing() -> None:
    rig = Rig()
    rig.machine.admission.shut("read_only", 2)
    rig.commit()
    rig.machine.admission.shut("read_only", 2)
    assert not rig.machine.is_changed


# ---- moved items come in --------------------------------------------------------------------------------------


def moved(number: int) -> ProduceKey:
    return ProduceKey(f"move/q.1/{number}", "move/q.1", number)


def test_what_was_on_its_way_arrives_until_the_partition_is_sealed() -> None:
    rig = Rig()
    body, lives = batch_of(rows_of("a")), [MovedItem(1, START - 5)]
    rig.machine.admission.shut("read_only", 1)
    assert rig.machine.admission.refuses(None)
    assert rig.machine.admission.refuses(ProduceKey("k"))
    assert not rig.machine.admission.refuses(moved(1))
    rig.machine.produce(body, START, moved(1), lives)
    rig.settle([rig.lease(1).parts[0].first])
    rig.machine.admission.shut("sealed", 1)
    rig.reload()
    assert rig.machine.admission.shutting == "sealed"
    assert rig.machine.admission.refuses(moved(2))
    assert not rig.machine.admission.refuses(moved(1)), "it says what it has taken"
    assert rig.machine.produce(body, START, moved(1), lives).repeated


@pytest.mark.parametrize(
    "lives",
    [
        [MovedItem(1, START)],
        [MovedItem(2, START), MovedItem(1, START)],
        [MovedItem(2, START), MovedItem(0, START)],
        [MovedItem(2, START, bundle=-1)],
        [MovedItem(2, START, bundle=1 << 64)],
    ],
)
def test_lives_are_those_of_all_rows(lives: list[MovedItem]) -> None:
    rig = Rig()
    with pytest.raises(SluicewayError) as error:
        rig.machine.produce(batch_of(rows_of("a", "b")), START, moved(1), lives)
    assert code(error) == "invalid_request"
    assert not rig.machine.is_changed or rig.machine.admission.is_empty


def test_items_keep_their_time_and_share_blobs_by_it() -> None:
    rig = Rig(expire_timeout=10)
    lives = [
        MovedItem(1, START - 9, 2),
        MovedItem(2, START - 9, 3, START + 50),
        MovedItem(1, START - 8, 0, 0, START + 7),
        MovedItem(1, START - 8, 1, 0, START),
    ]
    rig.machine.produce(batch_of(rows_of("a", "b", "c", "d", "e")), START, moved(1), lives)
    rig.machine.produce(batch_of(rows_of("f")), START)
    rig.reload()
    assert {number: blob.written_at for number, blob in rig.machine.log.blobs.items()} == {0: START - 9, 3: START - 8, 5: START}
    assert [(served.payload, served.attempts) for served in rig.ready()] == [(b"a", 2), (b"b", 3), (b"c", 3), (b"e", 1), (b"f", 0)]
    assert [extent.expires_at for extent in rig.machine.log.ready] == [0, START + 50, 0, START + 10]
    assert [(due.due_at, due.expires_at) for due in rig.machine.log.dues.values()] == [(START + 7, 0)]
    assert (rig.machine.log.header.produced, rig.machine.log.header.moved_in) == (1, 5)


# ---- moved items go out ---------------------------------------------------------------------------------------


def test_a_move_does_not_hold_more_blobs_than_there_is_room() -> None:
    rig = Rig()
    for _ in range(4):
        rig.produce([Row(bytes(1_000)), Row(b"")])
        rig.commit()
    each = rig.machine.log.blobs[0].nbytes
    assert rig.machine.transfers.move_out(9, 2 * each, 1, False, START)[1] == 4
    assert rig.machine.transfers.move_out(9, 1, 1, False, START)[1] == 2, "one at least"
    rig.reload()
    assert stats_of(rig.machine, 0).transferring == 6


def test_what_has_expired_is_left_to_its_timer() -> None:
    rig = Rig(keeps_dead=True, expire_timeout=10)
    rig.produce(rows_of("a"))
    assert rig.machine.transfers.move_out(1, EVERYTHING, 1, False, START + 10) == (0, 0)
    assert rig.machine.transfers.move_out(1, EVERYTHING, 1, False, START + 9)[1] == 1


def test_items_that_come_alone_are_moved_together() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b", "c"))
    rig.lease(3, timeout=1)
    rig.machine.tick(START + 1)
    number, items = rig.machine.transfers.move_out(9, EVERYTHING, 1, False, START + 1)
    assert items == 3
    assert lives_of(rig.machine.transfers.by_number[number], rig.machine.log.bundles) == (MovedItem(3, START, 1, max_lease_size=1),)


def test_scheduled_items_go_by_their_time_in_pieces_and_leave_nothing_in_the_line() -> None:
    rig = Rig()
    rig.produce(rows_of("behind"))
    rig.produce([Row(b"a", START + 20), Row(b"b", START + 10), Row(b"c", START + 20), Row(b"d", START + 30)])
    rig.commit()
    first, items = rig.machine.transfers.move_out(2, EVERYTHING, 1, True, START)
    assert items == 2
    assert [life.due_at for life in lives_of(rig.machine.transfers.by_number[first], rig.machine.log.bundles)] == [START + 10, START + 20]
    assert [extent.first for extent in rig.machine.log.ready] == [0]
    rig.reload()
    assert [life.due_at for life in lives_of(rig.machine.transfers.by_number[first], rig.machine.log.bundles)] == [START + 10, START + 20]
    rig.machine.transfers.call_back(first)
    rig.reload()
    assert rig.machine.log.scheduled_count == 4
    second, items = rig.machine.transfers.move_out(9, EVERYTHING, 1, True, START)
    assert items == 4
    offset = open_slices(rig.machine.transfers.by_number[second])[0].offsets.tolist()[0]
    assert "partition 1" in explain(rig.machine, offset).reason
    rig.machine.transfers.end(second)
    rig.reload()
    assert (rig.machine.log.header.moved, rig.machine.log.ready_count, rig.machine.log.scheduled_count) == (4, 1, 0)
    assert rig.machine.next_timer() is None


# ---- keys -----------------------------------------------------------------------------------------------------


def test_given_keys_are_answered_elsewhere_as_they_were_here() -> None:
    here, there = Rig(), Rig()
    for key in (ProduceKey("k"), ProduceKey("x", "g", 3), ProduceKey("y", "g", 3), ProduceKey("t", "transfer/p.0", 9), moved(1)):
        here.machine.produce(batch_of(rows_of("a")), START, key, [MovedItem(1, START)] if key == moved(1) else ())
    given = here.machine.admission.give_keys(ALL, OF, 1, 0)
    assert sorted(given) == ["gg", "gtransfer/p.0", "kk"], "what partitions moved stays with them"
    here.reload()
    assert here.machine.admission.refuses(ProduceKey("k"))
    assert not here.machine.admission.refuses(None)
    assert here.machine.admission.give_keys(ALL, OF, 1, 0) == given
    there.machine.admission.take_keys(ALL, OF, 1, given)
    there.reload()
    assert there.machine.produce(batch_of(rows_of("a")), START, ProduceKey("y", "g", 3)) == Placed(2, 1, True, 0)
    assert there.machine.produce(batch_of(rows_of("a")), START, ProduceKey("t", "transfer/p.0", 9)) == Placed(3, 1, True, 0)
    with pytest.raises(SluicewayError) as error:
        there.machine.produce(batch_of(rows_of("a")), START, ProduceKey("z", "g", 2))
    assert code(error) == "stale_sequence"
    # And on, and back: it is said of the first partition all the way.
    further = there.machine.admission.give_keys(ALL, OF, 2, 1)
    here.machine.admission.take_keys(ALL, OF, 2, further)
    assert here.machine.produce(batch_of(rows_of("a")), START, ProduceKey("k")) == Placed(0, 1, True, 0)


def test_windows_go_on_as_they_began() -> None:
    here, there = Rig(), Rig()
    here.produce(rows_of("a"), START, ProduceKey("k"))
    there.machine.admission.take_keys(ALL, OF, 1, here.machine.admission.give_keys(ALL, OF, 1, 0))
    late = START + KEY_WINDOW
    assert there.machine.produce(batch_of(rows_of("a")), late - 1, ProduceKey("k")).repeated
    assert not there.machine.produce(batch_of(rows_of("a")), late, ProduceKey("k")).repeated
    there.commit()
    assert there.machine.produce(batch_of(rows_of("a")), late, ProduceKey("k")).repeated


def test_what_comes_back_replaces_what_was_remembered() -> None:
    """A key that was forgotten where it was meanwhile is new."""
    here, there = Rig(), Rig()
    key = ProduceKey("k", window=1_000)
    here.produce(rows_of("a"), START, key)
    there.machine.admission.take_keys(ALL, OF, 1, here.machine.admission.give_keys(ALL, OF, 1, 0))
    there.machine.keys.forget_old(START + 1_000)
    here.machine.admission.take_keys(ALL, OF, 2, there.machine.admission.give_keys(ALL, OF, 2, 1))
    here.reload()
    assert not here.machine.keys.records
    # Its timer is still there.
    here.produce(rows_of("b"), START + 1, key._replace(window=5_000))
    here.machine.keys.forget_old(START + 1_000)
    assert here.machine.keys.has(key)


def test_the_home_that_stays_goes_on_as_it_was() -> None:
    rig = Rig()
    rig.produce(rows_of("a"), START, ProduceKey("k"))
    rig.machine.admission.give_keys(ALL, OF, 1, 0)
    rig.machine.admission.take_keys(ALL, OF, 2, None)
    rig.reload()
    assert not rig.machine.admission.refuses(ProduceKey("k"))
    assert rig.machine.produce(batch_of(rows_of("a")), START, ProduceKey("k")).repeated


def test_only_the_slots_that_were_given_are_closed() -> None:
    rig = Rig()
    place = slot(ProduceKey("k"), OF)
    rig.machine.admission.give_keys([each for each in ALL if each != place], OF, 1, 0)
    assert not rig.machine.admission.refuses(ProduceKey("k"))
    rig.machine.admission.give_keys([place], OF, 1, 0)
    assert rig.machine.admission.refuses(ProduceKey("k"))
    rig.machine.admission.take_keys([place], OF, 2, {})
    assert not rig.machine.admission.refuses(ProduceKey("k"))
    with pytest.raises(SluicewayError) as error:
        rig.machine.admission.give_keys([place], 2 * OF, 3, 0)
    assert code(error) == "version_conflict"


def test_old_coordinators_neither_give_nor_take() -> None:
    rig = Rig()
    rig.machine.admission.take_keys([0], OF, 5, {})
    for cursor in (4, 5):
        with pytest.raises(SluicewayError) as error:
            rig.machine.admission.give_keys([0], OF, cursor, 0)
        assert code(error) == "version_conflict"
    rig.machine.admission.give_keys([0], OF, 7, 0)
    closed = rig.machine.log.header.closed_slots
    rig.machine.admission.take_keys([0], OF, 6, {})
    assert rig.machine.log.header.closed_slots == closed


def test_too_many_keys_for_one_answer_are_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_KEYS_BYTES", 50)
    rig = Rig()
    for name in "ab":
        rig.produce(rows_of("x"), START, ProduceKey(name))
    with pytest.raises(SluicewayError) as error:
        rig.machine.admission.give_keys(ALL, OF, 1, 0)
    assert code(error) == "too_many_items"
    rig.reload()
    assert rig.machine.admission.refuses(ProduceKey("a"))
    assert sorted({*rig.machine.admission.give_keys([slot(ProduceKey("a"), OF)], OF, 1, 0)}) == ["ka"]


def test_keys_of_a_slot_are_given_and_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls, of groups, and of the parts of divided calls: a piece that comes twice replaces itself, and one that comes late nothing."""
    monkeypatch.setattr(admission, "MAX_KEYS_BYTES", 1_000)
    here, there, pieces = Rig(), Rig(), 16
    batch, part = batch_of(rows_of("a", "b")), CallPart(b"whole", ((3, 2),))
    calls = [ProduceKey(f"call {number}") for number in range(400) if slot(ProduceKey(f"call {number}"), OF) == 3]
    group = ProduceKey("x", next(name for name in map(str, range(400)) if slot(ProduceKey("x", name), OF) == 3), 1)
    parts = [ProduceKey(f"part {number}") for number in range(30)]
    places = {key: here.machine.produce(batch, START, key) for key in [*calls, group]}
    places |= {key: here.machine.produce_part(batch, START, key, part) for key in parts}
    with pytest.raises(SluicewayError) as error:
        here.machine.admission.give_keys([3], OF, 5, 0)
    assert code(error) == "too_many_items"
    given = [here.machine.admission.give_keys([3], OF, 5, 0, (number, pieces)) for number in range(pieces)]
    assert sum(map(len, given)) == len(places)
    for number in (0, *range(pieces), 7):
        there.machine.admission.take_piece([3], OF, 5, given[number], (number, pieces))
        there.reload()
        assert there.machine.admission.refuses(calls[0]), "not all of the keys are there"
    there.machine.admission.take_piece([3], OF, 4, {}, (0, 1))
    there.machine.admission.take_keys([3], OF, 5, None)
    there.machine.admission.take_piece([3], OF, 5, {}, (0, 1))
    there.reload()
    assert not there.machine.admission.refuses(calls[0])
    for key in [*calls, group]:
        assert there.machine.produce(batch, START, key) == places[key]._replace(repeated=True, partition=0)
    for key in parts:
        again = there.machine.produce_part(batch, START, key, part)
        assert again == places[key]._replace(repeated=True, partition=0)
    assert sorted(here.machine.keys.of_slots([3], OF, 0)) == sorted(there.machine.keys.of_slots([3], OF, 0)), "each is there once"


def test_a_full_memory_does_not_hold_up_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency_keys, "MAX_KEYS", 1)
    rig = Rig()
    rig.produce(rows_of("x"), START, ProduceKey("a"))
    with pytest.raises(SluicewayError):
        rig.produce(rows_of("x"), START, ProduceKey("b"))
    assert not rig.machine.produce(batch_of(rows_of("x")), START, moved(1), [MovedItem(1, START)]).repeated


def test_a_move_group_is_remembered_for_ever() -> None:
    rig = Rig()
    rig.machine.produce(batch_of(rows_of("x")), START, moved(1), [MovedItem(1, START)])
    rig.settle([rig.lease(1).parts[0].first], DONE)
    assert rig.machine.produce(batch_of(rows_of("x")), START + 10_000 * KEY_WINDOW, moved(1), [MovedItem(1, START)]).repeated
