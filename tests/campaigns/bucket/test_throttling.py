"""Faults of a bucket that a cluster must bear, and one that nothing could: a store that forgets what it has acknowledged is found out."""

from __future__ import annotations

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
def test_a_store_that_forgets_is_found_out_and_one_that_is_unheard_is_not(
    tmp_path: Path, postgres: PostgresServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.campaigns.kit.traffic.EMPTY_WITHIN", 30)
    report = Report(fault)
    with faulty_bucket() as bucket:
        fleet = PostgresFleet(tmp_path, postgres, 2, bucket=bucket)
        with loaded(Traffic(fleet, {"wide": 3, "single": 1})) as traffic:
            try:
                strike_with([Strike(fault, 0.3)], report, traffic, bucket, random.Random(1), 4)
            except AssertionError as error:
                # Partitions that are damaged take nothing, and keep their queue from becoming empty.
                report.fail(str(error))
            found = [*report.wrong, *traffic.tally.examples]
    assert bool(found) == (fault == "forgotten"), found
