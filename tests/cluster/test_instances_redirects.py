"""Where a client is told to go: redirects that were asked for, and the hint with an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluiceway.cluster.request_context import only_other
from sluiceway.instance.service import Service
from sluiceway.model.peers import Ask
from sluiceway.model.requests import Produce, QueueSpec, Settled
from sluiceway.server.app import App, Fittings, create_app
from sluiceway.server.peer_calls import PeerCalls
from tests.cluster.cluster_rig import Wires, cluster
from tests.instance.instance_rig import eventually, rows
from tests.server.fake_service import FakeService, serving
from tests.server.server_running import running

ASKED = {"x-sluiceway-redirect": "1"}


@dataclass
class Pair:
    """Two instances, by the addresses `a` and `b`, and a client of each. Partitions of `q` are here (at `a`) or there."""

    a: httpx.AsyncClient
    b: httpx.AsyncClient
    services: list[Service]
    here: list[int]
    there: list[int]
    incarnation: str

    async def post(self, call: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.a.post(f"/v1/{call}", json={"queue_name": "q", **fields}, headers=headers or {})

    async def put(self, number: int, *texts: str) -> list[str]:
        """Items in that partition; their ids."""
        made = await self.services[0].produce("q", Produce(rows(*texts), 30_000, partition=number))
        return [f"{self.incarnation}.{number}.{made.first_offset + n}" for n in range(len(texts))]


def app_of(service: Service) -> App:
    return create_app(service, Fittings(peers=PeerCalls(service, service.secret)))


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[Pair]:
    async with cluster(folder, "a", "b") as (_, services):
        record = await services[0].create_queue(QueueSpec("q", 4))
        await eventually(lambda: all(len(service.stats("q").partitions) == 2 for service in services))
        here, there = ([each.partition for each in service.stats("q").partitions] for service in services)
        clients = [httpx.AsyncClient(transport=httpx.ASGITransport(app_of(service)), base_url="http://localhost") for service in services]
        async with clients[0] as a, clients[1] as b:
            yield Pair(a, b, services, here, there, record.incarnation)


def test_who_asks_is_told_where_else_to_go_and_nothing_is_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(tmp_path) as servers:
            number = servers.there[0]
            (item,) = await servers.put(number, "x")
            leased = (await servers.b.post("/v1/queue.lease", json={"queue_name": "q", "client_id": "c", "request_timeout": "30s"})).json()
            assert leased["items"][0]["id"] == item
            lease = leased["leases"][0]["lease_id"]
            calls: list[tuple[str, dict[str, Any]]] = [
                ("queue.complete", {"ids": [item]}),
                ("queue.complete", {"lease_ids": [lease]}),
                ("queue.retry", {"items": [{"id": item}]}),
                ("queue.release", {"ids": [item, "aaaaaaaa.0.1"]}),
                ("queue.extend", {"lease_ids": [lease]}),
                ("queue.settle", {"items": [{"id": item, "outcome": "done"}]}),
                ("queue.peek", {"lease_id": lease}),
                ("queue.peek", {"partition": number}),
                ("queue.browse", {"partition": number}),
                ("queue.explain", {"id": item}),
            ]
            for call, fields in calls:
                answer = await servers.post(call, ASKED, **fields)
                assert (answer.status_code, answer.headers["location"]) == (307, f"b/v1/{call}"), call
            found = await servers.post("queue.peek", {"x-sluiceway-redirect": "0"}, lease_id=lease)
            assert [each["id"] for each in found.json()["items"]] == [item], "nothing was done"
            # Followed, as an HTTP client does it: the same call there, header and all.
            followed = await servers.b.post("/v1/queue.complete", json={"queue_name": "q", "ids": [item]}, headers=ASKED)
            assert followed.json()["completed"] == 1

    asyncio.run(scenario())


def test_what_is_here_or_is_several_instances_is_not_sent_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(tmp_path) as servers:
            (mine,), (theirs,) = await servers.put(servers.here[0], "x"), await servers.put(servers.there[0], "y")
            for ids in ([mine], [mine, theirs], ["aaaaaaaa.0.1"]):
                answer = await servers.post("queue.complete", ASKED, ids=ids)
                assert (answer.status_code, "location" in answer.headers) == (200, False)
                assert {each["id"] for each in answer.json()["ignored"]} == set(ids)
            assert (await servers.post("queue.peek", ASKED)).status_code == 200

    asyncio.run(scenario())


def test_the_hint_says_who_else_did_the_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pair(tmp_path) as servers:
            (mine,), (theirs,) = await servers.put(servers.here[0], "x"), await servers.put(servers.there[0], "y")

            async def hint(call: str, **fields: Any) -> str | None:
                answer = await servers.post(call, **fields)
                assert answer.status_code == 200
                found: str | None = answer.headers.get("x-sluiceway-served-by")
                return found

            assert await hint("queue.complete", ids=[theirs]) == "b"
            assert await hint("queue.complete", ids=[mine]) is None
            assert await hint("queue.complete", ids=[mine, theirs]) is None
            assert await hint("queue.peek", partition=servers.there[0]) == "b"
            assert await hint("queue.explain", id=theirs) == "b"
            assert await hint("queue.stats") is None
            # The nearer item first, then the one that has to be fetched, then none.
            assert await hint("queue.lease", client_id="c") is None
            assert await hint("queue.lease", client_id="c", request_timeout="30s") == "b"
            assert await hint("queue.lease", client_id="c") is None

    asyncio.run(scenario())


def test_a_server_that_is_alone_sends_nobody_away(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        queue = server.queue()
        made = server.produce(queue, "x")
        answer = server.http.post("/v1/queue.complete", json={"queue_name": queue, "ids": [made["first_id"]]}, headers=ASKED)
        assert answer.status_code == 200
        assert not {"location", "x-sluiceway-served-by"} & set(answer.headers)


def test_the_query_string_goes_along() -> None:
    service = FakeService()
    with serving(service) as url:
        query = "queue_name=q&incarnation=k7f3q2ma"
        body = _verdicts()
        headers = {"content-type": "application/vnd.apache.arrow.stream"}
        answer = httpx.post(f"{url}/v1/queue.settle?{query}", content=body, headers={**headers, **ASKED})
        assert (answer.status_code, answer.headers["location"]) == (307, f"http://i-1/v1/queue.settle?{query}")
        service.script = [Settled()]
        assert httpx.post(f"{url}/v1/queue.settle?{query}", content=body, headers=headers).status_code == 200


def _verdicts() -> bytes:
    import pyarrow as pa

    columns = {"partition": pa.array([0], pa.int32()), "offset": pa.array([1]), "outcome": pa.array(["done"])}
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("served_by", "other"), [(set(), None), ({""}, None), ({"b"}, "b"), ({"", "b"}, None), ({"b", "c"}, None)])
def test_a_hint_needs_one_other_instance_alone(served_by: set[str], other: str | None) -> None:
    assert only_other(served_by) == other


def test_a_request_keeps_its_id_on_the_way_to_another_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    ask = Wires.ask

    async def noted(wires: Wires, address: str, request: Any, timeout: int, request_id: str = "") -> Any:
        if isinstance(request, Ask):
            sent.append(request_id)
        return await ask(wires, address, request, timeout, request_id)

    monkeypatch.setattr(Wires, "ask", noted)

    async def scenario() -> None:
        async with pair(tmp_path) as servers:
            (item,) = await servers.put(servers.there[0], "x")
            sent.clear()
            await servers.post("queue.explain", {"x-request-id": "r-7"}, id=item)
            await servers.post("queue.complete", {"x-request-id": "r-8"}, ids=[item])
            assert sent == ["r-7", "r-8"]

    asyncio.run(scenario())
