"""`/livez` and `/readyz`: whether for everybody, and what exactly for those who may know."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluiceway.instance import health
from sluiceway.instance.health import check_backends, check_meta, check_partitions
from sluiceway.instance.service import Service
from sluiceway.model.access import Caller, Scope
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server.app import App, Fittings, Guard
from sluiceway.server.guard import OpenDoor
from sluiceway.server.http import Request
from sluiceway.testing.drive import driven
from tests.server.server_running import running

PROBLEM = "queue secret-plans, partition 0: stopped: damaged"


class Doorman:
    """Knows who is called so by the header."""

    def __init__(self) -> None:
        self.asked = 0

    async def admit(self, request: Request) -> Caller:
        self.asked += 1
        action, _, pattern = request.authorization.decode().removeprefix("Bearer ").partition(":")
        return Caller("someone", (Scope(action, pattern),))  # type: ignore[arg-type]

    async def recheck(self, request: Request) -> Caller:
        return request.caller

    def charge(self, caller: Caller, size: int) -> None: ...


@asynccontextmanager
async def served(data: Path, guard: Guard, *problems: str) -> AsyncIterator[httpx.AsyncClient]:
    service = Service(data)
    await service.start()
    service.problems = lambda: list(problems)  # type: ignore[method-assign]
    app = App(service, Fittings(guard=guard))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client
    await service.stop()


def by_name(answer: httpx.Response) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in answer.json()["checks"]}


def test_the_checks_of_a_server_that_is_well(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.queue(requested_partitions=3)
        for query in ("verbose", "verbose=true", "verbose=1"):
            answer = server.http.get(f"/readyz?{query}")
            assert (answer.status_code, answer.json()["ready"], answer.json()["problems"]) == (200, True, [])
            checks = by_name(answer)
            assert {name: check["ok"] for name, check in checks.items()} == {
                "meta store": True,
                "backend default": True,
                "partitions": True,
                "clock": True,
            }
            assert checks["partitions"]["detail"] == "3 available"
            assert all(check["took_ms"] >= 0 for check in checks.values())
        for query in ("", "verbose=false", "verbose=0"):
            assert server.http.get(f"/readyz?{query}").json() == {"ready": True, "problems": []}


@driven
async def test_whoever_asks_is_told_whether_but_not_what(tmp_path: Path) -> None:
    guard = Doorman()
    async with served(tmp_path, guard, PROBLEM) as client:
        for headers in ({}, {"authorization": "Bearer read:*"}):
            answer = await client.get("/readyz", headers=headers)
            assert answer.status_code == 503
            assert answer.json()["ready"] is False
            assert "secret-plans" not in answer.text
            assert "1 problems: request /readyz?verbose" in answer.text
        # A probe comes every few seconds, and is no attempt to get in.
        assert guard.asked == 0
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/healthz")).json() == (await client.get("/livez")).json() == {"alive": True}


@pytest.mark.parametrize(("key", "status"), [("read:*", 503), ("admin:*", 503), ("read:orders-*", 403), ("produce:*", 403)])
@driven
async def test_who_may_read_all_queues_is_told_what(tmp_path: Path, key: str, status: int) -> None:
    async with served(tmp_path, Doorman(), PROBLEM) as client:
        answer = await client.get("/readyz?verbose", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
        assert ("secret-plans" in answer.text) is (status == 503)
        assert ("checks" in answer.json()) is (status == 503)


@driven
async def test_a_web_page_under_another_name_is_not_told(tmp_path: Path) -> None:
    async with served(tmp_path, OpenDoor(["localhost"]), PROBLEM) as client:
        assert (await client.get("/readyz")).json()["problems"] == [PROBLEM]
        answer = await client.get("/readyz", headers={"host": "evil.example"})
        assert answer.status_code == 503
        assert "secret-plans" not in answer.text


@driven
async def test_what_a_meta_store_does_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    await service.start()
    assert (await check_meta(service.meta, "grant")).ok
    never = asyncio.Event()

    async def hang(_: object) -> None:
        await never.wait()

    async def fail(_: object) -> None:
        raise StoreUnavailableError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(health, "META_TIMEOUT", 1)
        patch.setattr(service.meta, "read", hang)
        assert (await check_meta(service.meta, "grant"))[:3] == ("meta store", False, "it did not answer within 1 ms")
        patch.setattr(service.meta, "read", fail)
        assert (await check_meta(service.meta, "grant"))[:3] == ("meta store", False, "it cannot be read: disk I/O error")
    await service.stop()


@driven
async def test_backends_and_partitions_that_do_not_serve(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.start()
    (backend,) = service.backends()
    assert [check.ok for check in check_backends([backend, dataclasses.replace(backend, problem="it does not answer")])] == [True, False]
    assert check_partitions([])[:3] == ("partitions", True, "there are none")
    await service.stop()
