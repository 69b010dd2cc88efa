"""Kill −9 of whoever carries a rebalance out, at every one of its steps: just before the step is recorded, and just after."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.holding import PostgresSteps
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.rebalance_judging import Moves, ask, place
from tests.campaigns.rebalance.stepped_moves import MAX_STEPS, Asked, at_mark, repeat_under_load

Way = Literal["before", "after", "frozen"]
"""The commit of the step fails with its maker, or is done although its maker is dead; or is done while its maker stands still, and that one
goes on when others have done the rest."""


class Hit(NamedTuple):
    """One kill: at the n-th mark, of whom, what was recorded last, how long until the rebalance ended."""

    nth: int
    victim: str
    at: str
    seconds: float


def strike_at_every_step(
    report: Report, fleet: MixedFleet, traffic: MovingTraffic, steps: PostgresSteps, queue: str, ways: tuple[Way, ...]
) -> list[Hit]:
    """Of moves of that queue forth and back between the backends."""
    moves = Moves(report, fleet)
    there = itertools.cycle((SHARED, LOCAL))

    def once(at: tuple[int, Way]) -> Hit | None:
        nth, way = at
        fleet.settle_on(next(there))
        hit = _one(report, fleet, moves, steps, queue, nth, way, traffic)
        if hit is not None:
            done = "frozen at" if way == "frozen" else f"killed {way}"
            report.say(f"{hit.victim} {done} step {nth} of {queue} ({hit.at}): ended after {hit.seconds:.1f} s")
        return hit

    hits = repeat_under_load(report, traffic, moves, _enumerated(ways), once)
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
    # One that keeps its order cannot be copied.
    drain = "copy" if way == "after" and len(place(fleet, queue)) > 1 else "natural"
    with steps.armed(queue, nth):
        asked = Asked(moves, queue, drain=drain)
        held = asked.await_held(steps)
        if held is None:
            asked.follow(traffic)
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
    rebalance = asked.id
    if rebalance is None:
        report.fail(f"{queue} could not be rebalanced after {victim.name} was killed {way} step {nth}")
        return None
    last = at_mark(steps, rebalance, nth)
    asked.follow(traffic)
    seconds = time.monotonic() - begun
    if way == "frozen":
        victim.thaw()
    else:
        fleet.restart(victim)
    fleet.await_ready()
    return Hit(nth, victim.name, str(last), seconds)


def kill_alone_at_every_step(report: Report, fleet: MixedFleet, traffic: MovingTraffic, queue: str) -> None:
    """The same with a single server, which is killed right after each step and started again."""
    (server,) = fleet.instances
    moves = Moves(report, fleet)
    steps = fleet.own_steps()
    there = itertools.cycle((SHARED, LOCAL))
    late = 0

    def once(nth: int) -> float | None:
        nonlocal late
        fleet.settle_on(next(there))
        known = {each["id"] for each in ask(fleet, "rebalances.list", queue_name=queue)["items"]}
        with steps.catching(queue, nth, known) as catch:
            asked = Asked(moves, queue)
            found = catch()
            if found is not None:
                begun = time.monotonic()
                server.kill()
        if found is None:
            asked.follow(traffic)
            return None
        late += found.done > nth - 1
        fleet.restart(server)
        # The call is repeated, and may find that the rebalance has ended.
        asked.join()
        moves.follow(found.rebalance, faults=traffic.tally)
        seconds = time.monotonic() - begun
        report.say(f"killed after step {nth} of {queue} ({found}): ended after {seconds:.1f} s")
        return seconds

    seconds = repeat_under_load(report, traffic, moves, range(1, MAX_STEPS), once)
    report.figure(f"a single server, {queue}: {len(seconds)} kills, {late} of them a step late; ended after {max(seconds):.1f} s at most")
