"""How partitions are divided among backends of a real server when a rebalance is asked for."""

from __future__ import annotations

from collections import Counter

from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.mixed_fleet import MixedFleet
from tests.campaigns.rebalance.rebalance_judging import Moves, Refused, ask, how_many

NAMES = ("a", "b", "c")
MANY = 100


def run_spread(report: Report, fleet: MixedFleet) -> None:
    """The fleet has three equal backends."""
    moves = Moves(report, fleet)
    fleet.weigh({"a": 1.0, "b": 0.0, "c": 0.0})
    for queue, partitions in (("hundred", MANY), ("one", 1)):
        made = ask(fleet, "queues.create", queue_name=queue, requested_partitions=partitions)
        assert not isinstance(made, Refused), made
        _expect(report, fleet, queue, {"a": partitions})
    fleet.weigh({"a": 1.0, "b": 1.0, "c": 1.0}, by_signal=True)
    found = moves.do("hundred")
    _expect(report, fleet, "hundred", {"a": 34, "b": 33, "c": 33})
    if (len(found["plan"]["creates"]), len(found["plan"]["drains"])) != (66, 66):
        report.fail(f"66 of 100 partitions had to move: {found['plan']}")
    # A second one has nothing to do, and one partition stays where it is, as any backend is as good.
    for queue in ("hundred", "one"):
        answer = ask(fleet, "queue.rebalance", queue_name=queue)
        if not isinstance(answer, Refused) or answer.code != "nothing_to_rebalance":
            report.fail(f"there is nothing to do for {queue}, and the answer is {answer}")
    _expect(report, fleet, "one", {"a": 1})
    fleet.weigh({"a": 1.0, "b": 1.0, "c": 0.0})
    moves.do("hundred")
    _expect(report, fleet, "hundred", {"a": 50, "b": 50})
    fleet.weigh({"a": 0.0, "b": 1.0, "c": 1.0})
    for queue in ("hundred", "one"):
        moves.do(queue)
    _expect(report, fleet, "hundred", {"b": 50, "c": 50})
    if sum(how_many(fleet, "one").values()) != 1 or "a" in how_many(fleet, "one"):
        report.fail(f"one partition over two backends lies on {how_many(fleet, 'one')}")
    moves.judge_audit()
    report.figure(f"100 partitions over three equal backends: {_counts({'a': 34, 'b': 33, 'c': 33})}; 1 over two: 1; affinity 0: none")


def _expect(report: Report, fleet: MixedFleet, queue: str, wanted: dict[str, int]) -> None:
    if (found := how_many(fleet, queue)) != Counter(wanted):
        report.fail(f"{queue} lies on {dict(found)}, not on {wanted}")
    report.say(f"{queue}: {_counts(found)}")


def _counts(found: dict[str, int] | Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
