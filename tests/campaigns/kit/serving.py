"""How long until every partition is served again: each must take an item, or show its items, by way of any instance that answers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.campaigns.kit.load import Answer
from tests.campaigns.kit.traffic import DEAD_QUEUE, Door, Traffic

POLL_INTERVAL = 0.1
TRY_TIMEOUT = 1_000
"""Milliseconds that a call has."""
PATIENCE = 10_000
"""Milliseconds that one try may take."""
GIVE_UP = 60.0
"""Seconds after which a partition is taken to be lost for good."""


class Try(NamedTuple):
    """A call to a partition, in seconds from `begun`, and how it ended."""

    began: float
    ended: float
    outcome: str


class Served(NamedTuple):
    """Seconds from `begun` until the last partition was served, which it was, and the calls to it; those that had not been served when it
    was given up."""

    seconds: float
    last: str
    missing: list[str]
    tries: list[Try]


class Awake(Door):
    """Not by way of one that is frozen, which would hold the call until it goes on."""

    def get(self) -> str:
        url = super().get()
        for _ in range(self._fleet.homes):
            if self._fleet.is_frozen(url):
                self.failed(url)
                url = super().get()
        return url


def seconds_until_served(
    traffic: Traffic, label: str, home: int, begun: float | None = None, give_up: float = GIVE_UP, try_timeout: int = TRY_TIMEOUT
) -> Served:
    """Ask every partition until it was served once. Calls go first to that home; the items are in the ledgers; labels must differ."""
    start = time.monotonic() if begun is None else begun
    places = [(queue, partition) for queue, count in traffic.partitions().items() for partition in range(count)]
    tries: dict[str, list[Try]] = {f"{queue}/{partition}": [] for queue, partition in places}

    def until_served(place: tuple[str, int]) -> float | None:
        door = Awake(traffic.fleet, home)
        pause = threading.Event()
        for number in itertools.count():
            began = time.monotonic() - start
            answer = _try(traffic, door, *place, f"{place[0]}-{label}x{number}.{place[1]}.0", try_timeout)
            ended = time.monotonic() - start
            outcome = f"{answer.problem or answer.outcome} {answer.detail}".rstrip()
            tries[f"{place[0]}/{place[1]}"].append(Try(began, ended, outcome))
            if answer.outcome == "done":
                return ended
            if ended > give_up:
                return None
            pause.wait(POLL_INTERVAL)
        raise AssertionError("endless")

    with ThreadPoolExecutor(len(places)) as pool:
        times = dict(zip(places, pool.map(until_served, places), strict=True))
    missing = [f"{queue}/{partition}" for (queue, partition), seconds in times.items() if seconds is None]
    found = {f"{queue}/{partition}": seconds for (queue, partition), seconds in times.items() if seconds is not None}
    last = max(found, key=lambda place: found[place], default="")
    shown = missing[0] if missing else last
    return Served(time.monotonic() - start if missing else found[last], shown, missing, tries.get(shown, []))


def longest_hole(traffic: Traffic, label: str, home: int, is_over: Callable[[], bool], give_up: float = GIVE_UP) -> Served:
    """Ask every partition again and again until it is over, and once more: the longest that one of them took to answer."""
    longest = Served(0.0, "none", [], [])
    for number in itertools.count():
        was_over = is_over()
        longest = max(longest, seconds_until_served(traffic, f"{label}n{number}", home, give_up=give_up), key=lambda each: each.seconds)
        if was_over or longest.missing:
            break
    return longest


def _try(traffic: Traffic, door: Door, queue: str, partition: int, name: str, timeout: int) -> Answer:
    if queue == DEAD_QUEUE:
        return traffic.try_to("storage/items.list", door, PATIENCE, limit=1, queue_name=queue, partition=partition)
    return traffic.put(queue, partition, name, door, PATIENCE, request_timeout=f"{timeout}ms")
