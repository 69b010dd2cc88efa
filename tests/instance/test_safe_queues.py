"""What a new queue gets by itself: a limit of attempts, a back-off, a dead queue."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import QueueSpec
from sluiceway.testing.drive import driven
from sluiceway.wire import protobuf
from tests.cli.cli_shell import Shell
from tests.cluster.cluster_rig import cluster
from tests.server.server_guarded import Guarded, guarded

SAFE = {"max_attempts": 20, "retry_backoff": {"first": "1s", "most": "10m"}}
PLAIN = {"max_attempts": 0, "retry_backoff": None, "dead_queue": None}
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("safe") / "data", new_queues="safe") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Guarded) -> httpx.Client:
    return server.client("manage:*", "read:*", "produce:*", "consume:*", "admin")


@pytest.fixture
def ask(client: httpx.Client) -> Ask:
    def one(call: str, **fields: Any) -> dict[str, Any]:
        answer = client.post(f"/v1/{call}", json=fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    return one


_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """A name that is used by no other test."""
    return f"orders{next(_numbers)}"


def chosen(info: dict[str, Any]) -> dict[str, Any]:
    return {setting: info[setting] for setting in PLAIN}


def names(client: httpx.Client) -> list[str]:
    return [each["queue_name"] for each in client.post("/v1/queues.list", json={}).json()["items"]]


def test_a_queue_created_with_nothing_said(ask: Ask, name: str) -> None:
    assert chosen(ask("queues.create", queue_name=name, requested_partitions=3)) == {**SAFE, "dead_queue": f"{name}-dead"}
    dead = ask("queues.info", queue_name=f"{name}-dead")
    assert chosen(dead) == {**PLAIN, "retry_backoff": SAFE["retry_backoff"]}
    assert len(dead["partitions"]) == 1
    created = [each["queue_name"] for each in ask("audit.list", limit=2)["items"] if each["action"] == "queues.create"]
    assert sorted(created) == [name, f"{name}-dead"]


def test_an_item_that_fails_pauses_and_after_the_last_attempt_is_in_the_dead_queue(ask: Ask, name: str) -> None:
    ask("queues.create", queue_name=name, max_attempts=2, retry_backoff={"first": "50ms", "most": "50ms"})
    ask("queue.produce", queue_name=name, items=[{"utf8": "bad"}])
    for _ in range(2):
        (item,) = ask("queue.lease", queue_name=name, client_id="c", request_timeout="30s")["items"]
        ask("queue.retry", queue_name=name, items=[{"id": item["id"]}])
    (dead,) = ask("queue.lease", queue_name=f"{name}-dead", client_id="c", request_timeout="30s")["items"]
    assert dead["headers"]["sluiceway-queue"] == name


@pytest.mark.parametrize("off", sorted(PLAIN))
def test_null_turns_one_of_them_off(ask: Ask, client: httpx.Client, name: str, off: str) -> None:
    info = ask("queues.create", queue_name=name, **{off: None})
    assert chosen(info) == {**SAFE, "dead_queue": f"{name}-dead", off: PLAIN[off]}
    assert (f"{name}-dead" in names(client)) == (off != "dead_queue")


def test_what_the_call_says_stands(ask: Ask, name: str) -> None:
    ask("queues.create", queue_name=f"failed-{name}")
    info = ask("queues.create", queue_name=name, max_attempts=3, dead_queue=f"failed-{name}")
    assert chosen(info) == {**SAFE, "max_attempts": 3, "dead_queue": f"failed-{name}"}


@pytest.mark.parametrize("dead", ["dead", "invoices-dead"])
def test_a_dead_queue_by_name_has_no_limit_after_which_its_items_were_dropped(ask: Ask, client: httpx.Client, dead: str) -> None:
    assert chosen(ask("queues.create", queue_name=dead)) == {**PLAIN, "retry_backoff": SAFE["retry_backoff"]}
    assert f"{dead}-dead" not in names(client)


def test_a_dead_queue_that_exists_is_used_as_it_is(ask: Ask, name: str) -> None:
    before = ask("queues.create", queue_name=f"{name}-dead", requested_partitions=2, reference="mine")
    assert ask("queues.create", queue_name=name)["dead_queue"] == f"{name}-dead"
    assert ask("queues.info", queue_name=f"{name}-dead") == before


def test_an_update_gives_nothing_that_was_not_asked_for(ask: Ask, name: str) -> None:
    ask("queues.create", queue_name=name, **PLAIN)
    assert chosen(ask("queues.update", queue_name=name, reference="mine")) == PLAIN


def test_dead_items_do_not_go_round_in_a_circle(ask: Ask, client: httpx.Client, name: str) -> None:
    ask("queues.create", queue_name=name)
    ask("queues.create", queue_name=f"last-{name}")
    ask("queues.update", queue_name=f"{name}-dead", dead_queue=f"last-{name}")
    refused = client.post("/v1/queues.update", json={"queue_name": f"last-{name}", "dead_queue": name})
    assert (refused.status_code, refused.json()["field"]) == (400, "dead_queue")
    assert "circle" in refused.json()["detail"]


def test_an_item_that_dies_in_a_dead_queue_tells_of_its_latest_death(ask: Ask, name: str) -> None:
    ask("queues.create", queue_name=f"failed-{name}")
    ask("queues.create", queue_name=name, dead_queue=f"failed-{name}")
    ask("queue.produce", queue_name=name, items=[{"utf8": "bad", "headers": {"own": "1"}}])
    for source in (name, f"failed-{name}"):
        (item,) = ask("queue.lease", queue_name=source, client_id="c", request_timeout="30s")["items"]
        ask("queue.retry", queue_name=source, items=[{"id": item["id"], "dead": True, "reason": f"refused in {source}"}])
    (dead,) = ask("queue.lease", queue_name=f"failed-{name}-dead", client_id="c", request_timeout="30s")["items"]
    assert dead["headers"]["own"] == "1"
    assert (dead["headers"]["sluiceway-queue"], dead["headers"]["sluiceway-reason"]) == (f"failed-{name}", f"refused in failed-{name}")


def test_a_name_too_long_for_a_dead_queue_says_what_to_do(ask: Ask, client: httpx.Client) -> None:
    long = "q" * 126
    refused = client.post("/v1/queues.create", json={"queue_name": long})
    assert (refused.status_code, refused.json()["field"]) == (400, "dead_queue")
    assert "pass null" in refused.json()["detail"]
    assert long not in names(client)
    assert ask("queues.create", queue_name=long, dead_queue=None)["dead_queue"] is None


def test_a_key_that_may_not_manage_the_dead_queue(server: Guarded, name: str) -> None:
    narrow = server.client(f"manage:{name}", f"read:{name}*")
    refused = narrow.post("/v1/queues.create", json={"queue_name": name})
    assert refused.status_code == 403
    assert f"{name}-dead" in refused.json()["detail"]
    assert names(narrow) == []
    assert narrow.post("/v1/queues.create", json={"queue_name": name, "dead_queue": None}).status_code == 200


def test_queues_of_querators_clients_have_querators_defaults(client: httpx.Client, name: str) -> None:
    body = protobuf.message_class("QueueInfo")(queue_name=name, lease_timeout="1m", expire_timeout="1h", requested_partitions=1)
    headers = {"content-type": "application/protobuf"}
    answer = client.post("/v1/queues.create", content=body.SerializeToString(), headers=headers)
    assert answer.status_code == 200, answer.text
    assert chosen(client.post("/v1/queues.info", json={"queue_name": name}).json()) == PLAIN


def test_a_queue_goes_with_the_empty_dead_queue_that_was_made_with_it(ask: Ask, client: httpx.Client, name: str) -> None:
    ask("queues.create", queue_name=name)
    ask("queues.delete", queue_name=name)
    assert not {name, f"{name}-dead"} & {*names(client)}


def test_a_dead_queue_stays_that_has_items(ask: Ask, client: httpx.Client, name: str) -> None:
    ask("queues.create", queue_name=name)
    ask("queue.produce", queue_name=f"{name}-dead", items=[{"utf8": "x"}])
    ask("queues.delete", queue_name=name, force=True)
    assert f"{name}-dead" in names(client)


def test_a_dead_queue_stays_that_was_changed(ask: Ask, client: httpx.Client, name: str) -> None:
    ask("queues.create", queue_name=name)
    ask("queues.update", queue_name=f"{name}-dead", reference="mine")
    ask("queues.delete", queue_name=name)
    assert f"{name}-dead" in names(client)


def test_a_dead_queue_stays_that_is_anothers_too(ask: Ask, client: httpx.Client, name: str) -> None:
    ask("queues.create", queue_name=name)
    ask("queues.create", queue_name=f"{name}b", dead_queue=f"{name}-dead")
    ask("queues.delete", queue_name=name)
    assert f"{name}-dead" in names(client)


def test_a_dead_queue_stays_that_the_key_may_not_manage(ask: Ask, server: Guarded, client: httpx.Client, name: str) -> None:
    ask("queues.create", queue_name=name)
    assert server.client(f"manage:{name}").post("/v1/queues.delete", json={"queue_name": name}).status_code == 200
    assert f"{name}-dead" in names(client)


@driven
async def test_two_instances_that_create_at_once_make_one_dead_queue(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, services):
        spec = QueueSpec("orders", 2, True, dead_queue="orders-dead")
        made = await asyncio.gather(*(each.create_queue(spec) for each in services), return_exceptions=True)
        refused = [each for each in made if isinstance(each, SluicewayError)]
        assert [each.code for each in refused] == ["queue_exists"]
        for service in services:
            assert (await service.look_up("orders")).dead_queue == "orders-dead"
            assert len((await service.look_up("orders-dead")).partitions) == 1


def test_the_command_says_what_it_chose(
    server: Guarded, name: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("SLUICEWAY_URL", server.url)
    monkeypatch.setenv("SLUICEWAY_API_KEY", server.key("manage:*", "read:*"))
    shell = Shell(name, monkeypatch, capfdbinary)
    code, told, _ = shell.ends("queue", "create", name)
    assert (code, told) == (
        0,
        f"Created {name} with 1 partition. At most 20 attempts; retries after 1s to 10m; dead items go to {name}-dead.\n",
    )
    code, told, _ = shell.ends("queue", "create", f"{name}b", "--no-max-attempts", "--no-retry-backoff", "--no-dead-queue")
    assert (code, told) == (0, f"Created {name}b with 1 partition. No limit of attempts; retries at once; dead items are dropped.\n")
