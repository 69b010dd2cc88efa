"""What an operator does, step by step, under the load of clients that must notice nothing: the scenarios of docs/guides/rebalance.md."""

from __future__ import annotations

import time

from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import DEAD_QUEUE
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, Backend, MixedFleet
from tests.campaigns.rebalance.moves import vacate
from tests.campaigns.rebalance.moving_traffic import MovingTraffic
from tests.campaigns.rebalance.rebalance_judging import Moves, how_many
from tests.servers.faulty_bucket import FaultyBucket
from tests.servers.postgres_server import PostgresServer

FRESH = "fresh"


def run_operations(report: Report, fleet: MixedFleet, traffic: MovingTraffic, storage: PostgresServer | FaultyBucket) -> None:
    """`storage`: the server of the shared backend, on which nothing else lies."""
    moves = Moves(report, fleet)
    traffic.start()
    traffic.progress(100)
    for scenario in (_add, _remove, _new_backend, _vacate_and_remove):
        begun = time.monotonic()
        scenario(report, fleet, traffic, moves)
        report.figure(f"{scenario.__doc__}: {time.monotonic() - begun:.0f} s")
        if report.wrong or traffic.tally.faults:
            return
    begun = time.monotonic()
    _maintain(report, fleet, traffic, moves, storage)
    report.figure(f"a backend stopped and started meanwhile: {time.monotonic() - begun:.0f} s")
    traffic.drain(0)
    moves.judge_audit()
    hidden = ", ".join(f"{count} {code}" for code, count in sorted(traffic.calls.hidden.items())) or "nothing"
    report.figure(f"the client kept from its users: {hidden}")


def _add(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves) -> None:
    """partitions added"""
    _size(report, fleet, traffic, moves, 8)


def _remove(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves) -> None:
    """partitions removed"""
    _size(report, fleet, traffic, moves, 4)


def _size(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves, partitions: int) -> None:
    moves.do("orders", traffic.tally, requested_partitions=partitions)
    found = how_many(fleet, "orders")
    if found != {LOCAL: partitions // 2, SHARED: partitions // 2}:
        report.fail(f"orders was to have {partitions} partitions, and has {dict(found)}")
    traffic.progress(100)


def _new_backend(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves) -> None:
    """a new backend, and partitions spread over all three"""
    fleet.backends[FRESH] = Backend(1.0)
    fleet.reload()
    moves.do("orders", traffic.tally, requested_partitions=6)
    if (found := how_many(fleet, "orders")) != {LOCAL: 2, SHARED: 2, FRESH: 2}:
        report.fail(f"orders was to be spread over three backends, and lies on {dict(found)}")
    traffic.progress(100)


def _vacate_and_remove(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves) -> None:
    """a backend vacated and taken out of the configuration"""
    fleet.weigh({FRESH: 0.0})
    kept = fleet.backends.pop(FRESH)
    if not fleet.is_reload_refused():
        report.fail(f"{FRESH} could be taken out of the configuration with partitions on it")
    fleet.backends[FRESH] = kept
    fleet.reload()
    for queue in (*traffic.queues, DEAD_QUEUE):
        moves.do_if_needed(queue, traffic.tally, drain="copy" if queue == DEAD_QUEUE else "natural")
    if left := [queue for queue in (*traffic.queues, DEAD_QUEUE) if FRESH in how_many(fleet, queue)]:
        report.fail(f"{FRESH} was vacated, and still has partitions of {left}")
    del fleet.backends[FRESH]
    fleet.reload()
    traffic.progress(100)


def _maintain(report: Report, fleet: MixedFleet, traffic: MovingTraffic, moves: Moves, storage: PostgresServer | FaultyBucket) -> None:
    vacate(report, fleet, traffic, moves, LOCAL, "copy")
    storage.stop()
    report.say("the server of the vacated backend is stopped")
    traffic.progress(300)
    storage.start()
    report.say("and is there again")
    fleet.await_ready()
    fleet.weigh({LOCAL: 1.0, SHARED: 1.0})
    for queue in (*traffic.queues, DEAD_QUEUE):
        moves.do_if_needed(queue, traffic.tally, drain="copy" if queue == DEAD_QUEUE else "natural")
    if SHARED not in how_many(fleet, "orders"):
        report.fail(f"orders was to come back to {SHARED}, and lies on {dict(how_many(fleet, 'orders'))}")
    traffic.progress(100)
