"""Both producers: on a scripted transport, against a server, and against one that is killed in mid-work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sluiceway import testing
from sluiceway.client import AsyncClient, AsyncSent, CallError, Client, Producer, SluicewayError
from tests.server.server_process import PATIENCE, ServerProcess, closed_port


class SentFace:
    """What the asyncio producer gives, with the blocking one's face."""

    def __init__(self, runner: asyncio.Runner, sent: AsyncSent) -> None:
        self._runner, self._sent, self.done = runner, sent, sent.done

    def result(self, timeout: float) -> str:
        async def wait() -> str:
            async with asyncio.timeout(timeout):
                return await self._sent

        return self._runner.run(wait())


class AsyncFace:
    """The asyncio producer with the blocking one's face."""

    def __init__(self, url: str, queue_name: str, *, client: dict[str, Any] | None = None, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **client or {})
        self._producer = self._runner.run(self._make(queue_name, options))

    async def _make(self, queue_name: str, options: dict[str, Any]) -> Any:
        return self._client.producer(queue_name, **options)

    def send(self, payload: Any, **fields: Any) -> Any:
        return SentFace(self._runner, self._runner.run(self._producer.send(payload, **fields)))

    def let_work(self) -> None:
        self._runner.run(asyncio.sleep(0.001))

    def flush(self) -> None:
        self._runner.run(self._producer.flush())

    def close(self) -> None:
        self._runner.run(self._producer.close())

    def __enter__(self) -> AsyncFace:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._runner.run(self._producer.__aexit__(kind, error, trace))
        finally:
            self._runner.run(self._client.close())
            self._runner.close()


class SyncFace:
    def __init__(self, url: str, queue_name: str, *, client: dict[str, Any] | None = None, **options: Any) -> None:
        self._client = Client(url, **client or {})
        self._producer = self._client.producer(queue_name, **options)

    def __enter__(self) -> Producer:
        return self._producer.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._producer.__exit__(kind, error, trace)
        finally:
            self._client.close()


Face = Callable[..., Any]


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    made: Face = request.param
    return made


class Script:
    """A transport that answers each produce by a step, the last one again and again, and keeps what was sent."""

    def __init__(self, *steps: Callable[[dict[str, Any]], httpx.Response]) -> None:
        self.steps = list(steps)
        self.seen: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.transport: Any = httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        with self._lock:
            body = msgspec.json.decode(request.content)
            step = self.steps[min(len(self.seen), len(self.steps) - 1)]
            self.seen.append(body)
        return step(body)


def stored(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"queue_name": "q", "partition": 0, "first_id": "k7f3q2ma.0.50", "count": len(body["items"])})


def refused(code: str, status: int, field: str | None = None, retryable: bool = False) -> Callable[[dict[str, Any]], httpx.Response]:
    return lambda body: httpx.Response(status, json={"code": code, "detail": code, "field": field, "retryable": retryable})


def broken(body: dict[str, Any]) -> httpx.Response:
    raise httpx.ReadError("cut")


class HeldScript(Script):
    """A script whose first call is answered only after `release`, so that the items that follow it gather."""

    def __init__(self, *steps: Callable[[dict[str, Any]], httpx.Response]) -> None:
        super().__init__(*steps)
        self.transport = HeldTransport(self._answer)

    def begin(self, producer: Any) -> Any:
        """Send an item, and return it when its call is under way."""
        sent = producer.send("first")
        _until(producer, self.transport.reached.is_set)
        return sent

    def release(self, producer: Any) -> None:
        self.transport.released.set()
        _until(producer, lambda: len(self.seen) > 0)


