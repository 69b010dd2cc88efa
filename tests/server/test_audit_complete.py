"""Whatever changes something leaves an entry in the audit trail that says who asked for it, and by which request.

It goes by what the server's own OpenAPI document has: a call that is added is either made here, or among the exceptions with its reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sluiceway.model.access import ACTIONS
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually
from tests.server.test_server_reload import Child, child

ADMIN_KEY = "only-for-tests-0123456789abcdef0123456789"
CONFIG = "[server]\nauth = 'keys'\nadmin_key = 'env:ADMIN'\n[backends.default]\nkind = 'memory'\n"

ITEMS = "what becomes of single items; there may be a million a minute, and queue.stats counts them"
LOOKS = "it only looks"
EXCEPTIONS = {
    **{f"/v1/queue.{verb}": ITEMS for verb in ("produce", "lease", "complete", "retry", "release", "extend", "settle")},
    **dict.fromkeys(("/v1/keys.list", "/v1/audit.list", "/v1/config.show", "/v1/backends.list"), LOOKS),
    **dict.fromkeys(("/v1/backups.records", "/v1/backups.blobs", "/v1/backups.end"), "the backup that they read has an entry"),
    "/v1/consumers.report": "it is of the moment, and forgotten",
    "/v1/upgrades.finalize": "a new server has the newest level; tests/cluster/test_compatibility_level.py has its entry",
    **dict.fromkeys(
        ("/v1/partition.pin", "/v1/partition.unpin"),
        "a server that is alone has all partitions; tests/cluster/test_partition_pins.py has their entries",
    ),
    "/v1/instances.update": "a server that is alone has no such times; tests/cluster/test_cluster_times.py has its entry",
}
"""Calls that leave no entry, and why not, beside those that take the right to `read`, or none."""


class Caller:
    """A key that may do everything, and what it is asked to do: each request has an id of its own."""

    def __init__(self, server: Child) -> None:
        self.server = server
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=headers) as administrator:
            scopes = ["admin", *(f"{action}:*" for action in ACTIONS if action != "admin")]
            made = administrator.post("/v1/keys.create", json={"name": "auditor", "scopes": scopes}).json()
        self.actor = f"auditor/{made['key_id']}"
        self.http = httpx.Client(base_url=server.url, timeout=PATIENCE, headers={"authorization": f"Bearer {made['key']}"})
        self._numbers = itertools.count()
        self.request_id = ""

    def ask(self, path: str, **fields: object) -> Any:
        """The answer of a call that must succeed."""
        self.request_id = f"request-{next(self._numbers)}"
        answer = self.http.post(f"/v1/{path.removeprefix('/v1/')}", json=fields, headers={"x-request-id": self.request_id})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    with child(tmp_path_factory.mktemp("audit"), CONFIG, ADMIN=ADMIN_KEY) as server:
        found = Caller(server)
        try:
            for name in ("q", "dead"):
                found.ask("queues.create", queue_name=name, requested_partitions=2)
            yield found
        finally:
            found.http.close()


# -- one success of each call that changes something ------------------------------------------------------------------

MADE: dict[str, Callable[[Caller], object]] = {}


def made(path: str) -> Callable[[Callable[[Caller], object]], Callable[[Caller], object]]:
    """The last call that the function makes is that one."""

    def note(function: Callable[[Caller], object]) -> Callable[[Caller], object]:
        MADE[path] = function
        return function

    return note


_names = itertools.count()


def queue(caller: Caller, **fields: object) -> str:
    """A queue of its own."""
    name = f"made-{next(_names)}"
    caller.ask("queues.create", queue_name=name, **fields)
    return name


def rebalanced(caller: Caller, id: str) -> None:
    eventually(lambda: caller.ask("rebalances.get", id=id)["ended_at"])


MADE["/v1/queues.create"] = lambda caller: queue(caller)
MADE["/v1/queues.update"] = lambda caller: caller.ask("queues.update", queue_name="q", reference=f"r{next(_names)}")
MADE["/v1/queue.pause"] = lambda caller: caller.ask("queue.pause", queue_name=queue(caller))
MADE["/v1/queue.clear"] = lambda caller: caller.ask("queue.clear", queue_name="q")
MADE["/v1/queue.redrive"] = lambda caller: caller.ask("queue.redrive", queue_name="dead", target="q")
MADE["/v1/queue.reload"] = lambda caller: caller.ask("queue.reload", queue_name="q")
MADE["/v1/queues.delete"] = lambda caller: caller.ask("queues.delete", queue_name=queue(caller))
MADE["/v1/storage/items.import"] = lambda caller: caller.ask("storage/items.import", queue_name="q", items=[{"payload": "eA=="}])
MADE["/v1/queue.rebalance"] = lambda caller: caller.ask("queue.rebalance", queue_name=queue(caller), requested_partitions=2)
MADE["/v1/queues.rebalance"] = lambda caller: caller.ask("queues.rebalance", match=queue(caller), requested_partitions=2)
MADE["/v1/partition.pause"] = lambda caller: caller.ask("partition.pause", queue_name=queue(caller), partition=0)
MADE["/v1/keys.create"] = lambda caller: caller.ask("keys.create", name="made", scopes=["read:q"])


def schedule(caller: Caller) -> str:
    """A schedule of its own."""
    name = f"made-{next(_names)}"
    caller.ask("schedules.create", name=name, cron="0 0 1 1 *", queue_name="q", item={"utf8": "x"})
    return name


MADE["/v1/schedules.create"] = lambda caller: schedule(caller)
MADE["/v1/schedules.update"] = lambda caller: caller.ask("schedules.update", name=schedule(caller), cron="0 0 2 1 *")
MADE["/v1/schedules.pause"] = lambda caller: caller.ask("schedules.pause", name=schedule(caller))
MADE["/v1/schedules.run"] = lambda caller: caller.ask("schedules.run", name=schedule(caller))
MADE["/v1/schedules.delete"] = lambda caller: caller.ask("schedules.delete", name=schedule(caller))


@made("/v1/schedules.resume")
def _resume_schedule(caller: Caller) -> None:
    name = schedule(caller)
    caller.ask("schedules.pause", name=name)
    caller.ask("schedules.resume", name=name)


def bundle(caller: Caller) -> str:
    """A bundle of its own."""
    return str(caller.ask("bundles.create", queue_name="q")["id"])


MADE["/v1/bundles.create"] = lambda caller: bundle(caller)
MADE["/v1/bundles.close"] = lambda caller: caller.ask("bundles.close", id=bundle(caller))
MADE["/v1/bundles.cancel"] = lambda caller: caller.ask("bundles.cancel", id=bundle(caller))


@made("/v1/backups.begin")
def _begin_backup(caller: Caller) -> None:
    caller.ask("backups.begin")


@made("/v1/queue.resume")
def _resume(caller: Caller) -> None:
    caller.ask("queue.pause", queue_name="q")
    caller.ask("queue.resume", queue_name="q")


@made("/v1/storage/items.delete")
def _delete_items(caller: Caller) -> None:
    name = queue(caller)
    stored = caller.ask("queue.produce", queue_name=name, items=[{"utf8": "x"}])
    caller.ask("storage/items.delete", queue_name=name, ids=[stored["first_id"]])


@made("/v1/storage/items.run_now")
def _run_now(caller: Caller) -> None:
    name = queue(caller)
    stored = caller.ask("queue.produce", queue_name=name, items=[{"utf8": "x"}])
    caller.ask("storage/items.run_now", queue_name=name, ids=[stored["first_id"]])


@made("/v1/storage/items.move")
def _move_items(caller: Caller) -> None:
    name = queue(caller)
    stored = caller.ask("queue.produce", queue_name=name, items=[{"utf8": "x"}])
    caller.ask("storage/items.move", queue_name=name, ids=[stored["first_id"]], target="q")


@made("/v1/rebalances.cancel")
def _cancel(caller: Caller) -> None:
    name = queue(caller, requested_partitions=2)
    for _ in range(4):
        caller.ask("queue.produce", queue_name=name, items=[{"utf8": "x"}] * 5)
    # It cannot end by itself: nobody consumes.
    begun = caller.ask("queue.rebalance", queue_name=name, requested_partitions=1)
    caller.ask("rebalances.cancel", id=begun["id"])


@made("/v1/partition.resume")
def _resume_partition(caller: Caller) -> None:
    name = queue(caller)
    caller.ask("partition.pause", queue_name=name, partition=0)
    caller.ask("partition.resume", queue_name=name, partition=0)


@made("/v1/keys.revoke")
def _revoke(caller: Caller) -> None:
    key = caller.ask("keys.create", name="made", scopes=["read:q"])
    caller.ask("keys.revoke", key_id=key["key_id"])


@made("/v1/config.reload")
def _reload_config(caller: Caller) -> None:
    changed: list[str] = []
    while not changed:
        caller.server.file.write_text(f"{CONFIG}[limits]\nrequests_per_second = {1_000_000 + next(_names)}\n")
        # On a slow machine the server may have seen it by itself, a second later, and then there is nothing left to change.
        changed = caller.ask("config.reload")["changed"]


# -- the tests --------------------------------------------------------------------------------------------------------


def test_every_call_that_changes_something_is_made_here_or_excepted(caller: Caller) -> None:
    document = caller.http.get("/openapi.json").json()
    actions = {path: item["post"].get("x-required-action") for path, item in document["paths"].items() if "post" in item}
    changing = {path for path, action in actions.items() if action not in ("read", None)}
    assert changing == MADE.keys() | EXCEPTIONS.keys(), "a new call needs its case here, and an entry; or else a reason why it has none"
    assert not MADE.keys() & EXCEPTIONS.keys()


@pytest.mark.parametrize("path", sorted(MADE))
def test_it_leaves_an_entry_with_who_asked_and_by_which_request(caller: Caller, path: str) -> None:
    MADE[path](caller)
    request_id = caller.request_id
    found = [each for each in caller.ask("audit.list", limit=100)["items"] if each["request_id"] == request_id]
    # The rebalances that queues.rebalance asks for begin one after the other, each with an entry.
    of_it = {"queues.rebalance": {"queues.rebalance", "queue.rebalance"}}.get(path.removeprefix("/v1/"), {path.removeprefix("/v1/")})
    assert path.removeprefix("/v1/") in {each["action"] for each in found} <= of_it
    assert {each["actor"] for each in found} == {caller.actor}
    assert all(each["at"].endswith("Z") for each in found)


def test_what_is_read_or_excepted_leaves_none(caller: Caller) -> None:
    name = queue(caller)
    made_by = caller.request_id
    caller.ask("queue.produce", queue_name=name, items=[{"utf8": "x"}] * 4)
    leases = [caller.ask("queue.lease", queue_name=name, client_id="c")["items"][0] for _ in range(4)]
    caller.ask("queue.extend", queue_name=name, lease_ids=[leases[0]["lease_id"]])
    caller.ask("queue.settle", queue_name=name, items=[{"id": leases[0]["id"], "outcome": "done"}])
    caller.ask("queue.complete", queue_name=name, ids=[leases[1]["id"]])
    caller.ask("queue.retry", queue_name=name, items=[{"id": leases[2]["id"]}])
    caller.ask("queue.release", queue_name=name, ids=[leases[3]["id"]])
    for call in ("keys.list", "config.show", "backends.list", "queues.list", "rebalances.list"):
        caller.ask(call)
    for call in ("queues.info", "queue.stats", "rebalances.plan", "queue.peek"):
        caller.ask(call, queue_name=name)
    caller.ask("queue.browse", queue_name=name, partition=0)
    asked = {f"request-{number}" for number in range(int(made_by.partition("-")[2]), int(caller.request_id.partition("-")[2]) + 1)}
    entries = caller.ask("audit.list", limit=1_000)["items"]
    # Rebalances that were asked for before may still go on.
    assert [each["request_id"] for each in entries if each["request_id"] in asked or each["queue_name"] == name] == [made_by]


def test_a_rebalance_can_be_followed_in_the_trail_alone(caller: Caller) -> None:
    """Each step has its entry, by the system, with the rebalance's id and what it was caused by."""
    name = queue(caller, requested_partitions=2)
    begun = caller.ask("queue.rebalance", queue_name=name, requested_partitions=1)
    asked = caller.request_id
    rebalanced(caller, begun["id"])
    entries = caller.ask("audit.list", queue_name=name, limit=1_000)["items"][::-1]
    assert [each["action"] for each in entries][:2] == ["queues.create", "queue.rebalance"]
    assert entries[1]["request_id"] == asked
    steps = caller.ask("audit.list", queue_name=name, action="rebalance.", limit=1_000)["items"][::-1]
    assert [each["action"] for each in steps if each["action"] != "rebalance.problem"] == [
        *("rebalance.create", "rebalance.flip", "rebalance.shut", "rebalance.keys", "rebalance.drain", "rebalance.finish")
    ]
    for each in steps:
        assert (each["actor"], each["detail"]["rebalance"]) == ("system", begun["id"])
        # A problem is caused by something else.
        assert each["action"] == "rebalance.problem" or (
            caller.actor in each["detail"]["cause"] and each["detail"]["cause_request_id"] == asked
        )
    assert caller.ask("audit.list", action="rebalance.", actor="auditor")["items"] == []
