"""One instance of a cluster with thousands of partitions dies: how long until the others have opened what it had."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sluiceway.client import Client
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.limits import MAX_PARTITIONS
from tests.campaigns.kit.fleet import Fleet, started
from tests.campaigns.kit.report import Report

WITHIN = 5.0
"""Seconds from the moment at which a death is known."""
_PATIENCE = 300.0
"""Seconds for all partitions to be open, at the beginning and after the death."""
_LOOK_AFTER = 0.1


def take_over_many(report: Report, fleet: Fleet, partitions: int) -> None:
    """`partitions`: of the whole cluster. Each instance has about as many of them."""
    with started(fleet), Client(fleet.instances[0].url, retry_for=f"{_PATIENCE:g}s") as client:
        *others, victim = fleet.instances
        sizes = [min(MAX_PARTITIONS, partitions - begun) for begun in range(0, partitions, MAX_PARTITIONS)]
        queues = {f"q{number}": size for number, size in enumerate(sizes)}
        for queue, size in queues.items():
            client.create_queue(queue, requested_partitions=size)
        report.say(f"{partitions:,} partitions open after {_until_open(client, queues):.1f} s")
        listed = client.list_instances()
        assert listed.parameters is not None
        held = next(each.partitions for each in listed.items if each.address == victim.url)
        victim.kill()
        # Its last heartbeat was half a second ago at most; so much sooner its death may be known.
        took = _until_open(client, queues) - parse_duration(listed.parameters["member_timeout"], "member_timeout") / 1000
        report.figure(f"{held:,} of {partitions:,} partitions taken over by {len(others)} instances {took:.1f} s after the death was known")
        report.aim("seconds until a dead instance's partitions are open", took, WITHIN)


def _until_open(client: Client, queues: Mapping[str, int]) -> float:
    """Seconds until each partition of them has an owner that has opened it. Raises AssertionError after `_PATIENCE`."""
    began, left = time.monotonic(), dict(queues)
    while left:
        assert time.monotonic() - began < _PATIENCE, f"partitions of {', '.join(left)} are not open"
        queue, size = next(iter(left.items()))
        if sum(each.next_offset is not None for each in client.stats(queue).partitions) == size:
            del left[queue]
        else:
            time.sleep(_LOOK_AFTER)
    return time.monotonic() - began
