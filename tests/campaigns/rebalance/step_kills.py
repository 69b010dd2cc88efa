"""Kill −9 of whoever carries a rebalance out, at every one of its steps: just before the step is recorded, and just after."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.holding import Held, PostgresSteps, Step
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.rebalance_judging import Moves, ask, place
from tests.server.server_process import PATIENCE, wait_until

Way = Literal["before", "after", "frozen"]
"""The commit of the step fails with its maker, or is done although its maker is dead; or is done while its maker stands still, and that one
goes on when others have done the rest."""
MAX_STEPS = 40
JUDGED_EVERY = 4


class Hit(NamedTuple):
    """One kill: at the n-th mark, of whom, what was recorded last, how long until the rebalance ended."""

    nth: int
    victim: str
    at: str
    seconds: float


def strike_at_every_step(
    report: Report, fleet: MixedFleet, traffic: MovingTraffic, steps: PostgresSteps, queue: str, ways: tuple[Way, ...]
) -> list[Hit]:
    """Of moves of that queue forth and back between the backends. The load runs all the time."""
    hits: list[Hit] = []
    moves = Moves(report, fleet)
    there = itertools.cycle((SHARED, LOCAL))
    traffic.start()
    traffic.progress(50)
    for nth, way in _enumerated(ways):
        target = next(there)
        fleet.settle_on(target)
        hit = _one(report, fleet, moves, steps, queue, nth, way, traffic)
        if hit is None:
            break
        hits.append(hit)
        done = "frozen at" if way == "frozen" else f"killed {way}"
        report.say(f"{hit.victim} {done} step {nth} of {queue} ({hit.at}): ended after {hit.seconds:.1f} s")
        if len(hits) % JUDGED_EVERY == 0:
            traffic.drain(len(hits) % fleet.homes)
            if report.wrong or traffic.tally.faults:
                break
            traffic.start()
            traffic.progress(50)
    if not report.wrong and not traffic.tally.faults:
        traffic.progress(50)
        traffic.drain(0)
        moves.judge_audit()
    if hits:
        seconds = [hit.seconds for hit in hits]
        struck = "freezes" if "frozen" in ways else "kills"
        report.figure(
            f"{queue}: {len(hits)} {struck} at {max(hit.nth for hit in hits)} steps, each rebalance was ended by others, after "
            f"{max(seconds):.1f} s at most, {statistics.median(seconds):.1f} s in the median"
        )
    return hits


def _enumerated(ways: tuple[Way, ...]) -> Iterator[tuple[int, Way]]:
    for nth in range(1, MAX_STEPS):
        for way in ways:
            # The first mark is made by whoever was asked; one that is frozen would not answer.
            if (nth, way) != (1, "frozen"):
                yield nth, way


def _one(
    report: Report, fleet: MixedFleet, moves: Moves, steps: PostgresSteps, queue: str, nth: int, way: Way, traffic: MovingTraffic
) -> Hit | None:
    """One move with one kill; None if it has fewer steps."""
    ids: list[str] = []
    # One that keeps its order cannot be copied.
    drain = "copy" if way == "after" and len(place(fleet, queue)) > 1 else "natural"
    with steps.armed(queue, nth):
        # If it waits at its first mark, so does this call.
        asking = threading.Thread(target=lambda: ids.append(moves.ask_for(queue, drain=drain)), daemon=True)
        asking.start()
        held = await_held(steps, moves, ids)
        if held is None:
            asking.join(PATIENCE)
            moves.follow(ids[0], faults=traffic.tally)
            return None
        victim = fleet.instance(held.writer)
        begun = time.monotonic()
        if way == "frozen":
            victim.freeze()
        else:
            victim.kill()
        if way == "before":
            steps.undo(held)
        else:
            steps.let(held)
    asking.join(PATIENCE)
    if not ids:
        report.fail(f"{queue} could not be rebalanced after {victim.name} was killed {way} step {nth}")
        return None
    last = at_mark(steps, ids[0], nth)
    moves.follow(ids[0], faults=traffic.tally)
    seconds = time.monotonic() - begun
    if way == "frozen":
        victim.thaw()
    else:
        fleet.restart(victim)
    fleet.await_ready()
    return Hit(nth, victim.name, str(last), seconds)


def await_held(steps: PostgresSteps, moves: Moves, ids: list[str]) -> Held | None:
    """Whoever waits at the mark that is armed; None if the rebalance ends without."""
    found: list[Held | None] = []

    def settled() -> bool:
        if (held := steps.held()) is not None:
            found.append(held)
        elif ids and steps.taken(ids[0])[-1].state in ("done", "cancelled", "failed"):
            found.append(None)
        return bool(found)

    wait_until(settled, "the next step")
    return found[0]


def at_mark(steps: PostgresSteps, rebalance: str, nth: int) -> Step | None:
    """What was recorded when the n-th mark was, or just before it."""
    taken = steps.taken(rebalance)[:nth]
    return taken[-1] if taken else None


def kill_alone_at_every_step(report: Report, fleet: MixedFleet, traffic: MovingTraffic, queue: str) -> None:
    """The same with a single server, which is killed right after each step and started again."""
    (server,) = fleet.instances
    moves = Moves(report, fleet)
    steps = fleet.own_steps()
    there = itertools.cycle((SHARED, LOCAL))
    kills, late, seconds = 0, 0, []
    for nth in range(1, MAX_STEPS):
        if nth % JUDGED_EVERY == 1:
            traffic.start()
            traffic.progress(50)
        target = next(there)
        fleet.settle_on(target)
        ids: list[str] = []
        known = {each["id"] for each in ask(fleet, "rebalances.list", queue_name=queue)["items"]}
        asking = threading.Thread(target=lambda: ids.append(moves.ask_for(queue)), daemon=True)  # noqa: B023
        with steps.catching(queue, nth, known) as catch:
            asking.start()
            found = catch()
            if found is not None:
                begun = time.monotonic()
                server.kill()
        if found is None:
            asking.join(PATIENCE)
            moves.follow(ids[0], faults=traffic.tally)
            break
        kills += 1
        late += found.done > nth - 1
        fleet.restart(server)
        asking.join(PATIENCE)
        moves.follow(found.rebalance, faults=traffic.tally)
        seconds.append(time.monotonic() - begun)
        report.say(f"killed after step {nth} of {queue} ({found}): ended after {seconds[-1]:.1f} s")
        if nth % JUDGED_EVERY == 0:
            traffic.drain(0)
        if report.wrong or traffic.tally.faults:
            return
    traffic.progress(50)
    traffic.drain(0)
    moves.judge_audit()
    report.figure(f"a single server, {queue}: {kills} kills, {late} of them a step late; ended after {max(seconds):.1f} s at most")
