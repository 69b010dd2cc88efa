"""Random histories of one partition, beside a model that keeps one object an item. Time is virtual."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sluiceway.contract.item_answers import BrowseState
from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.core.partition import closed_leases, lease_loading, lease_table
from sluiceway.core.partition.item_listing import after, from_place, in_line, scheduled, waiting_among, why_left
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition import Placed
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import explain, lives_of, open_slices
from sluiceway.core.partition.records import LeaseState
from sluiceway.core.partition.snapshots import Listed
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import GROUP_KEEP, KEY_WINDOW
from sluiceway.model.inspection import BEGIN, Place
from sluiceway.model.item_keys import NO_KEY
from sluiceway.model.requests import DONE, RELEASE, Disposition, MovedItem, Offsets, ProduceKey, Settled
from tests.core.core_model import START, Rig, Row, array_of, batch_of
from tests.core.partition_model import Item, Model, ModelLease

REMEMBERS = 4
"""Closed leases, so that a history of some fifty steps forgets many."""

BODIES = (
    [Row(b"x1"), Row(b"x2")],
    [Row(b"y1", START + 90), Row(b"y2"), Row(b"y3", START + 90, "late")],
    [Row(b"z", None, "kind")],
)
DELAYS = st.none() | st.sampled_from([-5, 0, 1, 10, 60])
ROWS = st.lists(st.tuples(DELAYS, st.none() | st.just("kind")), min_size=1, max_size=7)
GROUPED = st.builds(ProduceKey, st.sampled_from("ab"), st.sampled_from(["a", "a", "transfer/a"]), st.integers(0, 3))
KEYS = st.sampled_from("ab").map(ProduceKey) | GROUPED
DISPOSITIONS = st.one_of(
    st.just(DONE),
    st.sampled_from(["", "bad"]).map(lambda reason: Disposition("dead", reason=reason)),
    st.sampled_from(["", "again"]).map(lambda reason: Disposition("retry", reason=reason)),
    st.sampled_from([0, 1, 10, 60]).map(lambda after: Disposition("retry", retry_after=after)),
    st.integers(START - 10, START + 300).map(lambda at: Disposition("retry", retry_at=at)),
)
RULES = st.builds(
    Rules,
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0, 0, 15, 70]),
    st.none() | st.sampled_from([RetryBackoff(0, 0), RetryBackoff(5, 12), RetryBackoff(1, 1_000)]),
    st.sampled_from([None, "d1", "d2"]),
    st.none(),
    # By key: test_key_order.py.
    st.just(KeyRules()),
)
CLIENTS = st.sampled_from([None, None, "c", "d"])
LIVES = st.builds(
    MovedItem,
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.sampled_from([0, 0, 30, 70]),
    st.sampled_from([0, 0, 10, 60]),
    st.sampled_from([0, 0, 1, 2]),
    # Bundles: tests/core/test_bundle_ledger.py.
    st.just(NO_KEY),
)
PICKS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def places(listed: Listed) -> list[tuple[object, ...]]:
    """Offset, origin, attempts and lease of each."""
    piece = listed.piece
    return [
        (offset, piece.blob + row, piece.attempts, listed.lease)
        for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True)
    ]


class PartitionMachine(RuleBasedStateMachine):
    @initialize(rules=RULES)
    def begin(self, rules: Rules) -> None:
        self.rig, self.model, self.now, self.arrivals = Rig(), Model(rules, REMEMBERS), START, 1
        self.rig.follow(rules)

    @rule(rows=ROWS)
    def produce(self, rows: list[tuple[int | None, str | None]]) -> None:
        first = self.rig.machine.log.header.next
        body = [
            Row(f"{origin}".encode(), None if delay is None else self.now + delay, kind) for origin, (delay, kind) in enumerate(rows, first)
        ]
        assert self.rig.produce(body, self.now) == self.model.produce(body, self.now, None)

    @rule(body=st.sampled_from(BODIES), key=KEYS)
    def produce_keyed(self, body: list[Row], key: ProduceKey) -> None:
        expected = self.model.produce(body, self.now, key)
        try:
            answer: object = self.rig.produce(body, self.now, key)
        except SluicewayError as error:
            answer = error.code
        assert answer == expected

    @rule(
        want=st.integers(1, 12),
        timeout=st.sampled_from([0, 1, 10, 60]),
        client=st.sampled_from("cd"),
        key=st.none() | st.sampled_from("kl"),
    )
    def lease(self, want: int, timeout: Millis, client: str, key: str | None) -> None:
        lease = self.rig.machine.lease(want, client, self.now + timeout, self.now, key)
        if lease is None:
            assert not self.model.leasable(self.now)
            return
        taken = self.model.lease(lease.number, want, ModelLease(client, self.now + timeout, key), self.now)
        assert lease.count == lease.open == len(taken)
        pieces = open_slices(lease)
        shown = [
            (offset, piece.blob + row, piece.attempts)
            for piece in pieces
            for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True)
        ]
        assert shown == [(item.offset, item.origin, item.attempts + 1) for item in taken]
        assert lease in self.rig.machine.keyed(client, key or "") or key is None

    @rule(
        picks=PICKS,
        wild=st.lists(st.integers(-1, 60), max_size=6),
        disposition=DISPOSITIONS | st.just(RELEASE),
        stage=st.sampled_from([False, False, True]),
        client=CLIENTS,
    )
    def settle(self, picks: list[int], wild: list[int], disposition: Disposition, stage: bool, client: str | None) -> None:
        leased = [item.offset for item in self.model.leased() if item.offset is not None]
        offsets = array_of([*wild, *(leased[pick % len(leased)] for pick in picks if leased)])
        stage = stage and disposition != RELEASE
        expected = self.model.settle(offsets.tolist(), disposition, self.now, stage, client)
        result = Settled()
        ignored = self.rig.machine.settle_offsets(offsets, disposition, self.now, stage, result, client)
        assert (result, [offset for offset, _ in ignored]) == (expected[0], list(expected[1]))
        assert all(reason in expected[1][offset] for offset, reason in ignored)

    def _lease(self, pick: int) -> LeaseState:
        number = sorted(self.model.leases)[pick % len(self.model.leases)]
        lease = self.rig.machine.lease_of(number, self.model.leases[number].client_id)
        assert isinstance(lease, LeaseState)
        assert self.rig.machine.lease_of(number, "another") == "not_yours"
        return lease

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.integers(0, 20))
    def close(self, pick: int) -> None:
        lease = self._lease(pick)
        assert self.rig.close(lease, self.now) == self.model.close(lease.number, self.now)

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.integers(0, 20))
    def release(self, pick: int) -> None:
        lease = self._lease(pick)
        assert self.rig.release(lease, self.now) == self.model.release(lease.number, self.now)

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.integers(0, 20), timeout=st.sampled_from([0, 1, 10, 60]))
    def extend(self, pick: int, timeout: Millis) -> None:
        lease = self._lease(pick)
        self.rig.machine.extend(lease, self.now + timeout)
        self.model.leases[lease.number].deadline = self.now + timeout

    @rule(ready=st.booleans(), scheduled=st.booleans())
    def clear(self, ready: bool, scheduled: bool) -> None:
        assert self.rig.machine.clear(ready, scheduled, self.now) == self.model.clear(ready, scheduled, self.now)

    @rule(
        picks=PICKS,
        wild=st.lists(st.integers(-1, 60), max_size=3),
        queue=st.sampled_from(["orders", "bills"]),
        scheduled=st.booleans(),
    )
    def redrive(self, picks: list[int], wild: list[int], queue: str, scheduled: bool) -> None:
        offsets = self._waiting(picks, wild)
        number, taken = self.rig.machine.transfers.redrive(offsets, queue, self.now, None, scheduled)
        assert taken.tolist() == self.model.redrive(offsets.tolist(), queue, self.now, scheduled)
        assert (number > 0) == (len(taken) > 0)

    @rule(picks=PICKS, wild=st.lists(st.integers(-1, 60), max_size=3))
    def make_ready(self, picks: list[int], wild: list[int]) -> None:
        offsets = self._waiting(picks, wild)
        was_ready, end = {item.offset for item in self.model.ready()}, self.model.header.next
        assert self._listed_among(offsets) == sorted(set(offsets.tolist()) & self._waiting_places().keys())
        made = self.rig.machine.log.make_ready(offsets, self.now)
        assert made.tolist() == self.model.make_ready(offsets.tolist(), self.now)
        for offset in set(offsets.tolist()) - set(made.tolist()):
            leased = any(item.offset == offset for item in self.model.leased())
            # An offset that was not given before may have been given to one of them.
            is_ready = offset in was_ready or end <= offset < end + len(made)
            other = "ready" if is_ready else "gone" if 0 <= offset < end else "unknown"
            assert why_left(self.rig.machine, offset) == ("leased" if leased else other)

    def _waiting_places(self) -> dict[int | None, Item]:
        return {item.origin if item.place == "due" else item.offset: item for item in self.model.at("ready", "due")}

    def _waiting(self, picks: list[int], wild: list[int]) -> Offsets:
        places = [place for place in self._waiting_places() if place is not None]
        return array_of([*wild, *(places[pick % len(places)] for pick in picks if places)])

    def _listed_among(self, offsets: Offsets) -> list[int]:
        return sorted(offset for piece in waiting_among(self.rig.machine, offsets) for offset in piece.offsets.tolist())

    @rule(limit=st.integers(1, 12), to=st.integers(1, 2), due=st.booleans())
    def move_out(self, limit: int, to: int, due: bool) -> None:
        machine = self.rig.machine
        number, items = machine.transfers.move_out(limit, 1 << 60, to, due, self.now)
        pieces = open_slices(machine.transfers.by_number[number]) if number else []
        chosen = [piece.blob + row for piece in pieces for row in piece.rows.tolist()]
        assert (items, number > 0) == (len(chosen), items > 0)
        self.model.move_out(chosen, limit, to, due, self.now)
        lives = lives_of(machine.transfers.by_number[number], machine.log.bundles) if number else ()
        assert [life.rows for life in lives] == [len(piece.rows) for piece in pieces]
        moved = [self.model.items[origin] for origin in chosen]
        assert [life[1:] for life in lives for _ in range(life.rows)] == [
            (item.enqueued_at, item.attempts, item.expires_at, item.due_at or 0, item.max_lease_size, NO_KEY) for item in moved
        ]

    @rule(lives=st.lists(LIVES, min_size=1, max_size=5), shift=st.sampled_from([0, 0, -40]))
    def others_arrive(self, lives: list[MovedItem], shift: Millis) -> None:
        """From another partition. It may take longer than it was to be until they are due, or expire."""
        first = self.rig.machine.log.header.next
        lives = [
            life._replace(
                enqueued_at=self.now - life.enqueued_at,
                expires_at=life.expires_at and self.now + life.expires_at + shift,
                due_at=life.due_at and self.now + life.due_at + shift,
            )
            for life in lives
        ]
        rows = [Row(f"{first + n}".encode()) for n in range(sum(life.rows for life in lives))]
        key = ProduceKey("m", "move/q.7", self.arrivals)
        self.arrivals += 1
        each = [life for life in lives for _ in range(life.rows)]
        placed = self.rig.machine.produce(batch_of(rows), self.now, key, lives)
        assert placed[:3] == self.model.arrive(rows, each, self.now, key)
        assert self.rig.machine.produce(batch_of(rows), self.now, key, lives) == Placed(first, len(rows), True, None)
        self.model.header.deduplicated += len(rows)

    @rule(picks=PICKS, wild=st.lists(st.integers(-1, 60), max_size=3))
    def delete(self, picks: list[int], wild: list[int]) -> None:
        live = [item.origin if item.place == "due" else item.offset for item in self.model.at("ready", "due", "leased")]
        offsets = array_of([*wild, *(offset for pick in picks if live and (offset := live[pick % len(live)]) is not None)])
        dropped = self.rig.machine.log.drop(offsets, self.now)
        assert sorted(dropped.tolist()) == self.model.drop(offsets.tolist(), self.now)
        for offset in set(offsets.tolist()) - set(dropped.tolist()):
            leased = any(item.offset == offset for item in self.model.leased())
            gone = 0 <= offset < self.model.header.next
            assert why_left(self.rig.machine, offset) == ("leased" if leased else "gone" if gone else "unknown")

    @rule(rules=RULES)
    def the_rules_change(self, rules: Rules) -> None:
        self.rig.follow(rules)
        self.model.rules = rules

    @rule(step=st.sampled_from([0, 1, 9, 10, 60, 60, KEY_WINDOW, GROUP_KEEP]))
    def time_passes(self, step: Millis) -> None:
        self.now += step
        assert self.rig.machine.tick(self.now) == self.model.tick(self.now)
        timer = self.rig.machine.next_timer()
        assert timer is None or timer > self.now

    @precondition(lambda self: self.rig.machine.transfers.by_number)
    @rule(pick=st.integers(0, 20), arrives=st.booleans())
    def a_transfer_ends(self, pick: int, arrives: bool) -> None:
        machine, numbers = self.rig.machine, sorted(self.rig.machine.transfers.by_number)
        number = numbers[pick % len(numbers)]
        for end in (
            (machine.transfers.end, machine.transfers.call_back) if arrives else (machine.transfers.call_back, machine.transfers.end)
        ):
            end(number)
        (self.model.transferred if arrives else self.model.called_back)(number)

    @rule()
    def commit(self) -> None:
        if self.rig.commit() is not None:
            self.model.forget_keys(self.model.header.now)
        self._payloads_are_whole()

    @rule()
    def compact(self) -> None:
        self.commit()
        self.rig.compact()
        self._payloads_are_whole()

    @rule(back=st.integers(0, 20))
    def another_owner_takes_over(self, back: Millis) -> None:
        """Its clock may be behind."""
        self.commit()
        self.rig.reload()
        self.model.reloaded()
        self.now -= back

    @rule(offset=st.integers(-1, 60))
    def somebody_asks(self, offset: int) -> None:
        """Why is that item not being served?"""
        told, model = explain(self.rig.machine, offset), self.model
        item = next((item for item in model.at("ready", "leased", "dying") if item.offset == offset), None)
        item = item or next((item for item in model.at("due") if item.origin == offset), None)
        if item is None:
            assert told.state == ("gone" if 0 <= offset < model.header.next else "unknown")
            return
        assert told.state == {"due": "scheduled"}.get(item.place, item.place)
        if item.place != "dying":
            assert (told.attempts, told.expires_at or 0) == (item.attempts + (item.place == "leased"), item.expires_at)
            assert (told.due_at, told.lease) == (item.due_at, item.number)
            assert told.ahead == (model.ready().index(item) if item.place == "ready" else None)

    @rule(start=st.integers(0, 60), limit=st.integers(1, 12))
    def somebody_lists(self, start: int, limit: int) -> None:
        machine, model = self.rig.machine, self.model
        lined = sorted((item for item in model.at("ready", "leased") if (item.offset or 0) >= start), key=lambda item: item.offset or 0)
        assert [place + listed.standing[:2] for listed in in_line(machine, start, limit) for place in places(listed)] == [
            (
                item.offset,
                item.origin,
                item.attempts + (item.place == "leased"),
                item.number or 0,
                None if item.number is None else model.leases[item.number].deadline,
                item.expires_at or None,
            )
            for item in lined[:limit]
        ]
        due = sorted((item for item in model.at("due") if item.origin >= start), key=lambda item: item.origin)
        assert [place + listed.standing for listed in scheduled(machine, start, limit) for place in places(listed)] == [
            (item.origin, item.origin, item.attempts, 0, None, item.expires_at or None, item.due_at) for item in due[:limit]
        ]

    @rule(
        states=st.sets(st.sampled_from(["ready", "leased", "scheduled"]), min_size=1),
        cuts=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    )
    def somebody_searches(self, states: set[BrowseState], cuts: list[int]) -> None:
        """In pages, each from where the one before it ended: every item comes once."""
        found: list[int] = []
        place: Place | None = BEGIN
        pages = cycle(cuts)
        while place is not None:
            left = next(pages)
            for each in from_place(self.rig.machine, states, place, sorted(self.rig.machine.log.dues)):
                piece = each.listed.piece
                found += (piece.rows[:left] + piece.blob).tolist()
                if len(piece.rows) > left:
                    place = after(each, left)
                    break
                left -= len(piece.rows)
                if not left:
                    place = after(each, len(piece.rows))
                    break
            else:
                place = None
        wanted = {each for state, each in (("ready", "ready"), ("leased", "leased"), ("scheduled", "due")) if state in states}
        assert sorted(found) == sorted(item.origin for item in self.model.at("ready", "leased", "due") if item.place in wanted)

    @invariant()
    def the_model_agrees(self) -> None:
        self.model.adopt(self.rig.machine)
        self.model.compare_counts(self.rig.machine)

    def _payloads_are_whole(self) -> None:
        machine, items = self.rig.machine, self.model.items
        shown = self.rig.ready()
        for lease in (*machine.leases.values(), *machine.transfers.by_number.values()):
            shown += self.rig.served(open_slices(lease))
        for served in shown:
            assert (served.payload, served.kind) == (items[served.origin].row.payload, items[served.origin].row.kind)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self._drain()

    def _drain(self) -> None:
        """Everything can be completed, and then nothing is left on the disk."""
        machine = self.rig.machine
        self.the_rules_change(Rules())
        self.now = START + 1_000 * KEY_WINDOW
        self.time_passes(0)
        self.the_model_agrees()
        while machine.log.ready_count:
            self.lease(12, 0, "c", None)
        for lease in list(machine.leases.values()):
            self.rig.close(lease, self.now)
        for number in list(machine.transfers.by_number):
            machine.transfers.end(number)
        self.rig.commit()
        header = machine.log.header
        gone = header.completed + header.dead + header.cleared + header.redriven + header.moved
        assert header.produced + header.moved_in == gone
        assert not self.rig.disk.blobs
        assert not machine.log.ready, "what is gone is held"
        assert {kind.value for kind, _ in self.rig.disk.records} <= {"key", "lease"}
        assert sum(kind.value == "lease" for kind, _ in self.rig.disk.records) <= REMEMBERS


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        PartitionMachine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, report_multiple_bugs=False)
    )


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_leases, "MAX_CLOSED_LEASES", REMEMBERS)


def test_a_random_history_agrees_with_the_model() -> None:
    run(250, 50)


def test_a_random_history_agrees_with_the_model_where_all_but_the_newest_leases_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("UNPACKED_LEASES", 0), ("PACKED_AT_ONCE", 1), ("_ROWS", 3)):
        monkeypatch.setattr(lease_table, name, value)
    monkeypatch.setattr(lease_loading, "MIN_PACKED", 1)
    run(150, 50)


@pytest.mark.slow
def test_many_long_random_histories_agree_with_the_model() -> None:
    run(2_000, 60)


def test_an_expired_item_that_is_called_back_is_not_leased_before_it_dies() -> None:
    rig = Rig(keeps_dead=True, expire_timeout=15)
    rig.produce([Row(b"x")])
    now = START + 60
    assert rig.machine.tick(now) == 1
    rig.machine.transfers.call_back(next(iter(rig.machine.transfers.by_number)))
    assert rig.machine.lease(1, "c", now + 10, now) is None
    assert rig.machine.tick(now) == 1
    assert len(rig.machine.transfers.by_number) == 1
