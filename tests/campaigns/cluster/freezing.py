"""An owner that stands still while others take over, and then goes on as if nothing had happened."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tests.campaigns.cluster.kills import SERVED_WITHIN
from tests.campaigns.kit.history import History, instance_of, newest, written_too_late
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.serving import seconds_until_served
from tests.campaigns.kit.traffic import Traffic, only

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
            address = only(fleet, home)
            late = [
                pool.submit(traffic.put, queue, partition, f"{queue}-late{number}.{partition}.0", address, LATE_PATIENCE)
                for queue, partition in places
            ]
            served = seconds_until_served(traffic, f"freeze{number}", (home + 1) % fleet.homes, begun, seconds)
            taken_over = history.writes()
            pause.wait(max(0.0, seconds - (time.monotonic() - begun)))
        finally:
            victim.thaw()
        thawed = time.monotonic()
        answers = [each.result() for each in late]
        outcomes = Counter(answer.problem or answer.outcome for answer in answers)
    if served.missing:
        report.fail(f"{victim.name} was frozen, and nobody took over {', '.join(served.missing)}")
    report.within(f"after {victim.name} was frozen, {served.last}", served.seconds, SERVED_WITHIN)
    again = seconds_until_served(traffic, f"thaw{number}", home, thawed)
    report.within(f"after {victim.name} was let go on, {again.last} by way of it", again.seconds, SERVED_WITHIN)
    traffic.progress(50)
    traffic.drain(home)
    at = newest(taken_over)
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
    for (incarnation, partition), write in newest(history.writes()).items():
        if incarnation in names:
            owned.setdefault(instance_of(write.writer), []).append((names[incarnation], partition))
    homes = [home for home, instance in enumerate(traffic.fleet.instances) if instance.name in owned]
    home = chance.choice(homes)
    return home, owned[traffic.fleet.instances[home].name]
