"""Leased items as an Arrow stream: what a block completes, puts back and releases, and leases that are kept meanwhile."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sluiceway import testing
from sluiceway.client import CallError, Client, DeadItem, RetryItem, SluicewayError, job_leases
from sluiceway.client.arrow import ROWS
from sluiceway.client.lease_stream import LeaseStream
from tests.client.test_consumer import total
from tests.server.server_running import eventually

_numbers = itertools.count()


@pytest.fixture(scope="module")
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        yield server


@pytest.fixture
def queue(served: testing.TestServer) -> str:
    name = f"q-{next(_numbers)}"
    served.client.create_queue(f"{name}.dead")
    served.client.create_queue(name, dead_queue=f"{name}.dead", requested_partitions=2)
    return name


def fill(client: Client, queue_name: str, items: int, calls: int = 1) -> None:
    for call in range(calls):
        client.produce_arrow(queue_name, pa.table({"payload": [b"%d" % (call * items + each) for each in range(items)]}))


def counts(client: Client, queue_name: str, *names: str) -> list[int]:
    return [total(client, queue_name, name) for name in names]


def test_a_stream_leases_as_it_is_read_and_completes_at_the_end(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 500, calls=4)
    with LeaseStream(client, queue, max_items=1_200, batch_size=300) as stream:
        reader = stream.reader()
        assert (reader.schema, stream.count) == (ROWS, 0)
        first = reader.read_next_batch()
        assert stream.count == first.num_rows == 300
        rest = reader.read_all()
        assert counts(client, queue, "total_leased", "completed") == [1_200, 0]
        payloads = {*first["payload"].to_pylist(), *rest["payload"].to_pylist()}
        assert len(payloads) == 1_200
    assert counts(client, queue, "total_leased", "completed", "ready") == [0, 1_200, 800]


def test_each_reading_has_the_same_items_and_takes_no_others(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 100, calls=3)
    with LeaseStream(client, queue, max_items=250, batch_size=60) as stream:
        first = stream.reader()
        begun = [first.read_next_batch() for _ in range(2)]
        whole = pa.table(stream)
        begun += list(first)
        assert pa.Table.from_batches(begun)["id"].to_pylist() == whole["id"].to_pylist() == pa.table(stream)["id"].to_pylist()
        assert stream.count == len(whole) == 250
        fill(client, queue, 100)
    assert counts(client, queue, "completed", "ready") == [250, 150]


def test_the_end_of_the_first_reading_is_the_end_of_each(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 10)
    with LeaseStream(client, queue) as stream:
        assert len(pa.table(stream)) == 10
        fill(client, queue, 10)
        assert len(pa.table(stream)) == 10
    assert counts(client, queue, "completed", "ready") == [10, 10]


def test_several_readers_at_once_see_each_item_once(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 300, calls=2)
    found: list[list[str]] = []
    with LeaseStream(client, queue, max_items=600, batch_size=20) as stream:

        def read() -> None:
            found.append(pa.table(stream)["id"].to_pylist())

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 4
    assert all(ids == found[0] and len(set(ids)) == 600 for ids in found)


def test_rows_give_items_other_outcomes(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 9)
    with LeaseStream(client, queue) as stream:
        ids = pa.table(stream)["id"].to_pylist()
        outcomes = {"id": ids[:4], "outcome": ["dead", "dead", "retry", "retry"], "reason": ["no good", None, None, None]}
        stream.settle(outcomes | {"retry_after_ms": [None, None, 3_600_000, None]})
        stream.settle(pa.table({"id": ids[1:2], "outcome": ["done"]}))
        assert counts(client, queue, "completed", "dead") == [0, 0]
    eventually(lambda: counts(client, queue, "completed", "dead", "scheduled", "ready") == [6, 1, 1, 1])
    (dead,) = client.lease(f"{queue}.dead", request_timeout="1m")
    assert (dead.headers or {})["sluiceway-reason"] == "no good"


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (ValueError("no"), {"completed": 0, "retried": 30, "ready": 30, "total_leased": 0}),
        (RetryItem(after="1h"), {"completed": 0, "retried": 30, "scheduled": 30}),
        (DeadItem("all of them"), {"completed": 0, "dead": 30}),
        (KeyboardInterrupt(), {"completed": 0, "released": 30, "retried": 0, "ready": 30}),
    ],
)
def test_an_exception_puts_all_items_back(served: testing.TestServer, queue: str, error: BaseException, after: dict[str, int]) -> None:
    client = served.client
    fill(client, queue, 30)

    def work() -> None:
        with LeaseStream(client, queue, batch_size=10) as stream:
            stream.settle({"id": pa.table(stream)["id"].to_pylist()[:3], "outcome": ["done", "dead", "retry"]})
            raise error

    with pytest.raises(type(error)):
        work()
    # Dead items leave one lease after the other.
    eventually(lambda: dict(zip(after, counts(client, queue, *after), strict=True)) == after)


def test_the_reason_of_an_exception_is_kept(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 1)

    def work() -> None:
        with LeaseStream(client, queue) as stream:
            pa.table(stream)
            raise ValueError("no such column")

    with pytest.raises(ValueError, match="no such column"):
        work()
    (item,) = client.peek(queue)
    (failure,) = client.explain(queue, item.id).failures
    assert (failure.attempt, failure.reason) == (1, "ValueError: no such column")


def test_leases_are_kept_for_as_long_as_the_block_runs(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 20)
    with LeaseStream(client, queue, lease_timeout="6s") as stream:
        (one, *_) = pa.table(stream)["id"].to_pylist()
        first = client.explain(queue, one).lease_deadline
        assert first is not None
        eventually(lambda: (client.explain(queue, one).lease_deadline or first) > first)
        served.clock.advance("5s")
    assert counts(client, queue, "completed", "expired") == [20, 0]


def test_items_whose_lease_ran_out_are_served_again_and_the_log_says_so(
    served: testing.TestServer, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = served.client
    fill(client, queue, 20)
    with LeaseStream(client, queue) as stream:
        ids = pa.table(stream)["id"].to_pylist()
        served.clock.advance("61s")
        with caplog.at_level(logging.WARNING):
            stream.settle({"id": ids[:1], "outcome": ["dead"]})
            assert len(pa.table(stream)) == 0
    assert counts(client, queue, "completed", "expired", "dead", "ready") == [0, 20, 0, 20]
    for said in ("1 items were no longer leased", "has ended before it was read", "had ended (expired): their items are served again"):
        assert said in caplog.text


def test_a_lease_that_has_ended_does_not_keep_the_others_from_being_put_back(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 10)

    def work() -> None:
        with LeaseStream(client, queue, batch_size=5) as stream:
            first = stream.reader().read_next_batch()
            assert len(pa.table(stream)) == 10
            client.complete(queue, lease_ids=[first["lease_id"][0].as_py()])
            raise DeadItem("the file is damaged")

    with pytest.raises(DeadItem):
        work()
    assert counts(client, queue, "completed", "dead", "total_leased") == [5, 5, 0]


def test_it_waits_for_the_first_item_alone(served: testing.TestServer, queue: str) -> None:
    client = served.client
    found: list[int] = []

    def read() -> None:
        with LeaseStream(client, queue, request_timeout="1m") as stream:
            found.append(len(pa.table(stream)))

    reading = threading.Thread(target=read)
    reading.start()
    eventually(lambda: client.stats(queue).logical_queues[0].lease_waiting)
    fill(client, queue, 5)
    reading.join()
    assert found == [5]


class Lossy:
    """A client whose answers to some calls of `lease_arrow`, by number, are lost."""

    def __init__(self, client: Client, *lost: int) -> None:
        self._client, self._lost, self._calls = client, lost, itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lease_arrow(self, *given: Any, **options: Any) -> Any:
        answer = self._client.lease_arrow(*given, **options)
        if next(self._calls) in self._lost:
            raise CallError("outcome_unknown", "the connection broke")
        return answer


def test_a_lost_answer_does_not_end_a_stream(served: testing.TestServer, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its items are offered again later; those that were leased before are completed, and others are leased."""
    client: Any = Lossy(served.client, 1)
    fill(client, queue, 40, calls=3)
    with caplog.at_level(logging.WARNING), LeaseStream(client, queue, batch_size=40) as stream:
        assert len(pa.table(stream)) == 80
    assert counts(client, queue, "completed", "total_leased") == [80, 40]
    assert "offered again when it runs out" in caplog.text


