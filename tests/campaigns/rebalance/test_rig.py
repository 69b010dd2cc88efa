"""The campaign's own parts, on a server that does not rebalance anything: what they do must be no fault of their own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sluiceway.client import Client
from tests.campaigns.kit.fleet import started
from tests.campaigns.kit.report import Report
from tests.campaigns.kit.traffic import loaded
from tests.campaigns.rebalance.copying import PARTITIONS, QUEUE, _fill, _try_some, listed
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.moving_traffic import MovingTraffic, RepeatingProducer
from tests.campaigns.rebalance.rebalance_judging import ask, how_many
from tests.server.server_process import wait_until
from tests.servers.postgres_server import PostgresServer

pytestmark = pytest.mark.crash


@pytest.mark.slow
def test_the_backends_are_weighed_while_it_runs_and_clients_notice_nothing(tmp_path: Path, postgres: PostgresServer) -> None:
    fleet = MixedFleet(tmp_path, postgres, 1)
    with loaded(MovingTraffic(fleet, {"orders": 2, "single": 1}, by_client=True)) as traffic:
        assert how_many(fleet, "orders") == {LOCAL: 1, SHARED: 1}
        traffic.start()
        traffic.progress(100)
        fleet.settle_on(SHARED)
        ask(fleet, "queues.create", queue_name="later", requested_partitions=2)
        assert how_many(fleet, "later") == {SHARED: 2}
        fleet.weigh({LOCAL: 1.0, SHARED: 0.5}, by_signal=True)
        traffic.progress(100)
        wait_until(lambda: traffic.tally.counts["repeated long after"] > 5, "produces that are repeated")
        traffic.drain(0)
        report = Report("rig")
        traffic.judge(report)
    assert not report.wrong
    assert traffic.tally.counts["completed"] > 100
    assert {"queue.produce", "queue.complete"} <= traffic.calls.p99(0, float("inf"), least=1).keys()


@pytest.mark.slow
def test_an_error_that_a_client_is_told_is_wrong(tmp_path: Path, postgres: PostgresServer) -> None:
    fleet = MixedFleet(tmp_path, postgres, 1)
    with loaded(MovingTraffic(fleet, {"orders": 1}, by_client=True)) as traffic:
        traffic.start()
        traffic.progress(10)
        ask(fleet, "queues.delete", queue_name="orders", force=True)
        wait_until(lambda: traffic.tally.faults > 0, "an error")
    assert any("queue_not_found" in example for example in traffic.tally.examples)


@pytest.mark.slow
def test_a_key_that_was_forgotten_is_found(tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RepeatingProducer.until_done
    made = threading.Event()

    def forgetful(self: RepeatingProducer, call_name: str, **fields: object) -> object:
        body, in_doubt = honest(self, call_name, **fields)
        if call_name == "queue.produce" and "idempotency_group" not in fields and self._done and self._done[-1][0] == fields:
            # As if it had been made under another key.
            self._done[-1] = ({**fields, "idempotency_key": f"{fields['idempotency_key']}'"}, self._done[-1][1])
            made.set()
        return body, in_doubt

    monkeypatch.setattr(RepeatingProducer, "until_done", forgetful)
    fleet = MixedFleet(tmp_path, postgres, 1)
    with loaded(MovingTraffic(fleet, {"orders": 2}, by_client=False)) as traffic:
        traffic.start()
        wait_until(lambda: traffic.tally.faults > 0, "a repetition that is stored again")
    assert made.is_set()
    assert traffic.tally.counts["doubled"] > 0


@pytest.mark.slow
def test_a_backlog_is_listed_with_all_that_it_has_behind_it(tmp_path: Path, postgres: PostgresServer) -> None:
    fleet = MixedFleet(tmp_path, postgres, 1)
    with started(fleet):
        with Client(fleet.url(0)) as client:
            client.create_queue(QUEUE, requested_partitions=PARTITIONS, expire_timeout="1d")
            _fill(client, 2_000)
            before = listed(fleet)
            _try_some(client, 2_000)
        after = listed(fleet)
    assert len(before) == len(after) == 2_000
    assert before.keys() == after.keys()
    assert {item.attempts for item in before.values()} == {0}
    assert {item.attempts for item in after.values()} >= {0, 1}
    assert sum(item.due_at is not None for item in before.values()) == 100
    assert sum(item.due_at is not None for item in after.values()) > 100
    assert all(item.headers and item.kind and item.reference and item.expires_at for item in after.values())
