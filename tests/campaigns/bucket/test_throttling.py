"""Faults of a bucket that a cluster must bear, and one that nothing could: a store that forgets what it has acknowledged is found out."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.campaigns.bucket.throttling import Strike, strike_with
from tests.campaigns.kit.fleet import PostgresFleet
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import Traffic, loaded
from tests.servers.faulty_bucket import faulty_bucket
from tests.servers.postgres_server import PostgresServer


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost-answer", "forgotten"])
def test_a_store_that_forgets_is_found_out_and_one_that_is_unheard_is_not(tmp_path: Path, postgres: PostgresServer, fault: str) -> None:
    report, guilty = Report(fault), fault == "forgotten"
    with (
        faulty_bucket() as bucket,
        loaded(Traffic(PostgresFleet(tmp_path, postgres, 2, bucket=bucket), {"wide": 3, "single": 1})) as traffic,
    ):
        # With items gone, what comes next may fail in any way.
        with contextlib.suppress(AssertionError) if guilty else contextlib.nullcontext():
            strike_with([Strike(fault, 0.3, kill=True)], report, traffic, bucket, random.Random(1), 4)
        found = [*report.wrong, *traffic.tally.examples]
    assert bool(found) == guilty, found
