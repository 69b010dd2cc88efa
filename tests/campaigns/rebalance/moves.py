"""Partitions are added, removed and moved from one kind of storage to the other under the load of clients that must notice nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import DEAD_QUEUE
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.rebalance_judging import Moves, how_many

SLOWER_AIM = 3.0
SLOWEST = 8
QUEUES = {"orders": 4, "single": 1}


def run_moves(report: Report, fleet: MixedFleet, traffic: MovingTraffic, seconds: float) -> None:
    """4 → 12 → 3 partitions, then everything to the shared backend and back; `seconds` of load before, as a measure."""
    moves = Moves(report, fleet)
    traffic.start()
    traffic.progress(200)
    begun = time.monotonic()
    threading.Event().wait(seconds)
    moving = time.monotonic()
    for partitions, drain in ((12, "natural"), (3, "copy")):
        found = moves.do("orders", traffic.tally, requested_partitions=partitions, drain=drain)
        report.say(f"orders has {partitions} partitions, {found['moved']} items were moved; {dict(how_many(fleet, 'orders'))}")
        traffic.progress(100)
    # The dead queue, too: dead items are on their way to it all the time, and nobody takes them.
    moves.do(DEAD_QUEUE, traffic.tally, requested_partitions=5, drain="copy")
    moves.do(DEAD_QUEUE, traffic.tally, requested_partitions=2, drain="copy")
    for there, drain in ((SHARED, "natural"), (LOCAL, "copy")):
        vacate(report, fleet, traffic, moves, there, drain)
    ended = time.monotonic()
    traffic.drain(fleet.homes - 1)
    _compare(report, traffic, begun, moving, ended)
    _explain_slowest(report, traffic, moves, moving, ended)
    moves.judge_audit()
    hidden = ", ".join(f"{count} {code}" for code, count in sorted(traffic.calls.hidden.items())) or "nothing"
    report.figure(f"{len(moves.ended)} rebalances in {ended - moving:.0f} s; the client kept from its users: {hidden}")


def vacate(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves, there: str, drain: str = "natural") -> None:
    """Everything goes to that one of the two backends."""
    fleet.settle_on(there)
    # Nobody takes from the dead queue, and one that keeps its order is emptied by its consumers only.
    moves.do_if_needed(DEAD_QUEUE, traffic.tally, drain="copy")
    moves.do_if_needed("single", traffic.tally)
    moves.do_all(traffic.tally, drain=drain)
    for queue in (*traffic.queues, DEAD_QUEUE):
        if set(found := how_many(fleet, queue)) != {there}:
            report.fail(f"{queue} was to lie on {there}, and lies on {dict(found)}")
    traffic.progress(100)
    report.say(f"everything lies on {there}")


def _compare(report: Report, traffic: MovingTraffic, begun: float, moving: float, ended: float) -> None:
    before, during = traffic.calls.p99(begun, moving), traffic.calls.p99(moving, ended)
    told = []
    for name in sorted(before.keys() & during.keys()):
        ratio = during[name] / before[name]
        told.append(f"{name} {1_000 * before[name]:.0f} → {1_000 * during[name]:.0f} ms")
        report.aim(f"p99 of {name} while partitions move, as a ratio", ratio, SLOWER_AIM)
    report.figure(f"p99 before → meanwhile: {', '.join(told) or 'too few calls'}")


def _explain_slowest(report: Report, traffic: MovingTraffic, moves: Moves, moving: float, ended: float) -> None:
    """At which step of which rebalance the slowest calls were under way."""
    shift = time.time() - time.monotonic()
    for call in traffic.calls.slowest(moving, ended, SLOWEST):
        steps = [name for found in moves.ended for name in steps_between(found, call.at - call.seconds + shift, call.at + shift)]
        report.say(f"{call.name} took {1_000 * call.seconds:.0f} ms: {', '.join(steps) or 'between two rebalances'}")


def steps_between(found: Mapping[str, Any], since: float, until: float) -> Iterator[str]:
    """Those of that rebalance which had begun by `until`, and ended after `since` (seconds since 1970)."""
    before = _seconds(found["created_at"])
    for step in found["steps"]:
        after = _seconds(step["at"])
        if before <= until and since <= after:
            yield f"{found['queue_name']} {step['step']}"
        before = after


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
