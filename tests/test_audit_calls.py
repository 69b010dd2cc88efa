"""The audit trail over HTTP, and who the calls on queues name as the one who asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from server_running import Running, running
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Caller, Scope
from sluiceway.server.app import Fittings
from sluiceway.server.audit_calls import AuditCalls
from sluiceway.server.http import Request


class Names:
    """A guard that takes the authorization header for the caller's name; only `root` is an admin."""

    async def admit(self, request: Request) -> Caller:
        name = request.authorization.decode() or "root"
        return Caller(name, (Scope("manage"), Scope("read"), *([Scope("admin")] if name == "root" else [])))

    async def recheck(self, request: Request) -> Caller:
        return request.caller

    def charge(self, caller: Caller, size: int) -> None: ...


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(
        tmp_path_factory.mktemp("audit") / "data",
        lambda service: Fittings(Names(), endpoints=AuditCalls(lambda: service.audit).endpoints()),
    ) as server:
        yield server


def as_(name: str, request_id: str) -> dict[str, str]:
    return {"authorization": name, "x-request-id": request_id}


def test_each_call_names_its_caller_and_its_request(server: Running) -> None:
    steps: list[tuple[str, dict[str, Any]]] = [
        ("queues.create", {"queue_name": "named"}),
        ("queues.update", {"queue_name": "named", "reference": "r"}),
        ("queue.pause", {"queue_name": "named"}),
        ("queue.resume", {"queue_name": "named"}),
        ("queue.clear", {"queue_name": "named"}),
        ("queue.redrive", {"queue_name": "named", "target": "other"}),
        ("queues.delete", {"queue_name": "named"}),
    ]
    for number, (call, fields) in enumerate(steps):
        answer = server.http.post(f"/v1/{call}", json=fields, headers=as_("alice", f"step-{number}"))
        assert answer.status_code == 200, answer.text
    items = server.ask("audit.list", queue_name="named")["items"]
    noted = [(entry["actor"], entry["action"], entry["request_id"]) for entry in reversed(items)]
    assert noted == [("alice", call, f"step-{number}") for number, (call, _) in enumerate(steps)]
    assert items[-2]["detail"] == {"reference": {"from": "", "to": "r"}}
    assert all(entry["at"].endswith("Z") for entry in items)


def test_pages_follow_each_other(server: Running) -> None:
    for number in range(5):
        server.ask("queues.create", queue_name=f"page-{number}")
    first = server.ask("audit.list", limit=2, action="queues.create")
    second = server.ask("audit.list", limit=2, action="queues.create", pivot=first["next"])
    assert [entry["queue_name"] for entry in first["items"] + second["items"]] == ["page-4", "page-3", "page-2", "page-1"]
    whole = server.ask("audit.list", limit=1_000)
    assert whole["next"] is None
    assert server.ask("audit.list", pivot=whole["items"][-1]["id"]) == {"items": [], "next": None}


def test_who_is_no_admin_sees_nothing(server: Running) -> None:
    answer = server.http.post("/v1/audit.list", json={}, headers=as_("alice", "r"))
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1_001}, "limit"),
        ({"queue_name": "no/name"}, "queue_name"),
        ({"action": ""}, "action"),
        ({"pivot": "x" * 1_025}, "pivot"),
        ({"wrong": 1}, "wrong"),
    ],
)
def test_a_wrong_field_is_named(server: Running, fields: dict[str, Any], field: str) -> None:
    answer = server.post("audit.list", **fields)
    assert (answer.status_code, answer.json()["field"]) == (SluicewayError("invalid_request", "").kind.status, field)
