"""What a partition keeps of failed attempts: for people who ask, and for the headers of dead items."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from sluiceway.core.partition import failures, queries
from sluiceway.model.changes import RecordKind
from sluiceway.model.requests import DONE, RELEASE, Disposition, Failure
from tests.core.core_model import START, Rig, rows_of


def filled(body: str, *, max_attempts: int = 0, keeps_dead: bool = False) -> Rig:
    """A partition with one blob, of one row a letter."""
    rig = Rig(max_attempts=max_attempts, keeps_dead=keeps_dead)
    rig.produce(rows_of(*body))
    rig.commit()
    return rig


def failed(reason: str, trace: str = "", **fields: Any) -> Disposition:
    return Disposition("retry", retry_after=0, reason=reason, trace=trace, **fields)


def known(rig: Rig, offset: int) -> list[tuple[int, str]]:
    """The attempts and reasons that an explanation of that item has."""
    return [(each.attempt, each.reason) for each in queries.explain(rig.machine, offset).failures]


def notes(rig: Rig) -> int:
    return sum(kind is RecordKind.FAILURE for kind, _ in rig.disk.records)


def lease_all(rig: Rig, now: int = START) -> list[int]:
    """The offsets of all ready items, which are leased."""
    lease = rig.lease(rig.machine.log.ready_count, now)
    return [int(offset) for piece in queries.open_slices(lease) for offset in piece.offsets]


def told(rig: Rig) -> dict[bytes, list[dict[str, Any]]]:
    """What the header of each dead item on its way says, by payload."""
    found: dict[bytes, list[dict[str, Any]]] = {}
    for transfer in rig.machine.transfers.by_number.values():
        payloads = [each.payload for each in rig.served(queries.open_slices(transfer))]
        opens = sorted(transfer.open_positions())
        for those, text in transfer.failures:
            found |= {payloads[opens.index(position)]: json.loads(text) for position in those}
    return found


def test_an_attempt_says_what_its_client_said() -> None:
    rig = filled("a")
    rig.lease(1, client="worker")
    rig.settle([0], failed("ValueError: no such customer", "line 1\nline 2", host="node-7", handler_time=1_500), START + 7)
    rig.reload()
    (failure,) = queries.explain(rig.machine, 1).failures
    assert failure == Failure(1, START + 7, "worker", "ValueError: no such customer", "line 1\nline 2", "node-7", 1_500)


def test_the_last_five_attempts_are_kept_while_the_item_is_put_back() -> None:
    rig = filled("ab")
    for attempt in range(1, 9):
        rig.settle(lease_all(rig)[:1], failed(f"no {attempt}"))
        rig.reload()
    assert known(rig, rig.machine.log.header.next - 1) == [(attempt, f"no {attempt}") for attempt in range(4, 9)]
    assert notes(rig) == 5


def test_items_that_fail_alike_share_a_note() -> None:
    rig = filled("a" * 200)
    for attempt in range(1, 4):
        rig.settle(lease_all(rig), failed("down"))
        rig.commit()
        assert notes(rig) == attempt


def test_one_by_one_at_several_times_they_share_it_too() -> None:
    rig = filled("abc")
    for offset in lease_all(rig):
        rig.settle([offset], failed("down"), START + offset)
    rig.reload()
    assert notes(rig) == 1
    assert [known(rig, offset) for offset in (3, 4, 5)] == [[(1, "down")]] * 3


def test_a_lease_that_runs_out_is_a_failed_attempt_and_a_release_is_none() -> None:
    rig = filled("a")
    rig.lease(1, client="lost", timeout=10)
    rig.machine.tick(START + 10)
    (offset,) = lease_all(rig, START + 10)
    rig.settle([offset], RELEASE, START + 10)
    rig.reload()
    (failure,) = queries.explain(rig.machine, rig.machine.log.header.next - 1).failures
    assert (failure.attempt, failure.client_id, failure.reason) == (1, "lost", "the lease ran out")


def test_a_leased_and_a_scheduled_item_tell_of_their_failures() -> None:
    rig = filled("ab")
    first, second = lease_all(rig)
    rig.settle([first], Disposition("retry", retry_after=1_000, reason="later"))
    rig.settle([second], failed("now"))
    (leased,) = lease_all(rig)
    rig.reload()
    assert known(rig, leased) == [(1, "now")]
    assert known(rig, 0) == [(1, "later")], "a scheduled item is found by its origin"


def test_a_dead_item_takes_its_failures_along_with_the_trace_of_the_last() -> None:
    rig = filled("a", max_attempts=3, keeps_dead=True)
    for attempt in range(1, 4):
        rig.settle(lease_all(rig), failed(f"no {attempt}", f"trace {attempt}", handler_time=attempt))
    rig.reload()
    (told_,) = told(rig).values()
    assert [each["reason"] for each in told_] == ["no 1", "no 2", "no 3"]
    assert [each.get("trace") for each in told_] == [None, None, "trace 3"]
    assert [each["handler_time"] for each in told_] == ["1ms", "2ms", "3ms"]


def test_what_is_sent_does_not_change_while_a_transfer_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_NOTES", 1)
    rig = filled("ab", keeps_dead=True)
    first, second = lease_all(rig)
    rig.settle([first], Disposition("dead", reason="one"))
    before = told(rig)
    rig.settle([second], failed("two"))
    rig.reload()
    assert told(rig) == before


def test_items_that_die_together_keep_what_is_their_own() -> None:
    rig = filled("abcd", max_attempts=2, keeps_dead=True)
    for offset, reason in zip(lease_all(rig), ["x", "y", "x", "z"], strict=True):
        rig.settle([offset], failed(reason))
    rig.settle(lease_all(rig), failed("last"))
    rig.reload()
    first = {payload: [each["reason"] for each in said] for payload, said in told(rig).items()}
    assert first == {b"a": ["x", "last"], b"b": ["y", "last"], b"c": ["x", "last"], b"d": ["z", "last"]}


def test_the_traces_of_very_many_items_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_TOLD", 100)
    rig = filled("abc", keeps_dead=True)
    rig.settle(lease_all(rig), Disposition("dead", reason="bad", trace="t" * 40))
    assert [[each.get("trace") for each in said] for said in told(rig).values()] == [[None]] * 3


def test_notes_go_with_their_blob() -> None:
    rig = filled("ab")
    rig.settle(lease_all(rig), failed("down"))
    rig.commit()
    assert notes(rig) == 1
    rig.settle(lease_all(rig), DONE)
    rig.commit()
    assert (notes(rig), rig.machine.log.failures.numbers()) == (0, [])


@pytest.mark.parametrize(("limit", "most"), [("MAX_NOTES", 3), ("MAX_BYTES", 3 * 150)])
def test_they_are_bounded_and_the_oldest_are_forgotten(limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, limit, most)
    rig = filled("abcdefgh")
    for offset in lease_all(rig):
        rig.settle([offset], failed(f"{offset}" * 50))
    rig.reload()
    assert notes(rig) == 3
    assert [bool(known(rig, offset)) for offset in range(8, 16)] == [False] * 5 + [True] * 3


@pytest.mark.parametrize("seed", range(15))
def test_each_item_has_its_own_failures_whatever_is_retried_together(seed: int) -> None:
    random = Random(seed)
    rig = filled("abcdefghijkl", max_attempts=4, keeps_dead=True)
    expected: dict[bytes, list[str]] = {}
    for turn in range(30):
        if not rig.machine.log.ready_count:
            break
        lease = rig.lease(random.randint(1, rig.machine.log.ready_count))
        rig.commit()
        items = {each.offset: each.payload for each in rig.served(queries.open_slices(lease))}
        chosen = random.sample(sorted(items), random.randint(1, len(items)))
        reason = random.choice("xyz") + str(turn % 4)
        rig.settle(chosen, failed(reason))
        for offset in chosen:
            expected.setdefault(items[offset], []).append(reason)
        rig.release(lease) if lease.open else None
        if random.random() < 0.3:
            rig.reload()
    rig.reload()
    assert told(rig)
    for payload, said in told(rig).items():
        assert [each["reason"] for each in said] == expected[payload]
