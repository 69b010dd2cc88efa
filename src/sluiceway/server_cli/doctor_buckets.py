"""Checks of `sluiceway doctor` for buckets: whether they are fit, how quickly they answer, and what their requests cost."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from sluiceway.adapters.meta import opening
from sluiceway.adapters.storage.bucket_proof import FOLDER, Proof
from sluiceway.adapters.storage.bucket_requests import META
from sluiceway.adapters.storage.bucket_urls import open_bucket
from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local import stores
from sluiceway.model.backends import BucketBackend
from sluiceway.model.configuration import Configuration
from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server_cli.doctor_checks import Check

SAMPLES: Final = 5
"""Requests of each kind that are timed."""
SAMPLE: Final = bytes(1_000)
PATIENCE: Final = 20.0
"""Seconds for all requests to one bucket: they take two or three in S3 Standard."""
MIN_AGE: Final = 60.0
"""Seconds after a server's start from which on its counts are a rate: before, the opening of its partitions is most of them."""
_DAY: Final = 86_400.0


def probes(configuration: Configuration) -> Iterator[Check]:
    """Try each bucket of the configuration from this machine. Creates a few objects in `probe/`, and deletes them."""
    for name, settings in configuration.backends.items():
        if isinstance(settings, BucketBackend):
            yield _probe(name, partial(stores.open_objects, name, settings))
    if opening.is_bucket(configuration.cluster.meta):
        yield _probe(META, lambda: open_bucket(configuration.cluster.meta, "meta").objects)


def _probe(name: str, open_objects: Callable[[], ObjectStore]) -> Check:
    title = f"bucket {name}"
    try:
        create, read = asyncio.run(measure(open_objects()))
    except TimeoutError:
        return Check(title, "failed", f"no answer within {PATIENCE:.0f} s", "check the endpoint, and the way there from this machine")
    except (SluicewayError, StoreUnavailableError, UnknownWriteError) as error:
        fix = "check the bucket's name, region and endpoint, and that the key may read, write, list and delete objects"
        return Check(title, "failed", str(error), fix)
    detail = (
        f"honours both conditions of writes; create {create:.1f} ms, read {read:.1f} ms (medians of {SAMPLES}, from this machine). "
        "Not checked: versioning and lifecycle rules"
    )
    return Check(title, "ok", detail, figures={"create_p50_ms": round(create, 3), "read_p50_ms": round(read, 3)})


async def measure(objects: ObjectStore) -> tuple[float, float]:
    """Median duration of a create and of a read of 1,000 bytes, in milliseconds. Raises StoreUnavailableError for a bucket that does not
    honour the conditions of writes or is not available, UnknownWriteError, TimeoutError."""
    names = [f"{FOLDER}{os.urandom(8).hex()}" for _ in range(SAMPLES)]
    try:
        async with asyncio.timeout(PATIENCE):
            # First, and so in connections that the measurement finds open.
            await Proof(objects, lambda: os.urandom(8)).give()
            try:
                creates = [await _timed(objects.create(name, SAMPLE)) for name in names]
                reads = [await _timed(objects.get(name)) for name in names]
            finally:
                await objects.delete(names)
    finally:
        await objects.close()
    return median(creates), median(reads)


async def _timed(call: Awaitable[object]) -> float:
    began = stopwatch()
    await call
    return (stopwatch() - began) * 1_000


@dataclass(slots=True)
class _Usage:
    requests: float = 0
    throttled: float = 0
    dollars: float = 0
    prices: str = ""


def usage(metrics: str, now: float) -> Iterator[Check]:
    """What the buckets of an instance cost, by its metrics as text. `now`: seconds since the epoch."""
    found: defaultdict[str, _Usage] = defaultdict(_Usage)
    started = None
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "process_start_time_seconds":
                started = sample.value
            elif sample.name == "sluiceway_bucket_requests_total":
                found[sample.labels["backend"]].requests += sample.value
                found[sample.labels["backend"]].throttled += sample.value * (sample.labels["outcome"] == "throttled")
            elif sample.name == "sluiceway_bucket_request_dollars_total":
                found[sample.labels["backend"]].dollars += sample.value
                found[sample.labels["backend"]].prices = sample.labels["prices"]
    for backend, used in found.items():
        yield _rates(backend, used, None if started is None else now - started)


def _rates(backend: str, used: _Usage, age: float | None) -> Check:
    title = f"requests {backend}"
    if age is None or age < MIN_AGE:
        why = "the server does not say when it started" if age is None else f"the server has run for less than {MIN_AGE:.0f} s"
        return Check(title, "skipped", f"{used.requests:,.0f} so far; {why}, so their rate is not known")
    requests, dollars = (total / age * _DAY for total in (used.requests, used.dollars))
    detail = (
        f"{requests:,.0f} a day, for ${dollars:,.2f} at the list prices of {used.prices}, without storage and traffic: the average of this "
        f"instance since its start, {format_duration(round(age) * 1_000)} ago. {used.throttled:,.0f} were throttled"
    )
    figures = {"requests_per_day": round(requests), "dollars_per_day": round(dollars, 4), "throttled": used.throttled}
    return Check(title, "ok", detail, figures=figures)