class HeldTransport(httpx.MockTransport):
    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        super().__init__(answer)
        self.reached, self.released = threading.Event(), threading.Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self.reached.is_set():
            self.reached.set()
            assert self.released.wait(PATIENCE)
        return super().handle_request(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self.reached.is_set():
            self.reached.set()
            assert await asyncio.to_thread(self.released.wait, PATIENCE)
        return await super().handle_async_request(request)


def _until(producer: Any, condition: Callable[[], bool]) -> None:
    """Let the producer work until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        producer.let_work() if isinstance(producer, AsyncFace) else time.sleep(0.001)


def scripted(face: Face, script: Script, **options: Any) -> Any:
    return face("http://127.0.0.1:1", "q", client={"transport": script.transport}, **options)


def test_an_item_goes_at_once_while_nothing_is_under_way(face: Face) -> None:
    script = Script(stored)
    with scripted(face, script, linger="1h") as producer:
        for _ in range(2):
            assert producer.send("x").result(PATIENCE)
    assert [len(body["items"]) for body in script.seen] == [1, 1]


def test_items_gather_while_a_batch_is_under_way_and_get_their_ids(face: Face) -> None:
    script = HeldScript(stored)
    with scripted(face, script, linger="1h") as producer:
        script.begin(producer)
        sent = [producer.send(payload, kind="k") for payload in (b"a", "é")]
        assert not sent[0].done()
        script.release(producer)
        assert [each.result(PATIENCE) for each in sent] == ["k7f3q2ma.0.50", "k7f3q2ma.0.51"]
    _, body = script.seen
    assert body["items"] == [{"bytes": "YQ==", "kind": "k"}, {"bytes": "w6k=", "kind": "k"}]


@pytest.mark.parametrize("options", [{"max_batch": 2}, {"max_bytes": 6}])
def test_items_pass_a_batch_under_way_when_they_are_many(face: Face, options: dict[str, Any]) -> None:
    script = HeldScript(stored)
    with scripted(face, script, linger="1h", **options) as producer:
        first = script.begin(producer)
        one = producer.send("one")
        with pytest.raises(TimeoutError):
            one.result(0.05)
        assert producer.send("two").result(PATIENCE)
        assert one.result(PATIENCE)
        assert not first.done()
        script.release(producer)
        assert first.result(PATIENCE)


def test_an_item_passes_a_batch_under_way_when_it_has_lingered(face: Face) -> None:
    script = HeldScript(stored)
    with scripted(face, script, linger="1ms") as producer:
        first = script.begin(producer)
        assert producer.send("x").result(PATIENCE)
        assert not first.done()
        script.release(producer)
        assert first.result(PATIENCE)


def test_items_pass_a_batch_under_way_when_they_are_flushed() -> None:
    script = HeldScript(stored)
    with scripted(SyncFace, script, linger="1h") as producer, ThreadPoolExecutor(1) as thread:
        script.begin(producer)
        sent = producer.send("x")
        flushed = thread.submit(producer.flush)
        assert sent.result(PATIENCE)
        script.release(producer)
        flushed.result(PATIENCE)


def test_what_one_iteration_of_the_event_loop_sends_goes_together() -> None:
    async def main() -> None:
        script = Script(stored)
        async with AsyncClient(transport=script.transport) as client, client.producer("q", linger="1h") as producer:

            async def send() -> str:
                return await (await producer.send("x"))

            await asyncio.gather(*(send() for _ in range(64)))
        assert [len(body["items"]) for body in script.seen] == [64]

    asyncio.run(main())


def test_a_batch_keeps_its_key_and_the_next_one_has_another(face: Face) -> None:
    script = Script(broken, refused("unavailable", 503, retryable=True), stored)
    with scripted(face, script, max_in_flight=1, max_batch=1) as producer:
        producer.send("x")
        producer.send("y")
    keys = [body["idempotency_key"] for body in script.seen]
    assert len(keys) == 4
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_an_item_that_is_refused_fails_alone(face: Face) -> None:
    script = HeldScript(stored, refused("invalid_request", 400, "items[1].kind"), stored)
    with scripted(face, script, linger="1h") as producer:
        script.begin(producer)
        sent = [producer.send(payload) for payload in "abc"]
        script.release(producer)
        with pytest.raises(CallError, match="invalid_request"):
            producer.flush()
        producer.flush()
        assert [sent[at].result(PATIENCE) for at in (0, 2)] == ["k7f3q2ma.0.50", "k7f3q2ma.0.51"]
        with pytest.raises(CallError, match="invalid_request"):
            sent[1].result(PATIENCE)
    assert [len(body["items"]) for body in script.seen] == [1, 3, 2]
    assert script.seen[1]["idempotency_key"] != script.seen[2]["idempotency_key"]


def test_a_failure_nobody_has_asked_for_is_raised_at_the_end(face: Face) -> None:
    with pytest.raises(CallError, match="queue_not_found"), scripted(face, Script(refused("queue_not_found", 404))) as producer:
        producer.send("x")


def test_a_failure_that_was_seen_is_not_raised_again(face: Face) -> None:
    with scripted(face, Script(refused("queue_not_found", 404))) as producer:
        sent = producer.send("x")
        with pytest.raises(CallError, match="queue_not_found"):
            sent.result(PATIENCE)


def test_the_error_of_the_block_is_the_one_that_is_raised_and_what_was_sent_goes(face: Face) -> None:
    script = Script(refused("queue_not_found", 404))

    def work() -> None:
        with scripted(face, script, linger="1h") as producer:
            producer.send("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert len(script.seen) == 1


def test_a_server_that_stays_away_fails_the_batch_when_the_time_is_over(face: Face) -> None:
    with closed_port() as port, face(f"http://127.0.0.1:{port}", "q", retry_for="100ms") as producer:
        sent = producer.send("x")
        with pytest.raises(CallError) as raised:
            sent.result(PATIENCE)
        assert raised.value.code == "unavailable"


def test_a_producer_repeats_for_longer_than_one_attempt_takes() -> None:
    async_client = AsyncClient("http://127.0.0.1:1", retry_for="2s")
    with Client("http://127.0.0.1:1") as client, client.producer("q") as producer, client.producer("q", retry_for="3s") as short:
        seen = [each._posting.retry_for for each in (producer, short, async_client.producer("q"))]
    assert seen == [120, 3, 8]


def test_a_closed_producer_takes_nothing(face: Face) -> None:
    with scripted(face, Script(stored)) as producer:
        producer.close()
        with pytest.raises(SluicewayError, match="closed"):
            producer.send("x")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"payload": b"x" * ((8 << 20) + 1)}, "payload"),
        ({"payload": None}, "payload"),
        ({"payload": "x", "kind": "k" * 2_049}, "kind"),
        ({"payload": "x", "headers": {"a": "b" * 8_192}}, "headers"),
    ],
)
def test_what_no_server_would_take_is_refused_at_once(face: Face, fields: dict[str, Any], field: str) -> None:
    script = Script(stored)
    with scripted(face, script) as producer:
        with pytest.raises(SluicewayError) as raised:
            producer.send(**fields)
        assert raised.value.field == field
    assert not script.seen


def test_a_full_buffer_makes_the_sender_wait() -> None:
    let_go = threading.Event()

    def slowly(body: dict[str, Any]) -> httpx.Response:
        assert let_go.wait(PATIENCE)
        return stored(body)

    script = Script(slowly)
    with scripted(SyncFace, script, max_buffered=300, max_batch=1) as producer, ThreadPoolExecutor(1) as thread:
        producer.send(b"x" * 100)
        second = thread.submit(producer.send, b"y")
        with pytest.raises(TimeoutError):
            second.result(0.05)
        let_go.set()
        assert second.result(PATIENCE).result(PATIENCE)
    assert len(script.seen) == 2


def test_a_full_buffer_makes_the_sending_task_wait() -> None:
    async def main() -> None:
        let_go = asyncio.Event()

        class Slowly(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                await let_go.wait()
                return stored(msgspec.json.decode(b"".join([part async for part in request.stream])))  # type: ignore[union-attr]

        async with AsyncClient(transport=Slowly()) as client, client.producer("q", max_buffered=300, max_batch=1) as producer:
            await producer.send(b"x" * 100)
            second = asyncio.create_task(producer.send(b"y"))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not second.done()
            let_go.set()
            assert await (await second)

    asyncio.run(main())


def test_who_stops_waiting_for_an_id_takes_no_other_item_along() -> None:
    async def main() -> None:
        script = HeldScript(stored)
        async with AsyncClient(transport=script.transport) as client, client.producer("q") as producer:
            first, second = await producer.send("a"), await producer.send("b")

            async def wait() -> str:
                return await first

            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert not second.done()
            script.transport.released.set()
            assert (await first, await second) == ("k7f3q2ma.0.50", "k7f3q2ma.0.51")

    asyncio.run(main())


@pytest.fixture(scope="module")
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        yield server


def test_one_producer_at_a_time_keeps_the_order(face: Face, served: testing.TestServer) -> None:
    name = f"order-{face.__name__}"
    served.client.create_queue(name)
    with face(served.url, name, max_in_flight=1, max_batch=7, linger="0s") as producer:
        sent = [producer.send(b"%d" % number) for number in range(500)]
    got = served.client.lease(name, batch_size=500)
    assert [int(item.payload) for item in got] == list(range(500))
    if face is SyncFace:
        assert [each.result(PATIENCE) for each in sent] == got.ids


def test_threads_share_a_producer(served: testing.TestServer) -> None:
    served.client.create_queue("threads", requested_partitions=2)
    with (
        Client(served.url) as client,
        client.producer("threads", max_buffered=4_000, max_batch=5) as producer,
        ThreadPoolExecutor(4) as pool,
    ):
        sent = list(pool.map(lambda number: producer.send(b"%d" % number), range(400)))
        ids = [each.result(PATIENCE) for each in sent]
    items = {item.id: item for item in served.client.lease("threads", batch_size=1_000, max_partitions=2)}
    assert [int(items[item_id].payload) for item_id in ids] == list(range(400))


def passes_in_a_child(check: Callable[[], None]) -> bool:
    """Whether the check passes in a process that is forked off this one."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            check()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def test_a_forked_process_goes_on_with_the_producer_of_its_parent(served: testing.TestServer) -> None:
    """As the workers of a web server that loads the application first, and then forks."""
    served.client.create_queue("forks")
    with Client(served.url) as client, client.producer("forks") as producer:
        producer.send("before").result(PATIENCE)

        def check() -> None:
            producer.send("child").result(20)
            producer.close()

        assert passes_in_a_child(check)
        producer.send("parent").result(PATIENCE)
    assert [item.payload for item in served.client.lease("forks", batch_size=10)] == [b"before", b"child", b"parent"]


def test_what_a_producer_has_taken_is_not_sent_by_a_process_that_is_forked_off_meanwhile() -> None:
    let_go = threading.Event()

    def slowly(body: dict[str, Any]) -> httpx.Response:
        assert let_go.wait(PATIENCE)
        return stored(body)

    script = Script(slowly)
    with scripted(SyncFace, script, max_in_flight=1) as producer:
        sent = producer.send("under way")
        waiting = producer.send("waits")

        def check() -> None:
            for each in (sent, waiting):
                with pytest.raises(SluicewayError, match="forked") as raised:
                    each.result(20)
                assert raised.value.code == "outcome_unknown"
            producer.flush()
            assert len(script.seen) <= 1

        assert passes_in_a_child(check)
        let_go.set()
        assert waiting.result(PATIENCE)
    assert [len(body["items"]) for body in script.seen] in ([1, 1], [2])


@pytest.mark.slow
@pytest.mark.crash
def test_nothing_is_lost_or_doubled_when_the_server_is_killed_in_mid_work(face: Face, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data")
    try:
        with Client(server.url) as client:
            client.create_queue("q", requested_partitions=3)
        with face(server.url, "q", max_batch=20, retry_for="2m") as producer:
            sent = []
            for number in range(3_000):
                sent.append(producer.send(b"%d" % number))
                if number % 1_000 == 500:
                    sent[number - 400].result(PATIENCE)
                    server.kill()
                    server = ServerProcess(tmp_path / "data", server.address)
            ids = [each.result(PATIENCE) for each in sent]
        with Client(server.url) as client:
            found = []
            while leased := client.lease("q", batch_size=1_000, max_partitions=3).items:
                found += leased
        assert sorted(int(item.payload) for item in found) == list(range(3_000))
        assert {item.origin: int(item.payload) for item in found} == {item_id: number for number, item_id in enumerate(ids)}
    finally:
        server.__exit__()
