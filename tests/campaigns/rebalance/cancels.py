"""A rebalance is cancelled at each of its steps, under load: the queue is then as it was, or the call says why that cannot be."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.holding import PostgresSteps
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.rebalance_judging import Moves, Refused, ask, place
from tests.campaigns.rebalance.stepped_moves import MAX_STEPS, Asked, at_mark, repeat_under_load
from tests.server.server_process import PATIENCE


def cancel_at_every_step(report: Report, fleet: MixedFleet, traffic: MovingTraffic, steps: PostgresSteps, queue: str) -> None:
    """Of moves from one backend to the other. The call is under way when the step's commit ends, so it comes right after it."""
    moves = Moves(report, fleet)

    def once(nth: int) -> str | None:
        there = set(place(fleet, queue).values())
        fleet.settle_on(LOCAL if there == {SHARED} else SHARED)
        return _one(report, fleet, moves, steps, queue, nth, traffic)

    outcomes = repeat_under_load(report, traffic, moves, range(1, MAX_STEPS), once)
    if "cancelled" not in outcomes:
        report.fail(f"{queue}: not one rebalance was cancelled")
    told = ", ".join(f"{len(list(those))} {outcome}" for outcome, those in itertools.groupby(outcomes))
    report.figure(f"{queue}: cancelled at each of {len(outcomes)} steps: {told}")


def _one(report: Report, fleet: MixedFleet, moves: Moves, steps: PostgresSteps, queue: str, nth: int, traffic: MovingTraffic) -> str | None:
    before = place(fleet, queue)
    answers: list[Any] = []
    with steps.armed(queue, nth):
        asked = Asked(moves, queue)
        held = asked.await_held(steps)
        if held is None:
            asked.follow(traffic)
            return None
        cancelling = threading.Thread(target=lambda: answers.append(ask(fleet, "rebalances.cancel", id=asked.id)), daemon=True)
        cancelling.start()
        threading.Event().wait(0.05)  # it is under way, most likely; if not, it comes a little later
        steps.let(held)
    cancelling.join(PATIENCE)
    rebalance = asked.id
    assert rebalance is not None
    last = at_mark(steps, rebalance, nth)
    refused = isinstance(answers[0], Refused)
    if refused and answers[0].code != "not_cancellable":
        report.fail(f"{rebalance} could not be cancelled at step {nth} ({last}): {answers[0]}")
    found = asked.follow(traffic, "done" if refused else "cancelled")
    removed = [each["partition"] for each in found["steps"] if each["step"] == "drain"]
    if refused and not removed and not found["plan"]["in_order"]:
        report.fail(f"{rebalance} could not be cancelled at step {nth} ({last}), but had removed nothing: {answers[0]}")
    after = place(fleet, queue)
    if not refused and after != before:
        report.fail(f"{rebalance} was cancelled at step {nth} ({last}), and the partitions are {after}, not {before}")
    report.say(f"step {nth} of {queue} ({last}): {found['state']}" + (f", as {answers[0].detail}" if refused else ""))
    return str(found["state"])