def test_a_server_whose_answers_are_all_lost_ends_a_stream(served: testing.TestServer, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_leases, "backoff", lambda failures, roll: 0.0)
    client: Any = Lossy(served.client, *range(100))
    fill(client, queue, 100)
    with pytest.raises(CallError, match="the connection broke"), LeaseStream(client, queue, batch_size=1) as stream:
        stream.reader().read_all()
    assert counts(client, queue, "total_leased") == [job_leases.LOST_ANSWERS]


@pytest.mark.parametrize("options", [{"max_items": 0}, {"batch_size": 10_001}, {"lease_timeout": "1ms"}])
def test_a_wrong_option_is_named(served: testing.TestServer, options: dict[str, Any]) -> None:
    with pytest.raises(SluicewayError) as refused:
        LeaseStream(served.client, "q", **options)
    assert refused.value.field == next(iter(options))


def test_it_is_read_in_its_block_and_used_once(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 5)
    stream = LeaseStream(client, queue, batch_size=1)
    with pytest.raises(SluicewayError, match="in its `with` block"):
        stream.reader()
    with stream:
        reader = stream.reader()
        reader.read_next_batch()
    with pytest.raises(Exception, match="block of the lease stream has ended"):
        reader.read_next_batch()
    with pytest.raises(SluicewayError, match="has ended"):
        stream.settle({"id": ["aaaaaaaa.0.1"], "outcome": ["done"]})
    with pytest.raises(SluicewayError, match="already used"), stream:
        pass
    assert counts(client, queue, "completed", "ready") == [1, 4]


def test_an_item_of_another_queue_is_refused(served: testing.TestServer, queue: str) -> None:
    client = served.client
    fill(client, queue, 1)

    def work() -> None:
        with LeaseStream(client, queue) as stream:
            pa.table(stream)
            stream.settle({"id": ["aaaaaaaa.0.1"], "outcome": ["dead"]})

    with pytest.raises(SluicewayError, match=r"aaaaaaaa\.0\.1 is not an item of the queue"):
        work()
    assert counts(client, queue, "completed", "retried") == [0, 1]
