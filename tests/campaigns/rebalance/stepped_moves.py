"""Moves of a queue under load, one after the other, each of which something befalls at another of its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.holding import ENDED, Held, PostgresSteps, Step
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.rebalance_judging import Moves
from tests.server.server_process import PATIENCE, wait_until

MAX_STEPS = 40
JUDGED_EVERY = 4
Try = TypeVar("Try")
Outcome = TypeVar("Outcome")


def repeat_under_load(
    report: Report, traffic: MovingTraffic, moves: Moves, tries: Iterable[Try], once: Callable[[Try], Outcome | None]
) -> list[Outcome]:
    """What `once` makes of each try, until that is None. The load runs all the time; every few tries, and at the end, it is judged."""
    outcomes: list[Outcome] = []
    _begin(traffic)
    for each in tries:
        outcome = once(each)
        if outcome is None:
            break
        outcomes.append(outcome)
        if len(outcomes) % JUDGED_EVERY == 0:
            traffic.drain(len(outcomes) % traffic.fleet.homes)
            if report.wrong or traffic.tally.faults:
                break
            _begin(traffic)
    if not report.wrong and not traffic.tally.faults:
        traffic.progress(50)
        traffic.drain(0)
        moves.judge_audit()
    return outcomes


def _begin(traffic: MovingTraffic) -> None:
    traffic.start()
    traffic.progress(50)


class Asked:
    """A rebalance that is asked for in a thread of its own: if its first step is held up, so is the call."""

    def __init__(self, moves: Moves, queue: str, **fields: Any) -> None:
        self._moves = moves
        self._ids: list[str] = []
        self._thread = threading.Thread(target=lambda: self._ids.append(moves.ask_for(queue, **fields)), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENCE)

    @property
    def id(self) -> str | None:
        """As soon as it was answered; None if that takes too long, or was refused."""
        self.join()
        return next(iter(self._ids), None)

    def follow(self, traffic: MovingTraffic, state: str = "done") -> dict[str, Any]:
        """Follow the rebalance to its end, which must be `state`."""
        rebalance = self.id
        assert rebalance is not None, "the rebalance has no answer"
        return self._moves.follow(rebalance, state, faults=traffic.tally)

    def await_held(self, steps: PostgresSteps) -> Held | None:
        """The process held at the armed step; None if the rebalance ends without reaching it."""
        found: list[Held | None] = []

        def settled() -> bool:
            if (held := steps.held()) is not None:
                found.append(held)
            elif self._ids and steps.taken(self._ids[0])[-1].state in ENDED:
                found.append(None)
            return bool(found)

        wait_until(settled, "the next step")
        return found[0]


def at_mark(steps: PostgresSteps, rebalance: str, nth: int) -> Step | None:
    """What was recorded when the n-th mark was, or just before it."""
    taken = steps.taken(rebalance)[:nth]
    return taken[-1] if taken else None
