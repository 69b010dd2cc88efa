"""Both consumers against a server: outcomes, leases that are kept, a stop in good order, and a server that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluiceway import testing
from sluiceway.client import AsyncClient, AsyncConsumer, CallError, Client, DeadItem, LeasedItem, RetryItem, SluicewayError
from sluiceway.client.arrow import LeasedTable
from sluiceway.client.lease_manager import LeaseManager
from tests.server.server_process import PATIENCE, ServerProcess
from tests.server.server_running import eventually

_numbers = itertools.count()
Handler = Callable[[LeasedItem], object]


class SyncFace:
    """A consumer that runs a handler."""

    def __init__(self, url: str, queue_name: str, **options: Any) -> None:
        self._client = Client(url)
        self._consumer = self._client.consumer(queue_name, **options)
        self.stop = self._consumer.stop
        self.is_lost = self._consumer.is_lost

    def run(self, handler: Handler, concurrency: int = 4, **options: Any) -> None:
        with self._client:
            self._consumer.run(handler, concurrency=concurrency, **options)

    def run_batches(self, handler: Callable[[list[LeasedItem]], object], **options: Any) -> None:
        with self._client:
            self._consumer.run_batches(handler, **options)

    def run_tables(self, handler: Callable[[LeasedTable], object], **options: Any) -> None:
        with self._client:
            self._consumer.run_tables(handler, **options)


class AsyncFace:
    """The same for asyncio; the handler runs in threads, so that one handler can be given to both."""

    def __init__(self, url: str, queue_name: str, **options: Any) -> None:
        self._given = url, queue_name, options
        self._loop: asyncio.AbstractEventLoop

    def run(self, handler: Handler, concurrency: int = 4, **options: Any) -> None:
        async def work(item: LeasedItem) -> None:
            await asyncio.to_thread(handler, item)

        asyncio.run(self._main(lambda consumer: consumer.run(work, concurrency=concurrency, **options)))

    def run_batches(self, handler: Callable[[list[LeasedItem]], object], **options: Any) -> None:
        async def work(items: list[LeasedItem]) -> object:
            return handler(items)

        asyncio.run(self._main(lambda consumer: consumer.run_batches(work, **options)))

    async def _main(self, run: Callable[[AsyncConsumer], Coroutine[Any, Any, None]]) -> None:
        url, queue_name, options = self._given
        self._loop = asyncio.get_running_loop()
        async with AsyncClient(url) as client:
            self._consumer = client.consumer(queue_name, **options)
            await run(self._consumer)

    def run_tables(self, handler: Callable[[LeasedTable], object], **options: Any) -> None:
        async def work(leased: LeasedTable) -> object:
            return await asyncio.to_thread(handler, leased)

        asyncio.run(self._main(lambda consumer: consumer.run_tables(work, **options)))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._consumer.stop)

    def is_lost(self, item: LeasedItem) -> bool:
        return self._consumer.is_lost(item)


Face = Callable[..., Any]


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    made: Face = request.param
    return made


@pytest.fixture(scope="module")
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        yield server


@pytest.fixture
def queue(served: testing.TestServer) -> str:
    """A queue with a dead queue beside it."""
    name = f"q-{next(_numbers)}"
    served.client.create_queue(f"{name}.dead")
    served.client.create_queue(name, dead_queue=f"{name}.dead", requested_partitions=2)
    return name


def total(client: Client, queue_name: str, counter: str) -> int:
    return sum(getattr(part, counter) for part in client.stats(queue_name).partitions)


def test_an_item_ends_as_its_handler_says(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["good", "dead", "later", "bug", "good"])
    consumer, seen = face(served.url, queue), Counter[str]()

    def handle(item: LeasedItem) -> None:
        text = item.payload.decode()
        seen[text] += 1
        if seen.total() == 7:
            consumer.stop()
        if text == "dead":
            raise DeadItem("it is no good")
        if item.attempts == 1 and text == "later":
            raise RetryItem(after="0s")
        if item.attempts == 1 and text == "bug":
            raise ValueError("the payload")

    consumer.run(handle)
    assert seen == {"good": 2, "dead": 1, "later": 2, "bug": 2}
    assert [total(served.client, queue, name) for name in ("completed", "dead", "retried", "total")] == [4, 1, 2, 0]
    (dead,) = served.client.lease(f"{queue}.dead", request_timeout="1m")
    assert (dead.payload, (dead.headers or {})["sluiceway-reason"]) == (b"dead", "it is no good")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({}, "ValueError: no such customer: 17"), ({"error_messages": False}, "ValueError")],
    ids=["with messages", "types alone"],
)
def test_a_dead_item_says_which_error_its_handler_raised(
    face: Face, served: testing.TestServer, queue: str, options: dict[str, Any], reason: str
) -> None:
    served.client.update_queue(queue, max_attempts=1)
    served.client.produce(queue, ["x"])
    consumer = face(served.url, queue, **options)

    def handle(item: LeasedItem) -> None:
        consumer.stop()
        raise ValueError("no such\n  customer: 17")

    consumer.run(handle)
    (dead,) = served.client.lease(f"{queue}.dead", request_timeout="1m")
    headers = dead.headers or {}
    assert headers["sluiceway-reason"] == f"max_attempts 1 reached: {reason}"
    (failure,) = json.loads(headers["sluiceway-failures"])
    assert (failure["attempt"], failure["reason"], failure["host"]) == (1, reason, socket.gethostname())
    assert failure["handler_time"].endswith("s")
    assert ("trace" in failure) == (not options)


def test_a_failed_attempt_is_explained_with_its_trace_from_the_handler_on(
    served: testing.TestServer, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.client.produce(queue, ["x"])
    consumer = SyncFace(served.url, queue)

    def handle(item: LeasedItem) -> None:
        consumer.stop()
        raise ValueError("no such customer")

    consumer.run(handle)
    (item,) = served.client.peek(queue)
    (failure,) = served.client.explain(queue, item.id).failures
    assert (failure.attempt, failure.reason) == (1, "ValueError: no such customer")
    lines = failure.trace.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "in handle" in lines[1]
    assert lines[-1] == "ValueError: no such customer"
    (record,) = [each for each in caplog.records if each.exc_info]
    assert logging.Formatter().formatException(record.exc_info) == failure.trace  # type: ignore[arg-type]


async def _posted(item: LeasedItem) -> None: ...


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (_posted, "a coroutine, which was not run"),
        (lambda _: DeadItem("no"), "a DeadItem; raise it"),
        (lambda _: (n for n in "x"), "a generator"),
    ],
)
def test_an_item_whose_handler_did_nothing_is_not_completed(
    served: testing.TestServer, queue: str, returned: Handler, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.client.produce(queue, ["x"])
    consumer = served.client.consumer(queue)

    def handle(item: LeasedItem) -> object:
        consumer.stop()
        return returned(item)

    consumer.run(handle)
    assert [total(served.client, queue, name) for name in ("completed", "retried")] == [0, 1]
    assert said in caplog.text


def test_a_server_that_is_away_is_told_once_and_that_it_is_back_once(caplog: pytest.LogCaptureFixture) -> None:
    with testing.server() as server:
        server.client.create_queue("q")
        answers: list[bool] = []

        class Shaky(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                answers.append(len(answers) >= 3)
                if not answers[-1]:
                    raise httpx.ConnectError("no")
                return await super().handle_async_request(request)

        async def main() -> None:
            async with AsyncClient(server.url, transport=Shaky()) as client:
                consumer = client.consumer("q")

                async def handle(item: LeasedItem) -> None:
                    consumer.stop()

                server.client.produce("q", ["x"])
                await consumer.run(handle)

        asyncio.run(main())
    assert caplog.text.count("no items can be leased: cannot reach") == 1
    assert caplog.text.count("items can be leased again") == 1


@pytest.mark.parametrize("way", ["run", "run_batches", "run_tables"])
def test_the_server_is_told_how_long_items_were_handled(served: testing.TestServer, queue: str, way: str) -> None:
    served.client.produce(queue, ["x"] * 10)
    consumer, seen = SyncFace(served.url, queue), list[int]()

    def handle(given: Any) -> None:
        seen.append(1 if way == "run" else len(given))
        if sum(seen) >= 10:
            consumer.stop()
        time.sleep(0.03)
        if len(seen) == 1:
            raise RetryItem(after="0s")

    getattr(consumer, way)(handle)
    stats = served.client.stats(queue).logical_queues[0]
    assert stats.handled >= 10
    assert (stats.handler_p50_ms or 0) >= 30


def test_many_items_need_few_calls(served: testing.TestServer, queue: str) -> None:
    calls = Counter[str]()

    class Counted(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            calls[request.url.path.removeprefix("/v1/queue.")] += 1
            return await super().handle_async_request(request)

    async def main() -> None:
        done = 0
        async with AsyncClient(served.url, transport=Counted()) as client:
            async with client.producer(queue) as producer:
                for number in range(2_000):
                    await producer.send(b"%d" % number)
            consumer = client.consumer(queue)

            async def handle(item: LeasedItem) -> None:
                nonlocal done
                await asyncio.sleep(0)
                done += 1
                if done == 2_000:
                    consumer.stop()

            await consumer.run(handle)

    asyncio.run(main())
    assert total(served.client, queue, "completed") == 2_000
    assert calls["produce"] <= 100
    assert calls["lease"] + calls["complete"] + calls["release"] <= 200


def test_leases_are_kept_for_as_long_as_their_items_are_held(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["held", "waits"])
    held, let_go = Future[LeasedItem](), threading.Event()
    consumer = face(served.url, queue, lease_timeout="9s")

    def handle(item: LeasedItem) -> None:
        held.set_result(item)
        assert let_go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run, handle, 1)
        item = held.result(PATIENCE)
        first = item.lease_deadline
        assert first is not None
        # Extended after 3 s, it lives until 12 s. The server's clock is moved to more than 9 s: without that it would have run out.
        eventually(lambda: (served.client.explain(queue, item.id).lease_deadline or first) > first)
        served.clock.advance("7s")
        assert total(served.client, queue, "total_leased") == 1, "the other one waits at the server, where other consumers can have it"
        consumer.stop()
        let_go.set()
        running.result(PATIENCE)
    names = ("completed", "ready", "expired")
    assert [total(served.client, queue, name) for name in names] == [1, 1, 0]


def test_a_stop_ends_in_good_order(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"] * 50)
    began, let_go = threading.Semaphore(0), threading.Event()
    consumer = face(served.url, queue, prefetch=20)

    def handle(item: LeasedItem) -> None:
        began.release()
        assert let_go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run, handle, 3)
        for _ in range(3):
            assert began.acquire(timeout=PATIENCE)
        consumer.stop()
        eventually(lambda: total(served.client, queue, "total_leased") == 3)
        assert not running.done()
        let_go.set()
        running.result(PATIENCE)
    names = ("completed", "ready", "total_leased", "retried", "expired")
    assert [total(served.client, queue, name) for name in names] == [3, 47, 0, 0, 0]
    assert {item.attempts for item in served.client.lease(queue, batch_size=50, max_partitions=2)} == {1}


def test_items_whose_handlers_outlast_a_stop_are_released(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["quick", "stuck", "stuck"])
    began, let_go, outlasted = threading.Semaphore(0), threading.Event(), []
    consumer = face(served.url, queue)

    def handle(item: LeasedItem) -> None:
        began.release()
        if item.payload == b"stuck":
            assert let_go.wait(PATIENCE)
            outlasted.append(consumer.is_lost(item))

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run, handle, 3, shutdown_timeout="100ms")
        for _ in range(3):
            assert began.acquire(timeout=PATIENCE)
        eventually(lambda: total(served.client, queue, "completed") == 1)
        consumer.stop()
        names = ("completed", "ready", "total_leased", "retried", "expired")
        eventually(lambda: [total(served.client, queue, name) for name in names] == [1, 2, 0, 0, 0])
        let_go.set()
        running.result(PATIENCE)
    assert {item.attempts for item in served.client.lease(queue, batch_size=2, max_partitions=2)} == {1}, "the attempt was not counted"
    eventually(lambda: outlasted == [True, True])


def test_a_batch_ends_as_its_handler_says_of_each_item(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["good", "dead", "later", "good", "good"])
    consumer, sizes = face(served.url, queue), list[int]()

    def handle(items: list[LeasedItem]) -> object:
        sizes.append(len(items))
        if {item.payload for item in items} == {b"later"}:
            consumer.stop()
            return None
        how = {b"dead": DeadItem("it is no good"), b"later": RetryItem(after="0s")}
        return {item.id: how[item.payload] for item in items if item.payload in how}

    consumer.run_batches(handle, batch_size=10)
    assert sizes == [5, 1]
    assert [total(served.client, queue, name) for name in ("completed", "dead", "retried", "total")] == [4, 1, 1, 0]


@pytest.mark.parametrize("returned", [{"of another batch": RetryItem()}, {0: "done"}])
def test_a_batch_with_outcomes_that_mean_nothing_is_put_back(
    served: testing.TestServer, queue: str, returned: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    served.client.produce(queue, ["x", "x"])
    consumer = served.client.consumer(queue)

    def handle(items: list[LeasedItem]) -> object:
        consumer.stop()
        return {(items[at].id if isinstance(at, int) else at): outcome for at, outcome in returned.items()}

    consumer.run_batches(handle, batch_size=2)
    assert [total(served.client, queue, name) for name in ("completed", "retried", "ready")] == [0, 2, 2]
    assert "a handler returns ids of its items with a RetryItem or DeadItem each" in caplog.text


def test_a_table_ends_as_its_handler_says_of_each_item(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, [str(number) for number in range(1_000)])
    served.client.produce(queue, [str(number) for number in range(1_000)])
    consumer, sizes = face(served.url, queue), list[int]()

    def handle(leased: LeasedTable) -> object:
        sizes.append(len(leased))
        ids = leased.ids().to_pylist()
        if len(sizes) == 1:
            raise ValueError("all of them again")
        if len(sizes) == 2:
            return {ids[0]: DeadItem("it is no good"), ids[1]: RetryItem(after="1h", reason="later")}
        consumer.stop()
        return None

    consumer.run_tables(handle, batch_size=2_000)
    assert len(sizes) == 3
    names = ("completed", "dead", "scheduled", "total_leased", "ready", "expired")
    counts = [total(served.client, queue, name) for name in names]
    assert counts == [sum(sizes[1:]) - 2, 1, 1, 0, 2_000 - sum(sizes[1:]), 0]
    (dead,) = served.client.lease(f"{queue}.dead", request_timeout="1m")
    assert (dead.headers or {})["sluiceway-reason"] == "it is no good"


def test_leases_of_a_table_are_kept_for_as_long_as_it_is_handled(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"] * 20)
    held, let_go = Future[LeasedTable](), threading.Event()
    consumer = face(served.url, queue, lease_timeout="6s")

    def handle(leased: LeasedTable) -> None:
        held.set_result(leased)
        assert let_go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run_tables, handle, batch_size=20)
        leased = held.result(PATIENCE)
        first, (one, *_) = leased.lease_deadline, leased.ids().to_pylist()
        assert first is not None
        eventually(lambda: (served.client.explain(queue, one).lease_deadline or first) > first)
        served.clock.advance("5s")
        consumer.stop()
        let_go.set()
        running.result(PATIENCE)
    assert [total(served.client, queue, name) for name in ("completed", "expired")] == [len(leased), 0]


def test_a_table_whose_handler_outlasts_a_stop_is_released(face: Face, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"] * 20)
    began, let_go = threading.Event(), threading.Event()
    consumer = face(served.url, queue)

    def handle(leased: LeasedTable) -> None:
        began.set()
        assert let_go.wait(PATIENCE)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run_tables, handle, batch_size=20, shutdown_timeout="100ms")
        assert began.wait(PATIENCE)
        consumer.stop()
        names = ("completed", "ready", "total_leased", "retried", "expired")
        eventually(lambda: [total(served.client, queue, name) for name in names] == [0, 20, 0, 0, 0])
        let_go.set()
        running.result(PATIENCE)


def test_a_table_whose_outcomes_could_not_be_staged_is_not_completed(served: testing.TestServer, queue: str) -> None:
    """To complete its lease would complete the items that are to be retried or dead, too."""
    served.client.produce(queue, ["x", "x"])

    class NothingIsStaged(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/queue.settle":
                raise httpx.ConnectError("no")
            return await super().handle_async_request(request)

    async def main() -> None:
        async with AsyncClient(served.url, transport=NothingIsStaged()) as client:
            consumer = client.consumer(queue, retry_for="1ms")

            async def handle(leased: LeasedTable) -> object:
                consumer.stop()
                return {leased.ids().to_pylist()[0]: DeadItem("no")}

            await consumer.run_tables(handle)

    asyncio.run(main())
    assert [total(served.client, queue, name) for name in ("completed", "dead", "total_leased")] == [0, 0, 2]


def test_a_table_with_an_outcome_of_another_item_is_put_back(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x", "x"])
    consumer = served.client.consumer(queue)

    def handle(leased: LeasedTable) -> object:
        consumer.stop()
        return {"of another table": DeadItem("no")}

    consumer.run_tables(handle)
    assert [total(served.client, queue, name) for name in ("completed", "retried")] == [0, 2]


def test_tables_of_a_queue_that_is_gone_stop_the_consumer(face: Face, served: testing.TestServer) -> None:
    with pytest.raises(CallError) as stopped:
        face(served.url, "absent").run_tables(print)
    assert stopped.value.code == "queue_not_found"


def test_a_stop_while_nothing_is_there_is_quick_and_takes_nothing(face: Face, served: testing.TestServer, queue: str) -> None:
    consumer = face(served.url, queue)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run, print)
        eventually(lambda: served.client.stats(queue).logical_queues[0].lease_waiting)
        consumer.stop()
        running.result(PATIENCE)
    eventually(lambda: not served.client.stats(queue).logical_queues[0].lease_waiting)
    served.client.produce(queue, ["x"])
    assert len(served.client.lease(queue, max_partitions=2)) == 1


def test_a_lost_lease_is_told_to_the_handler_and_its_outcome_to_nobody(
    served: testing.TestServer, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.client.produce(queue, ["x"])
    began = threading.Event()
    consumer = SyncFace(served.url, queue, lease_timeout="6s")

    def handle(item: LeasedItem) -> None:
        if item.attempts == 1:
            began.set()
            eventually(lambda: consumer.is_lost(item))
        else:
            consumer.stop()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(consumer.run, handle, 2)
        assert began.wait(PATIENCE)
        served.clock.advance("1m")
        running.result(PATIENCE)
    assert [total(served.client, queue, name) for name in ("completed", "total")] == [1, 0]
    assert "ran out while it was being handled" in caplog.text


def test_a_lost_lease_cancels_the_handling_task(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"])

    async def main() -> list[int]:
        seen: list[int] = []
        async with AsyncClient(served.url) as client:
            consumer = client.consumer(queue, lease_timeout="6s")

            async def handle(item: LeasedItem) -> None:
                if item.attempts == 1:
                    await asyncio.to_thread(served.clock.advance, "1m")
                    try:
                        await asyncio.Event().wait()
                    finally:
                        seen.append(0)
                else:
                    seen.append(item.attempts)
                    consumer.stop()

            await consumer.run(handle, concurrency=2)
        return seen

    # The item may be offered again before its first handler has heard of the loss.
    assert sorted(asyncio.run(main())) == [0, 2]
    assert total(served.client, queue, "completed") == 1


@pytest.mark.parametrize("code", ["queue_not_found", "unauthenticated", "forbidden"])
def test_what_no_repetition_can_mend_stops_it(code: str) -> None:
    status = {"queue_not_found": 404, "unauthenticated": 401, "forbidden": 403}[code]
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        return httpx.Response(status, json={"code": code, "detail": "no", "retryable": False})

    async def run() -> None:
        async with AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await client.consumer("q").run(asyncio.sleep)  # type: ignore[arg-type]

    async def loop() -> None:
        async with AsyncClient(transport=httpx.MockTransport(answer)) as client, client.consumer("q") as items:
            async for _ in items:
                raise AssertionError("there is no item")

    for use in (run, loop):
        with pytest.raises(CallError) as raised:
            asyncio.run(use())
        assert raised.value.code == code
    with Client(transport=httpx.MockTransport(answer)) as client, pytest.raises(CallError, match="no"):
        client.consumer("q").run(print)
    assert seen == ["/v1/queue.lease"] * 3


def test_a_loop_completes_what_came_round_and_puts_back_what_did_not(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, [f"{number}" for number in range(10)])
    with served.client.consumer(queue) as items:
        for item in items:
            if item.payload == b"1":
                items.retry(item, after="1h")
            if item.payload == b"2":
                items.dead(item, "two")
            if item.payload == b"4":
                break
    names = ("completed", "retried", "dead", "ready", "scheduled")
    assert [total(served.client, queue, name) for name in names] == [2, 2, 1, 6, 1]


def test_an_exception_in_a_loop_puts_the_item_back(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"])

    async def main() -> None:
        async with AsyncClient(served.url) as client, client.consumer(queue) as items:
            async for item in items:
                raise ZeroDivisionError(item.payload)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert [total(served.client, queue, name) for name in ("completed", "retried", "ready")] == [0, 1, 1]


def test_several_tasks_go_over_one_consumer(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, [f"{number}" for number in range(100)])

    async def main() -> list[int]:
        seen: list[int] = []
        async with AsyncClient(served.url) as client, client.consumer(queue) as items:

            async def work() -> None:
                async for item in items:
                    await asyncio.sleep(0)
                    seen.append(int(item.payload))
                    if len(seen) == 100:
                        items.stop()

            await asyncio.gather(*(work() for _ in range(3)))
        return seen

    assert sorted(asyncio.run(main())) == list(range(100))


def test_a_run_that_is_cancelled_cancels_its_handlers_and_releases_everything(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"] * 10)

    async def main() -> None:
        began = asyncio.Semaphore(0)

        async def handle(item: LeasedItem) -> None:
            began.release()
            await asyncio.Event().wait()

        async with AsyncClient(served.url) as client:
            running = asyncio.create_task(client.consumer(queue).run(handle, concurrency=2))
            await began.acquire()
            await began.acquire()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    assert [total(served.client, queue, name) for name in ("retried", "ready", "expired")] == [0, 10, 0]


def test_ctrl_c_ends_a_blocking_run_in_good_order(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["x"] * 10)
    consumer = served.client.consumer(queue)

    def handle(item: LeasedItem) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # What is being handled goes on to its end; the rest is released. Nothing else may be leased yet, so that alone tells nothing.
        eventually(lambda: consumer._stopped and total(served.client, queue, "total_leased") == 1)

    with pytest.raises(KeyboardInterrupt):
        consumer.run(handle, concurrency=1)
    consumer.stop()
    assert [total(served.client, queue, name) for name in ("completed", "ready", "expired")] == [1, 9, 0]


def test_a_consumer_is_used_once_and_with_sound_options(served: testing.TestServer, queue: str) -> None:
    with served.client.consumer(queue) as items, pytest.raises(SluicewayError, match="create another one"):
        items.__enter__()
    for use in (
        lambda: served.client.consumer(queue).run(print, concurrency=0),
        lambda: served.client.consumer(queue, prefetch=-1),
        lambda: next(iter(served.client.consumer(queue))),
    ):
        with pytest.raises(SluicewayError) as raised:
            use()
        assert raised.value.code == "invalid_request"


def _has(handled: Counter[str], count: int) -> bool:
    return len(handled) >= count


@pytest.mark.crash
@pytest.mark.parametrize("face", [SyncFace, pytest.param(AsyncFace, marks=pytest.mark.slow)], ids=["sync", "async"], indirect=True)
def test_every_item_is_handled_though_the_server_is_killed_in_mid_work(
    face: Face, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    server = ServerProcess(tmp_path / "data")
    try:
        with Client(server.url) as client, ThreadPoolExecutor(1) as thread:
            client.create_queue("q", requested_partitions=2)
            for _ in range(4):
                client.produce("q", [f"{number}" for number in range(500)])
            handled, lock, consumer = Counter[str](), threading.Lock(), face(server.url, "q", prefetch=50, lease_timeout="3s")

            def handle(item: LeasedItem) -> None:
                with lock:
                    handled[item.origin] += 1

            running = thread.submit(consumer.run, handle)
            for part in (400, 900, 1_500):
                eventually(partial(_has, handled, part))
                server.kill()
                server = ServerProcess(tmp_path / "data", server.address)
            eventually(lambda: total(client, "q", "total") == 0)
            consumer.stop()
            running.result(PATIENCE)
            assert len(handled) == 2_000
            assert total(client, "q", "completed") == 2_000
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.__exit__()


def test_handlers_that_end_together_are_followed_by_one_decision(
    served: testing.TestServer, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = 0

    def counted(manager: LeaseManager, now: int) -> Any:
        nonlocal decisions
        decisions += 1
        return decide(manager, now)

    decide = LeaseManager.decide
    monkeypatch.setattr(LeaseManager, "decide", counted)
    served.client.produce(queue, [str(number) for number in range(100)])

    async def work() -> tuple[int, int]:
        async with AsyncClient(served.url) as client:
            consumer = client.consumer(queue)
            begun, together = 0, asyncio.Event()
            before = 0

            async def handle(item: LeasedItem) -> None:
                nonlocal begun, before
                begun += 1
                if begun == 100:
                    before = decisions
                    consumer.stop()
                    together.set()
                await together.wait()

            await consumer.run(handle, concurrency=100)
            return before, decisions

    before, after = asyncio.run(work())
    # The stop, the end of the handlers, the answers to the calls, and timers.
    assert after - before < 20
    assert total(served.client, queue, "completed") == 100
