"""The audit trail over HTTP, and who the calls on queues name as the one who asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Caller, Scope
from sluiceway.server.app import Fittings
from sluiceway.server.audit_calls import AuditCalls
from sluiceway.server.http import Request
from tests.server.server_running import Running, running


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


def test_entries_are_found_by_action_actor_and_time(server: Running) -> None:
    for name, call in (("bob/aaaa", "queues.create"), ("bob/bbbb", "queue.pause"), ("bobby", "queue.resume"), ("carl", "queues.delete")):
        server.http.post(f"/v1/{call}", json={"queue_name": "found"}, headers=as_(name, call)).raise_for_status()

    def found(**fields: object) -> list[str]:
        return [entry["action"] for entry in reversed(server.ask("audit.list", queue_name="found", **fields)["items"])]

    everything = ["queues.create", "queue.pause", "queue.resume", "queues.delete"]
    assert found() == everything
    assert found(action="queue.") == ["queue.pause", "queue.resume"]
    assert found(action="queue") == [], "without the dot it is a whole name"
    assert found(actor="bob") == ["queues.create", "queue.pause"]
    assert found(actor="bob/bbbb") == ["queue.pause"]
    assert found(actor="bo") == []
    times = [entry["at"] for entry in reversed(server.ask("audit.list", queue_name="found")["items"])]
    assert found(since=times[1]) == everything[1:], "from that time on"
    assert found(until=times[1]) == everything[:1], "before that time"
    assert found(since=times[1], until=times[3]) == everything[1:3]
    assert found(since="2000-01-01T00:00:00Z") == everything
    assert found(since="2100-01-01T00:00:00Z") == []
    assert found(until="1960-01-01T00:00:00Z") == []
    # Pages go on within what is asked for.
    first = server.ask("audit.list", queue_name="found", actor="bob", limit=1)
    assert [each["action"] for each in first["items"]] == ["queue.pause"]
    second = server.ask("audit.list", queue_name="found", actor="bob", limit=1, pivot=first["next"])
    assert ([each["action"] for each in second["items"]], second["next"]) == (["queues.create"], None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"actor": ""}, "actor"),
        ({"since": "yesterday"}, "since"),
        ({"until": 5}, "until"),
        ({"limit": 0}, "limit"),
        ({"limit": 1_001}, "limit"),
        ({"queue_name": "no/name"}, "queue_name"),
        ({"action": ""}, "action"),
        ({"pivot": "x" * 2_049}, "pivot"),
        ({"wrong": 1}, "wrong"),
    ],
)
def test_a_wrong_field_is_named(server: Running, fields: dict[str, Any], field: str) -> None:
    answer = server.post("audit.list", **fields)
    assert (answer.status_code, answer.json()["field"]) == (SluicewayError("invalid_request", "").kind.status, field)
