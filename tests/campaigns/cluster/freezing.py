"""An owner that stands still while others take over, and then goes on as if nothing had happened."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.cluster.fleet import PostgresFleet
from tests.campaigns.cluster.history import History, instance_of, written_too_late
from tests.campaigns.cluster.kills import SERVED_WITHIN
from tests.campaigns.cluster.report import Report
from tests.campaigns.cluster.serving import seconds_until_served
from tests.campaigns.cluster.traffic import Traffic, only
from tests.campaigns.crash.ledger import payload_of

LATE_PATIENCE = 120_000
"""Milliseconds for a call that is sent to a frozen instance: it is answered once that goes on."""


def freeze_an_owner(report: Report, traffic: Traffic, history: History, chance: random.Random, seconds: float, number: int = 0) -> None:
    """One that owns partitions; with writes to these waiting for it when it goes on, sent while it believed that they were its own."""
    fleet = traffic.fleet
    traffic.start()
    traffic.progress(50)
    home, places = _an_owner(traffic, history, chance)
    victim = fleet.instances[home]
    pause = threading.Event()
    begun = time.monotonic()
    victim.freeze()
    with ThreadPoolExecutor(max(1, len(places))) as pool:
        try:
            late = [pool.submit(_write, traffic, home, queue, partition, number) for queue, partition in places]
            served = seconds_until_served(traffic, f"freeze{number}", (home + 1) % fleet.homes, begun, seconds)
            taken_over = history.writes()
            pause.wait(max(0.0, seconds - (time.monotonic() - begun)))
        finally:
            victim.thaw()
        thawed = time.monotonic()
        outcomes = Counter(each.result() for each in late)
    if served.missing:
        report.fail(f"{victim.name} was frozen, and nobody took over {', '.join(served.missing)}")
    report.within(f"after {victim.name} was frozen, {served.last}", served.seconds, SERVED_WITHIN)
    again = seconds_until_served(traffic, f"thaw{number}", home, thawed)
    report.within(f"after {victim.name} was let go on, {again.last} by way of it", again.seconds, SERVED_WITHIN)
    traffic.progress(50)
    traffic.drain(home)
    at = {write.place: write for write in taken_over}
    too_late = written_too_late(history.writes(taken_over[-1].id), at, victim.name)
    for write in too_late[:10]:
        report.fail(f"{write.writer} wrote {write.place} under {write.fence} after {at[write.place].writer} had it")
    report.figure(
        f"frozen for {seconds:.0f} s with {len(places)} partitions: taken over after {served.seconds:.1f} s (last {served.last}); "
        f"the writes that waited for it: {dict(outcomes)}; under an old fence: {len(too_late)}"
    )


def _an_owner(traffic: Traffic, history: History, chance: random.Random) -> tuple[int, list[tuple[str, int]]]:
    """An instance, and the partitions of ours that it wrote last."""
    names = {traffic.ask("queues.info", 0, queue_name=queue)["incarnation"]: queue for queue in traffic.queues}
    owned: dict[str, list[tuple[str, int]]] = {}
    for (incarnation, partition), write in history.newest().items():
        if incarnation in names:
            owned.setdefault(instance_of(write.writer), []).append((names[incarnation], partition))
    homes = [home for home, instance in enumerate(traffic.fleet.instances) if instance.name in owned]
    home = chance.choice(homes)
    return home, owned[traffic.fleet.instances[home].name]


def _write(traffic: Traffic, home: int, queue: str, partition: int, number: int) -> str:
    name = f"{queue}-late{number}.{partition}.0"
    ledger = traffic.ledgers[queue]
    ledger.sending([name])
    item = {"payload": base64.b64encode(payload_of(name).encode()).decode()}
    address = only(traffic.fleet, home)
    answer = traffic.try_to("storage/items.import", address, LATE_PATIENCE, queue_name=queue, partition=partition, items=[item])
    if answer.outcome == "done":
        ledger.stored([name], answer.body["first_id"])
    elif answer.outcome == "refused":
        ledger.refused([name])
    return answer.problem or answer.outcome


def run_freezing(report: Report, fleet: PostgresFleet, traffic: Traffic, history: History, chance: random.Random, seconds: float) -> None:
    freeze_an_owner(report, traffic, history, chance, seconds)
    report.judge(traffic, fleet, history)
