"""Random histories of a logical queue where stores fail and clients vanish, and bugs planted to see that the checker finds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from queue_world import run_world
from sluiceway.core.lane import ExtendPart, Lane, LaneState, SettlePart
from sluiceway.core.logical_queue import LogicalQueue
from sluiceway.core.partition import Partition
from sluiceway.core.tickets import Reply, Result, Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome

SEEDS = 150
SEEDS_PER_BUG = 150


@pytest.mark.parametrize("first", range(0, SEEDS, 30))
def test_promises_are_kept_in_any_weather(first: int) -> None:
    worlds = [run_world(seed) for seed in range(first, first + 30)]
    # A world in which nothing happens would prove nothing.
    assert sum(world.replies for world in worlds) > 30 * 30
    told = [world.ledger.tally for world in worlds]
    for what in ("produced", "leased", "done", "retry", "dead"):
        assert sum(tally[what] for tally in told) > 30, what


def test_a_seed_replays_exactly() -> None:
    assert [*run_world(7).trace] == [*run_world(7).trace]


class RepliesTooSoon(LogicalQueue):
    def _commit(self, lane: Lane, now: Millis) -> None:
        answers = list(lane.answers)
        super()._commit(lane, now)
        if lane.state is LaneState.COMMITTING:
            lane.answers = answers
            self._land(lane, True, now)


class TakesUnknownForRefused(LogicalQueue):
    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis) -> None:
        super().committed(number, opening, Outcome.REFUSED if outcome is Outcome.UNKNOWN else outcome, now)


class TakesUnknownForDone(LogicalQueue):
    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis) -> None:
        super().committed(number, opening, Outcome.DONE if outcome is Outcome.UNKNOWN else outcome, now)


class KeepsStateAfterRefusal(LogicalQueue):
    def committed(self, number: int, opening: int, outcome: Outcome, now: Millis) -> None:
        lane = self.lanes[number]
        if outcome is Outcome.REFUSED and opening == lane.opening:
            lane.state = LaneState.READY
            self._land(lane, False, now)
        else:
            super().committed(number, opening, outcome, now)


class NeverSeesThatItLanded(LogicalQueue):
    def opened(self, number: int, opening: int, loaded: Partition | Exception, now: Millis, final: bool = False) -> None:
        if opening == self.lanes[number].opening:
            self.lanes[number].flight_txn += 1
        super().opened(number, opening, loaded, now, final)


class ForgetsToReopen(LogicalQueue):
    def _fail(self, lane: Lane, now: Millis, final: bool) -> None:
        super()._fail(lane, now, final)
        if lane.failures == 3:
            lane.state = LaneState.STOPPED


class AnswersCancelled(LogicalQueue):
    def cancel(self, ticket: Ticket) -> None:
        self._effects.append(Reply(ticket, SluicewayError("unavailable", "cancelled")))
        super().cancel(ticket)


class CallsUnknownUnavailable(LogicalQueue):
    def _reply(self, ticket: Ticket, result: Result | SluicewayError) -> None:
        if isinstance(result, SluicewayError) and result.code == "outcome_unknown":
            result = SluicewayError("unavailable", "nothing was done")
        super()._reply(ticket, result)


class ForgetsATransfer(LogicalQueue):
    def transferred(self, number: int, lease: int, done: bool, now: Millis) -> None:
        super().transferred(number, lease, True, now)


class LosesAProduceThatWaits(LogicalQueue):
    def _take_out(self, lane: Lane, ticket: Ticket) -> None:
        super()._take_out(lane, ticket)
        self.produces.pop(ticket.number, None)
        self._unanswered.pop(ticket.number, None)
        ticket.done = True


class ServesAKeyTwice(LogicalQueue):
    def _keyed(self, ticket: Ticket, now: Millis) -> list[object]:  # type: ignore[override]
        return []


class LooksAwayFromClosedLanes(LogicalQueue):
    def _hides_leases(self) -> bool:
        return False


class SettlesByHalf(LogicalQueue):
    def _put_now(self, ticket: Ticket, number: int, work: SettlePart | ExtendPart) -> None:
        if self.lanes[number].takes_work:
            super()._put_now(ticket, number, work)


class HoldsALeaseForEver(LogicalQueue):
    def _time_out_lease(self, ticket: Ticket, now: Millis) -> None:
        return


@pytest.mark.parametrize(
    "bug",
    [
        RepliesTooSoon,
        TakesUnknownForRefused,
        TakesUnknownForDone,
        KeepsStateAfterRefusal,
        NeverSeesThatItLanded,
        ForgetsToReopen,
        AnswersCancelled,
        CallsUnknownUnavailable,
        ForgetsATransfer,
        LosesAProduceThatWaits,
        ServesAKeyTwice,
        LooksAwayFromClosedLanes,
        SettlesByHalf,
        HoldsALeaseForEver,
    ],
)
def test_a_planted_bug_is_found(bug: Callable[[str, range, Millis], LogicalQueue]) -> None:
    for seed in range(SEEDS_PER_BUG):
        try:
            run_world(seed, bug)
        except Exception:
            return
    pytest.fail(f"{SEEDS_PER_BUG} seeds did not find it")
