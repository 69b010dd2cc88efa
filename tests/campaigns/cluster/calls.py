"""Single calls on a cluster that has nothing else to do: how soon, and what they say while an instance is down."""

from __future__ import annotations

import base64
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.campaigns.kit.history import History, instance_of, newest
from tests.campaigns.kit.report import Report, quantile
from tests.campaigns.kit.traffic import Traffic, only
from tests.server.server_process import wait_until

FIRST_PRODUCE_AIM = 0.100
RELAY_AIM = 0.050
RELAY, RELAY_PARTITIONS = "relay", 8
SPANNING, SPANNING_PARTITIONS = "spanning", 12
HURRY = "500ms"
"""Shorter than any takeover: an instance must have been silent for seconds before it is given up."""


def create_and_produce(report: Report, traffic: Traffic, chance: random.Random, times: int) -> None:
    """A queue is made by way of one instance, and at once gets its first item by way of another."""
    seconds = []
    for number in range(times):
        queue = f"new-{number}"
        home = chance.randrange(traffic.fleet.homes)
        begun = time.monotonic()
        traffic.ask("queues.create", home, queue_name=queue, requested_partitions=chance.choice((1, 2, 4)))
        item = {"items": [{"utf8": "first"}], "idempotency_key": "first"}
        traffic.ask("queue.produce", (home + 1) % traffic.fleet.homes, queue_name=queue, **item)
        seconds.append(time.monotonic() - begun)
        traffic.ask("queues.delete", home, queue_name=queue, force=True)
    report.figure(f"create → first produce elsewhere, {times} times: {_ms(seconds)}")
    report.aim("create → first produce (median)", statistics.median(seconds), FIRST_PRODUCE_AIM)


def relay(report: Report, traffic: Traffic, chance: random.Random, times: int) -> None:
    """An item is produced by way of one instance while a consumer waits at another."""
    homes = traffic.fleet.homes
    traffic.ask("queues.create", 0, queue_name=RELAY, requested_partitions=RELAY_PARTITIONS)
    seconds = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(times):
            home = chance.randrange(homes)
            waiting = pool.submit(_lease_one, traffic, home)
            wait_until(lambda home=home: _waiting(traffic, home) > 0, "a waiting lease")  # type: ignore[misc]
            begun = time.monotonic()
            there = (home + chance.randrange(1, max(2, homes))) % homes
            traffic.ask("queue.produce", there, queue_name=RELAY, items=[{"utf8": str(number)}], idempotency_key=str(number))
            body, at = waiting.result()
            got = [base64.b64decode(item["bytes"]).decode() for item in body["items"]]
            if got != [str(number)]:
                report.fail(f"item {number} was produced, and {got} arrived")
                return
            seconds.append(at - begun)
            traffic.ask("queue.complete", home, queue_name=RELAY, lease_ids=[lease["lease_id"] for lease in body["leases"]])
    report.figure(f"produced here, waited for there, {times} times: {_ms(seconds)}")
    report.aim("produced here, waited for there (p99)", quantile(seconds, 0.99), RELAY_AIM)


def _lease_one(traffic: Traffic, home: int) -> tuple[Any, float]:
    answer = traffic.try_to("queue.lease", only(traffic.fleet, home), queue_name=RELAY, client_id="waiter", request_timeout="25s")
    assert answer.outcome == "done", answer
    return answer.body, time.monotonic()


def _waiting(traffic: Traffic, home: int) -> int:
    answer = traffic.ask("queue.stats", home, queue_name=RELAY)
    return sum(each["lease_waiting"] for each in answer["logical_queues"])


def complete_while_one_is_down(report: Report, traffic: Traffic, history: History, chance: random.Random) -> None:
    """Ids of all instances in one call while one of them is dead: the others' are settled, the rest follows by repeating the call."""
    fleet = traffic.fleet
    made = traffic.ask("queues.create", 0, queue_name=SPANNING, requested_partitions=SPANNING_PARTITIONS)
    for partition in range(SPANNING_PARTITIONS):
        item = {"payload": base64.b64encode(str(partition).encode()).decode()}
        traffic.ask("storage/items.import", 0, queue_name=SPANNING, partition=partition, items=[item])
    ids = dict(_lease_all(traffic))
    owners = {place[1]: instance_of(write.writer) for place, write in newest(history.writes()).items() if place[0] == made["incarnation"]}
    names = sorted(set(owners.values()))
    if sorted(ids) != list(range(SPANNING_PARTITIONS)) or len(names) < 3:
        report.fail(f"{sorted(ids)} of {SPANNING_PARTITIONS} items could be leased, from {names}")
        return
    chosen = chance.choice(names)
    victim = next(instance for instance in fleet.instances if instance.name == chosen)
    caller = (fleet.instances.index(victim) + 1) % fleet.homes
    lost = [ids[partition] for partition, owner in owners.items() if owner == victim.name]
    kept = [ids[partition] for partition, owner in owners.items() if owner != victim.name]
    victim.kill()
    begun = time.monotonic()
    whole: dict[str, Any] = {"queue_name": SPANNING, "ids": [*lost, *kept]}
    first = traffic.try_to("queue.complete", only(fleet, caller), **whole, request_timeout=HURRY)
    if first.outcome == "done":
        report.fail(f"a complete succeeded while {victim.name} was down, which had {len(lost)} of its items: {first.body}")
    at_once = traffic.ask("queue.complete", caller, queue_name=SPANNING, ids=kept)
    if at_once["completed"] or len(at_once["ignored"]) != len(kept):
        report.fail(f"items of living instances were not settled by the call that failed: {at_once}")
    repeated = traffic.ask("queue.complete", caller, **whole)
    seconds = time.monotonic() - begun
    known = {entry["id"]: entry["reason"] for entry in repeated["ignored"]}
    if repeated["completed"] + len(known) != len(ids) or not {*known.values()} <= {"completed", "settled"} or not {*kept} <= {*known}:
        report.fail(f"the repeated call answers {repeated}")
    left = list(_lease_all(traffic, "1s"))
    counts = traffic.counters(SPANNING, caller)
    if left or counts["completed"] != len(ids) or counts["total"]:
        report.fail(f"after all was completed {left} is served, and the counts are {dict(counts)}")
    fleet.restart(victim)
    report.figure(
        f"complete over {len(names)} instances with one down: first {first.problem or first.outcome}, {len(kept)} of {len(ids)} settled, "
        f"done {seconds:.1f} s after the kill"
    )


def _lease_all(traffic: Traffic, request_timeout: str = "2s") -> Iterator[tuple[int, str]]:
    """Partition and id of each item that there is, by way of every instance that runs."""
    size = {"batch_size": 1_000, "max_partitions": SPANNING_PARTITIONS, "lease_timeout": "2m"}
    for home, instance in enumerate(traffic.fleet.instances):
        while instance.runs:
            key = f"{home}-{time.monotonic_ns()}"
            fields = {"client_id": "spanning", "lease_key": key, "request_timeout": request_timeout, **size}
            body = traffic.ask("queue.lease", home, queue_name=SPANNING, **fields)
            if not body["items"]:
                break
            yield from ((item["partition"], item["id"]) for item in body["items"])


def _ms(seconds: list[float]) -> str:
    median, late, most = (1_000 * each for each in (statistics.median(seconds), quantile(seconds, 0.99), max(seconds)))
    return f"{median:.0f} ms in the median, p99 {late:.0f} ms, at most {most:.0f} ms"
