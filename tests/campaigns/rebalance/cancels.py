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
from tests.campaigns.rebalance.step_kills import JUDGED_EVERY, MAX_STEPS, at_mark, await_held
from tests.server.server_process import PATIENCE


def cancel_at_every_step(report: Report, fleet: MixedFleet, traffic: MovingTraffic, steps: PostgresSteps, queue: str) -> None:
    """Of moves from one backend to the other. The call is under way when the step's commit ends, so it comes right after it."""
    moves = Moves(report, fleet)
    outcomes: list[str] = []
    traffic.start()
    traffic.progress(50)
    for nth in range(1, MAX_STEPS):
        there = set(place(fleet, queue).values())
        target = LOCAL if there == {SHARED} else SHARED
        fleet.settle_on(target)
        outcome = _one(report, fleet, moves, steps, queue, nth, traffic)
        if outcome is None:
            break
        outcomes.append(outcome)
        if nth % JUDGED_EVERY == 0:
            traffic.drain(nth % fleet.homes)
            if report.wrong or traffic.tally.faults:
                break
            traffic.start()
            traffic.progress(50)
    if not report.wrong and not traffic.tally.faults:
        traffic.progress(50)
        traffic.drain(0)
        moves.judge_audit()
    if "cancelled" not in outcomes:
        report.fail(f"{queue}: not one rebalance was cancelled")
    told = ", ".join(f"{len(list(those))} {outcome}" for outcome, those in itertools.groupby(outcomes))
    report.figure(f"{queue}: cancelled at each of {len(outcomes)} steps: {told}")


def _one(report: Report, fleet: MixedFleet, moves: Moves, steps: PostgresSteps, queue: str, nth: int, traffic: MovingTraffic) -> str | None:
    before = place(fleet, queue)
    ids: list[str] = []
    answers: list[Any] = []
    with steps.armed(queue, nth):
        asking = threading.Thread(target=lambda: ids.append(moves.ask_for(queue)), daemon=True)
        asking.start()
        held = await_held(steps, moves, ids)
        if held is None:
            asking.join(PATIENCE)
            moves.follow(ids[0], faults=traffic.tally)
            return None
        cancelling = threading.Thread(target=lambda: answers.append(_cancel(fleet, ids, asking)), daemon=True)
        cancelling.start()
        threading.Event().wait(0.05)  # it is under way, most likely; if not, it comes a little later
        steps.let(held)
    cancelling.join(PATIENCE)
    last = at_mark(steps, ids[0], nth)
    refused = isinstance(answers[0], Refused)
    if refused and answers[0].code != "not_cancellable":
        report.fail(f"{ids[0]} could not be cancelled at step {nth} ({last}): {answers[0]}")
    found = moves.follow(ids[0], "done" if refused else "cancelled", faults=traffic.tally)
    removed = [each["partition"] for each in found["steps"] if each["step"] == "drain"]
    if refused and not removed and not found["plan"]["in_order"]:
        report.fail(f"{ids[0]} could not be cancelled at step {nth} ({last}), but had removed nothing: {answers[0]}")
    after = place(fleet, queue)
    if not refused and after != before:
        report.fail(f"{ids[0]} was cancelled at step {nth} ({last}), and the partitions are {after}, not {before}")
    report.say(f"step {nth} of {queue} ({last}): {found['state']}" + (f", as {answers[0].detail}" if refused else ""))
    return str(found["state"])


def _cancel(fleet: MixedFleet, ids: list[str], asking: threading.Thread) -> Any:
    asking.join(PATIENCE)
    return ask(fleet, "rebalances.cancel", id=ids[0])
