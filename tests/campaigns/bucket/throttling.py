"""A bucket that throttles, fails, answers late or not at all, while a cluster uses it: nothing is lost, and it recovers by itself."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.campaigns.cluster.kills import SERVED_WITHIN
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.serving import seconds_until_served
from tests.campaigns.kit.traffic import Traffic
from tests.servers.faulty_bucket import FaultyBucket


class Strike(NamedTuple):
    """That share of the requests is struck by the fault. `kill`: an instance is killed meanwhile, as only takeovers read much."""

    fault: str
    share: float
    kill: bool = False

    def __str__(self) -> str:
        return f"{self.fault} {self.share:.0%}" + (" and a kill" if self.kill else "")


STRIKES = (
    Strike("slow-down", 0.3),
    Strike("slow-down", 0.3, kill=True),
    Strike("slow-down", 1.0),
    Strike("internal-error", 0.3),
    Strike("conflict", 0.5),
    Strike("reset", 0.3),
    Strike("lost-answer", 0.3),
    Strike("lost-answer", 1.0),
    Strike("late-error", 0.5),
    Strike("truncated", 0.5, kill=True),
    Strike("slow-read", 0.5, kill=True),
    Strike("expired-token", 1.0),
    Strike("access-denied", 1.0),
    Strike("no-bucket", 1.0),
)
OUTCOMES = ("unavailable", "outcome_unknown")


def strike_with(
    strikes: Sequence[Strike], report: Report, traffic: Traffic, bucket: FaultyBucket, chance: random.Random, seconds: float
) -> None:
    """One after the other, under load; then every item is judged. `seconds`: of a fault of all requests; others last half as long."""
    times: dict[Strike, float] = {}
    for strike in strikes:
        times[strike] = _one(report, traffic, bucket, chance, strike, seconds)
        if report.wrong or traffic.tally.faults:
            return
    last = max(times, key=lambda strike: times[strike])
    report.figure(f"{len(times)} faults, all served {times[last]:.1f} s after their end at most ({last})")


def _one(report: Report, traffic: Traffic, bucket: FaultyBucket, chance: random.Random, strike: Strike, seconds: float) -> float:
    """Seconds until every partition was served after the fault."""
    traffic.start()
    traffic.progress(50)
    before, stored = Counter(traffic.tally.counts), _acknowledged(traffic)
    bucket.inject(strike.fault, strike.share)
    revive = traffic.fleet.strike(chance).revive if strike.kill else lambda: None
    try:
        threading.Event().wait(seconds if strike.share == 1 else seconds / 2)
        said, meanwhile = Counter(traffic.tally.counts) - before, _acknowledged(traffic) - stored
    finally:
        struck = bucket.mend()
    served = seconds_until_served(traffic, str(strike).replace(" ", ""), chance.randrange(traffic.fleet.homes))
    revive()
    if not struck:
        report.fail(f"{strike}: not one request was struck")
    if served.missing:
        report.fail(f"{strike}: never served again: {', '.join(served.missing)}")
    report.within(f"{strike}: recovery of {served.last}", served.seconds, SERVED_WITHIN)
    # What was acknowledged is to be in the bucket, and not only in its owner's memory.
    traffic.fleet.end()
    traffic.fleet.start()
    traffic.progress(50)
    traffic.drain(chance.randrange(traffic.fleet.homes))
    told = ", ".join(f"{said[name]} {name}" for name in OUTCOMES)
    report.say(f"{strike}: {struck} requests struck; {meanwhile} items stored, {told}; all served {served.seconds:.1f} s after its end")
    return served.seconds


def _acknowledged(traffic: Traffic) -> int:
    return sum(ledger.acknowledged for ledger in traffic.ledgers.values())
