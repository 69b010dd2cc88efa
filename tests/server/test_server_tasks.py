"""`tasks.list` and `tasks.get`: a server shows the captures of its own meta store, and waits for no log that does not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.capture import Begun
from sluiceway.capture.config import STREAMS
from sluiceway.client import AsyncClient, CallError, Client, TaskGroup, TaskMember
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.model.meta import Entry, View
from sluiceway.server.app import Fittings
from sluiceway.server.task_calls import Sights, TaskCalls
from sluiceway.testing.drive import driven
from tests.capture.tasks_rig import Part, Script
from tests.capture.test_capture import KIND, SCRIPTS, config, member
from tests.cli.cli_shell import Shell
from tests.cli.test_cli_tasks import KEPT, RECORDS, write_capture
from tests.instance.instance_rig import eventually
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_process import PATIENCE, ServerProcess, closed_port
from tests.server.server_running import Running, running
from tests.server.test_server_reload import child

CALLS: tuple[tuple[str, dict[str, object]], ...] = (("tasks.list", {}), ("tasks.get", {"name": "feed"}), ("tasks.get", {"name": "none"}))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setitem(STREAMS, KIND, "tests.capture.test_capture")
    SCRIPTS["s"] = Script([Part("a", (), 30, 1), Part("b", (), 20, 1), Part("c", ("a", "b"), 50)])
    yield SCRIPTS["s"]
    SCRIPTS.clear()


# -- a capture that runs ----------------------------------------------------------------------------------------------


async def watch(url: str, told: Any, script: Script) -> None:
    """What an instance shows before, while and after a member is at work."""
    script.held = True
    async with AsyncClient(url) as client:
        found = await client.list_tasks()
        assert (found.items, found.unseen) == ([], [])
        with pytest.raises(CallError) as raised:
            await client.get_tasks("orders")
        assert (raised.value.code, raised.value.field, raised.value.kind.status) == ("capture_not_found", "name", 404)
        async with member(told) as runner:
            seen = await shown(client, lambda group: group.records == 100 and [each.partition for each in group.partitions] == ["c"])
            (last,) = seen.partitions
            assert (seen.leader, seen.term > 0, seen.sown) == (runner.name, True, True)
            assert seen.members == [TaskMember(member=runner.name, leads=True, in_term=True, partitions=1)]
            assert (seen.stream, seen.log, seen.queue, seen.alarms, seen.stuck) == (KIND, "meta", told.queue, [], {})
            assert (last.state, last.owner, last.parents, last.waits_for) == ("owned", runner.name, ["a", "b"], [])
            assert (last.position, last.records, last.grant is not None) == ("c:50", 50, True)
            assert seen.watermark is not None
            assert last.written_at is not None
        left = await shown(client, lambda group: group.leader is None)
        assert (left.members, left.partitions[0].state, left.partitions[0].owner) == ([], "ready", None)


async def shown(client: AsyncClient, holds: Any) -> TaskGroup:
    async with asyncio.timeout(PATIENCE):
        while not holds(seen := await client.get_tasks("orders")):  # noqa: ASYNC110 - there is no event to await
            await asyncio.sleep(0.05)
    return seen


def still(found: Any) -> Any:
    """Without what goes by the time: who is dead falls further behind."""
    if isinstance(found, dict):
        return {name: still(each) for name, each in found.items() if name != "behind"}
    return [still(each) for each in found] if isinstance(found, list) else found


def test_an_instance_shows_what_runs_by_its_clusters_meta_store(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    meta = f"sqlite:{tmp_path / 'meta.db'}"
    with child(tmp_path, f'[cluster]\nmeta = "{meta}"\n') as server:
        server.ask("queues.create", queue_name="orders")
        asyncio.run(watch(server.url, config(tmp_path, meta=meta, url=server.url, queue="orders", limit=7), script))
        with Client(server.url) as client:
            group, (listed,) = client.get_tasks("orders"), client.list_tasks().items
            assert (listed.name, listed.records, listed.state_of) == ("orders", 100, group.state_of)
        # The same as whoever reads the meta store beside it.
        shell = Shell("", monkeypatch, capsysbinary)
        assert still(server.ask("tasks.get", name="orders")) == still(shell.json("tasks", "show", "orders", "--meta", meta)[0])
        assert still(server.ask("tasks.list")) == {"items": still(shell.json("tasks", "list", "--meta", meta)), "unseen": []}


# -- of a server that is alone, and who may see it ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "data"


@pytest.fixture(scope="module")
def alone(data: Path) -> Iterator[Guarded]:
    with guarded(data) as server:
        asyncio.run(write_capture(data / "meta.sqlite", "feed", RECORDS, KEPT))
        yield server


def test_captures_may_be_in_the_meta_store_of_a_server_that_is_alone(alone: Guarded) -> None:
    client = alone.client("read:*")
    found = client.post("/v1/tasks.get", json={"name": "feed"}).json()
    parents = {each["partition"]: (each["parents"], each["waits_for"]) for each in found["partitions"]}
    # A tree: what hangs from what, and what keeps it from beginning.
    assert parents == {
        "shard-0": ([], []),
        "shard-1": ([], []),
        "shard-2": ([], []),
        "shard-3": (["shard-0"], ["shard-0"]),
        "shard-4": (["shard-0"], ["shard-0"]),
        "shard-5": (["shard-1", "shard-2"], ["shard-2"]),
    }
    assert (found["watermark"], found["partitions"][2]["at"]) == ("2023-11-14T22:13:20Z", "2023-11-14T22:14:10Z")
    assert [found["partitions"][2][name] for name in ("owner", "moving_to")] == ["two", "one"]
    (listed,) = client.post("/v1/tasks.list", json={}).json()["items"]
    assert listed == {name: value for name, value in found.items() if name not in ("sown", "partitions")}


def test_captures_are_for_who_may_read_all_queues_and_for_administrators(alone: Guarded) -> None:
    for scope in ("read:*", "admin"):
        client = alone.client(scope)
        assert [client.post(f"/v1/{call}", json=fields).status_code for call, fields in CALLS] == [200, 200, 404]
    for scopes in (["read:orders"], ["read:feed", "read:f*"], ["produce:*", "consume:*", "manage:*"]):
        client = alone.client(*scopes)
        answers = [client.post(f"/v1/{call}", json=fields).json() for call, fields in CALLS]
        # Nor is it said whether there is such a capture.
        assert {(each["code"], each["status"], each["detail"]) for each in answers} == {("forbidden", 403, answers[0]["detail"])}
    assert [alone.http.post(f"/v1/{call}", json=fields).status_code for call, fields in CALLS] == [401] * 3


@pytest.mark.parametrize("fields", [{}, {"name": None}, {"name": ""}, {"name": "../feed"}, {"name": 7}, {"name": "x" * 129}])
def test_what_is_no_name_is_refused(alone: Guarded, fields: dict[str, object]) -> None:
    answer = alone.client("admin").post("/v1/tasks.get", json=fields)
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "invalid_request", "name")


def test_nothing_is_written_by_looking(alone: Guarded, data: Path) -> None:
    async def written() -> dict[str, Entry]:
        store = SqliteMetaStore(data / "meta.sqlite")
        view = await store.read(prefixes=["captures/", "tasks/"])
        await store.close()
        return dict(view.entries)

    client = alone.client("admin")
    before = asyncio.run(written())
    for call, fields in CALLS:
        client.post(f"/v1/{call}", json=fields)
    assert before
    assert asyncio.run(written()) == before


# -- logs that do not answer -------------------------------------------------------------------------------------------


def with_captures(service: Service, patience: Millis = 60_000) -> Fittings:
    return Fittings(endpoints=TaskCalls(lambda: service.meta, patience).endpoints())


@contextmanager
def with_a_log_elsewhere(data: Path, port: int, patience: Millis = 60_000) -> Iterator[Running]:
    """A server whose meta store has a capture `feed`, and one whose log is in a Kafka at that port."""
    with running(data, lambda service: with_captures(service, patience)) as server:
        asyncio.run(write_capture(data / "meta.sqlite", "feed", RECORDS, KEPT))
        asyncio.run(write_capture(data / "meta.sqlite", "far", [], {}, log=f"kafka:127.0.0.1:{port}"))
        yield server


def test_a_log_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    with closed_port() as port, with_a_log_elsewhere(tmp_path / "data", port) as server:
        found = server.ask("tasks.list")
        assert [each["name"] for each in found["items"]] == ["feed"]
        (unseen,) = found["unseen"]
        assert (unseen["name"], unseen["stream"], unseen["log"]) == ("far", "kinesis", f"kafka:127.0.0.1:{port}")
        assert "far_connector_sync" in unseen["problem"]
        answer = server.post("tasks.get", name="far")
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert answer.json()["detail"] == f"the log of far cannot be read: {unseen['problem']}"


async def write_damage(path: Path) -> None:
    store = SqliteMetaStore(path)
    await store.commit(puts={"tasks/far/positions/a": b'{"token":"a","grant":"first"}'})
    await store.close()


def test_neither_does_one_that_another_version_has_written(tmp_path: Path) -> None:
    with running(tmp_path / "data", with_captures) as server:
        path = tmp_path / "data" / "meta.sqlite"
        asyncio.run(write_capture(path, "feed", RECORDS, KEPT))
        asyncio.run(write_capture(path, "far", RECORDS, {}))
        asyncio.run(write_damage(path))
        found = server.ask("tasks.list")
        assert [each["name"] for each in found["items"]] == ["feed"]
        assert [each["problem"].partition(":")[0] for each in found["unseen"]] == ["the log has records that this version does not know"]


def test_while_a_log_does_not_answer_everything_else_does(tmp_path: Path) -> None:
    """It is waited for in the background; when its server is gone, whoever still waits is told."""
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    with ThreadPoolExecutor(1) as pool, with_a_log_elsewhere(tmp_path / "data", port) as server:
        waiting = pool.submit(server.ask, "tasks.list")
        connection, _ = silent.accept()
        assert server.ask("tasks.get", name="feed")["leader"] == "one"
        assert server.produce(server.queue(), "x")["count"] == 1
        assert not waiting.done()
        # Nobody can connect anew either.
        silent.close()
        connection.close()
        assert [each["name"] for each in waiting.result(PATIENCE)["unseen"]] == ["far"]


def test_who_asks_does_not_wait_for_long(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, with_a_log_elsewhere(tmp_path / "data", silent.getsockname()[1], 20) as server:
        answer = server.post("tasks.get", name="far")
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        far = next(each for each in server.ask("tasks.list")["unseen"] if each["name"] == "far")
        assert far["problem"] == "no answer within 20ms"
        silent.close()


class Counting(SqliteMetaStore):
    reads = 0

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        self.reads += 1
        return await super().read(keys, prefixes)


@driven
async def test_many_who_ask_cost_as_much_as_one(tmp_path: Path) -> None:
    await write_capture(tmp_path / "m", "feed", RECORDS, KEPT)
    store = Counting(tmp_path / "m")
    begun = Begun(stream="kinesis", log="meta", queue="orders")
    sights = Sights(lambda: store)
    seen = await sights.of("feed", begun)
    alone = store.reads
    assert alone
    assert [await sights.of("feed", begun) is seen for _ in range(100)] == [True] * 100
    assert store.reads == alone
    # Later it is looked at anew: what was seen is soon forgotten.
    first = sights.of("feed", begun)
    await eventually(lambda: sights.of("feed", begun) is not first)
    assert (await sights.of("feed", begun)).whole
    await sights.stop()
    await store.close()


def test_a_server_stops_while_a_log_does_not_answer(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, ThreadPoolExecutor(1) as pool, ServerProcess(tmp_path / "data") as server:
        port = silent.getsockname()[1]
        asyncio.run(write_capture(tmp_path / "data" / "meta.sqlite", "far", [], {}, log=f"kafka:127.0.0.1:{port}"))
        waiting = pool.submit(httpx.post, f"{server.url}/v1/tasks.list", json={}, timeout=PATIENCE)
        connection, _ = silent.accept()
        assert server.interrupt() == 0
        connection.close()
        (unseen,) = waiting.result(PATIENCE).json()["unseen"]
        assert (unseen["name"], unseen["problem"]) == ("far", "the server is stopping")
    assert "Traceback" not in (tmp_path / "data.log").read_text()
