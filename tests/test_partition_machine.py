"""Random histories of one partition, beside a model that keeps one object an item. Time is virtual."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core_model import START, Model, ModelLease, Rig, Row, Served, array_of
from sluiceway.core.looking import open_slices
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import KEY_WINDOW
from sluiceway.model.requests import DONE, Fate, ProduceKey, Settled

BODIES = (
    [Row(b"x1"), Row(b"x2")],
    [Row(b"y1", START + 90), Row(b"y2"), Row(b"y3", START + 90, "late")],
    [Row(b"z", None, "kind")],
)
DELAYS = st.none() | st.sampled_from([-5, 0, 1, 10, 60])
ROWS = st.lists(st.tuples(DELAYS, st.none() | st.just("kind")), min_size=1, max_size=7)
KEYS = st.sampled_from("ab").map(ProduceKey) | st.tuples(st.sampled_from("ab"), st.just("a"), st.integers(0, 3)).map(
    lambda key: ProduceKey(*key)
)
FATES = st.one_of(
    st.just(DONE),
    st.sampled_from(["", "bad"]).map(lambda reason: Fate("dead", reason=reason)),
    st.sampled_from(["", "again"]).map(lambda reason: Fate("retry", reason=reason)),
    st.sampled_from([0, 1, 10, 60]).map(lambda after: Fate("retry", retry_after=after)),
    st.integers(START - 10, START + 300).map(lambda at: Fate("retry", retry_at=at)),
)
PICKS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


class PartitionMachine(RuleBasedStateMachine):
    @initialize(max_attempts=st.integers(0, 3), keeps_dead=st.booleans())
    def begin(self, max_attempts: int, keeps_dead: bool) -> None:
        self.rig = Rig(max_attempts=max_attempts, keeps_dead=keeps_dead)
        self.model = Model(max_attempts, keeps_dead)
        self.now: Millis = START
        self.unread: list[tuple[int, list[Served]]] = []

    @rule(rows=ROWS)
    def produce(self, rows: list[tuple[int | None, str | None]]) -> None:
        first = self.rig.machine.header.next
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
            assert not self.model.ready()
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

    @rule(picks=PICKS, wild=st.lists(st.integers(-1, 60), max_size=3), fate=FATES, stage=st.sampled_from([False, False, True]))
    def settle(self, picks: list[int], wild: list[int], fate: Fate, stage: bool) -> None:
        leased = [item.offset for item in self.model.leased() if item.offset is not None]
        offsets = array_of([*wild, *(leased[pick % len(leased)] for pick in picks if leased)])
        result = Settled()
        ignored = self.rig.machine.settle_offsets(offsets, fate, self.now, stage, result)
        assert all(self.model.may_be_ignored(*each) for each in ignored)
        assert (result, [offset for offset, _ in ignored]) == self.model.settle(offsets.tolist(), fate, self.now, stage)

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.integers(0, 20))
    def close(self, pick: int) -> None:
        numbers = sorted(self.model.leases)
        number = numbers[pick % len(numbers)]
        result = Settled()
        assert self.rig.machine.close_lease(number, self.now, result)
        assert result == self.model.close(number, self.now)
        assert not self.rig.machine.close_lease(number, self.now, result)

    @precondition(lambda self: self.model.leases)
    @rule(pick=st.integers(0, 20), timeout=st.sampled_from([0, 1, 10, 60]))
    def extend(self, pick: int, timeout: Millis) -> None:
        numbers = sorted(self.model.leases)
        number = numbers[pick % len(numbers)]
        assert self.rig.machine.extend(number, self.now + timeout) is self.rig.machine.leases[number]
        self.model.leases[number].deadline = self.now + timeout

    @rule(step=st.sampled_from([0, 1, 9, 10, 60, KEY_WINDOW]))
    def time_passes(self, step: Millis) -> None:
        self.now += step
        assert self.rig.machine.tick(self.now) == self.model.tick(self.now)
        timer = self.rig.machine.next_timer()
        assert timer is None or timer > self.now

    @precondition(lambda self: self.rig.machine.transfers)
    @rule(pick=st.integers(0, 20))
    def dead_letters_arrive(self, pick: int) -> None:
        numbers = sorted(self.rig.machine.transfers)
        number = numbers[pick % len(numbers)]
        self.rig.machine.transferred(number)
        self.rig.machine.transferred(number)
        self.model.transferred(number)

    @rule()
    def commit(self) -> None:
        if self.rig.commit() is not None:
            self.model.forget(self.model.header.now)
        self._payloads_are_whole()

    @rule(back=st.integers(0, 20))
    def another_owner_takes_over(self, back: Millis) -> None:
        """Its clock may be behind."""
        self.commit()
        self.rig.reload()
        self.now -= back

    @invariant()
    def the_model_agrees(self) -> None:
        self.model.adopt(self.rig.machine)
        self.model.compare_counts(self.rig.machine)

    def _payloads_are_whole(self) -> None:
        machine, items = self.rig.machine, self.model.items
        shown = self.rig.ready()
        for lease in (*machine.leases.values(), *machine.transfers.values()):
            shown += self.rig.served(open_slices(lease))
        for served in shown:
            assert (served.payload, served.kind) == (items[served.origin].row.payload, items[served.origin].row.kind)

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self._drain()

    def _drain(self) -> None:
        """Everything can be completed, and then nothing is left on the disk."""
        machine, forever = self.rig.machine, START + 100 * KEY_WINDOW
        machine.max_attempts = self.model.max_attempts = 0
        self.now = forever
        self.time_passes(0)
        self.the_model_agrees()
        while machine.ready:
            self.lease(12, 0, "c", None)
        for number in list(machine.leases):
            assert machine.close_lease(number, forever, Settled())
        for number in list(machine.transfers):
            machine.transferred(number)
        self.rig.commit()
        assert machine.header.produced == machine.header.completed + machine.header.dead
        assert not self.rig.disk.blobs
        assert {kind.value for kind, _ in self.rig.disk.records} <= {"key"}


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        PartitionMachine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, report_multiple_bugs=False)
    )


def test_a_random_history_agrees_with_the_model() -> None:
    run(250, 50)


@pytest.mark.slow
def test_many_long_random_histories_agree_with_the_model() -> None:
    run(2_000, 60)
