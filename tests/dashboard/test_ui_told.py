"""What readers are told of what was done and of what went wrong: no more than is so, once, and each thing under a name of its own."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sluiceway.cluster.router import Router
from sluiceway.model.inspection import MovedAway
from sluiceway.server.http import Receive, Scope, Send
from sluiceway.server.ui.api import Api, ProblemError
from tests.dashboard.test_ui import ORIGIN, blocks, signed
from tests.dashboard.test_ui_dead import words
from tests.server.server_guarded import Guarded, guarded


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("told-keyed") / "data") as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("told") / "data", keys=False) as found:
        yield found


def deleted(server: Guarded, queue_name: str, *ids: str) -> str:
    given = {"queue_name": queue_name, "ids": "\n".join(ids), "confirm": queue_name}
    return words(server.http.post("/ui/do/items.delete", data=given, headers={ORIGIN: "same-origin"}).text)


def test_what_was_not_deleted_is_said_with_its_reason(server: Guarded) -> None:
    name = server.queue()
    leased = server.produce(name, "a")["first_id"]
    server.lease(name, batch_size=1)
    told = deleted(server, name, leased)
    assert "Delete items: nothing changed" in told
    assert f"{leased} : leased" in told
    ready = server.produce(name, "b")["first_id"]
    told = deleted(server, name, leased, ready)
    assert "Delete items: done" in told
    assert "deleted 1" in told
    assert f"{leased} : leased" in told
    assert "Ignored" not in deleted(server, name, server.produce(name, "c")["first_id"])


def test_what_may_have_been_moved_is_told(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def some_failed(*_: object) -> MovedAway:
        return MovedAway(1, 1, {"other": 1}, [("aaaaaaaa.0.1", "outcome_unknown")])

    monkeypatch.setattr(Router, "move_items", some_failed)
    given = {"queue_name": server.queue(), "ids": "aaaaaaaa.0.0\naaaaaaaa.0.1", "target": server.queue()}
    told = words(server.http.post("/ui/do/items.move", data=given, headers={ORIGIN: "same-origin"}).text)
    assert "Move items: done" in told
    assert "Items with an unknown outcome may have been moved." in told
    assert "aaaaaaaa.0.1 : outcome unknown" in told


def test_a_problem_that_stays_is_told_once(server: Guarded) -> None:
    name = server.queue()
    with server.http.stream("GET", f"/ui/live/queues/{name}/settings") as answer:
        shown = blocks(answer)
        next(shown)
        server.ask("queues.delete", queue_name=name)
        gone = next(shown)
        assert "queue_not_found" in gone
        # Each look is another request; nobody can do anything with their ids.
        assert "request" not in words(gone)
        server.ask("queues.create", queue_name=name)
        assert "queue_not_found" not in next(shown)
    assert "· request" in words(server.http.get("/ui/queues/none/settings").text)


def test_no_name_is_given_to_two_things(keyed: Guarded) -> None:
    name = "twice"
    owner = keyed.client(f"manage:{name}", f"produce:{name}")
    assert owner.post("/v1/queues.create", json={"queue_name": name, "requested_partitions": 2}).status_code == 200
    item = owner.post("/v1/queue.produce", json={"queue_name": name, "items": [{"utf8": "x"}]}).json()["first_id"]
    with signed(keyed, f"read:{name}") as page:
        for path in (f"items?id={item}", "partitions?partition=1", "settings", "", "dead"):
            ids = Counter(re.findall(r'\bid="([^"]+)"', page.get(f"/ui/queues/{name}/{path}".rstrip("/")).text))
            assert [each for each, count in ids.items() if count > 1] == [], path


def test_what_a_call_without_an_answer_has_done_nobody_knows() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        """As an application whose client has gone."""

    async def ask() -> None:
        await Api(silent, {"server": None}, b"localhost").call("queue.pause", queue_name="q")

    with pytest.raises(ProblemError, match="may or may not have been made") as error:
        asyncio.run(ask())
    assert error.value.code == "outcome_unknown"


def test_a_command_that_fails_unexpectedly_is_not_told_as_one_that_was_not_done(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(api: Api, name: str, fields: dict[str, object]) -> None:
        raise RuntimeError("a fault")

    name = server.queue()
    monkeypatch.setattr(Api, "send", _but(Api.send, fails))
    answer = server.http.post("/ui/do/queue.pause", data={"queue_name": name}, headers={ORIGIN: "same-origin"})
    assert answer.status_code == 500
    assert "may or may not have been made" in answer.text


def _but(real: Any, fails: Any) -> Any:
    """The real one but for the command's own call."""

    async def send(api: Api, name: str, fields: dict[str, object]) -> Any:
        return await (fails if name == "queue.pause" else real)(api, name, fields)

    return send
