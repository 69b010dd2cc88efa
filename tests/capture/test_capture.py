"""The public face: what a capture is told, what is refused, and what can be seen of it, with members in this process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.capture import (
    Begun,
    CaptureConfig,
    Claim,
    Handler,
    TaskRunner,
    captures,
    forget,
    look,
    open_stream,
    run_member,
)
from sluiceway.capture import capture_process as capture_member
from sluiceway.capture import registration as capture_begun
from sluiceway.capture.config import STREAMS
from sluiceway.capture.member_parts import open_meta, open_positions
from sluiceway.core.group.group_records import Keys, MemberRecord, Parameters, Resource
from sluiceway.core.group.task_state import State
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import ChangeStream
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import PositionStore
from sluiceway.testing.drive import driven
from tests.capture.tasks_rig import Part, Script, ScriptedStream
from tests.instance.instance_rig import eventually
from tests.server.server_process import closed_port
from tests.server.server_running import running

KIND = "in_this_process"
SCRIPTS: dict[str, Script] = {}


def from_options(name: str, options: dict[str, str]) -> ChangeStream:
    """All members of this process read the same script."""
    return ScriptedStream(SCRIPTS[options["script"]])


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(STREAMS, KIND, __name__)
    yield
    SCRIPTS.clear()


def config(folder: Path, **fields: Any) -> CaptureConfig:
    given = {"name": "orders", "meta": f"sqlite:{folder / 'meta.db'}", "stream": KIND, "options": {"script": "s"}}
    return CaptureConfig(**(given | fields))


@asynccontextmanager
async def member(told: CaptureConfig) -> Any:
    stop = asyncio.Event()
    runners: list[TaskRunner] = []
    running_ = asyncio.create_task(run_member(told, stop=stop, watch=runners.append))
    try:
        await eventually(lambda: bool(runners) or running_.done())
        yield runners[0]
    finally:
        stop.set()
        await running_


@driven
async def test_members_read_a_stream_into_a_queue_and_anybody_can_look(tmp_path: Path) -> None:
    script = SCRIPTS["s"] = Script([Part("a", (), 30, 1), Part("b", (), 20, 1), Part("c", ("a", "b"), 50)])
    script.held = True
    with running(tmp_path / "data") as server:
        told = config(tmp_path, url=server.url, queue=server.queue(), limit=7)
        async with AsyncExitStack() as stack:
            runners = [await stack.enter_async_context(member(told)) for _ in range(2)]
            assert runners[0].name != runners[1].name
            await eventually(lambda: any("c" in runner.claims for runner in runners))
            await eventually(lambda: server.totals(told.queue)["produced"] == 100)
            seen = await look("orders", told.meta)
            while seen.positions["c"].kept.records < 50:
                seen = await look("orders", told.meta)
            assert seen.begun is not None
            assert (seen.begun.stream, seen.begun.log, seen.begun.queue) == (KIND, "meta", told.queue)
            assert list(seen.state.unfinished()) == ["c"]
            assert set(seen.state.members) == {runner.name for runner in runners}
            assert seen.positions["c"].kept.position == "c:50"
            assert seen.watermark is not None
            assert seen.state.seq > 0
            assert not seen.alarms
        # All have left in order, and it can be seen of whom nobody lives.
        left = await look("orders", told.meta)
        assert not left.state.joined
        assert left.state.partitions["c"].phase == "ready"
        script.held = False
        async with member(told) as runner:
            await eventually(lambda: bool(runner.state.sown) and not runner.state.partitions)
        assert (await look("orders", told.meta)).watermark is None
        assert server.totals(told.queue)["produced"] == 100
    assert list(await captures(told.meta)) == ["orders"]


def install(folder: Path, package: str, *entries: str) -> None:
    """A package, as an installer leaves it, with those entry points."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(["[sluiceway.streams]", *entries, ""]))


@driven
async def test_a_stream_of_ones_own_is_an_entry_point_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(SluicewayError, match=r"'ours' is not a kind of stream; expected one of kinesis, .* entry point sluiceway.streams"):
        config(tmp_path, stream="ours")
    install(tmp_path / "site", "theirs", f"ours = {__name__}:from_options", "broken = nowhere:from_options", "postgres = nowhere:at_all")
    script = SCRIPTS["s"] = Script([Part("a", (), 30, 1)])
    with running(tmp_path / "data") as server:
        told = config(tmp_path, stream="ours", url=server.url, queue=server.queue())
        async with member(told) as runner:
            await eventually(lambda: bool(runner.state.sown) and not runner.state.partitions)
        assert server.totals(told.queue)["produced"] == script.parts["a"].records
    with pytest.raises(SluicewayError, match=r"broken of the package theirs cannot be loaded from nowhere:from_options: No module"):
        open_stream("broken", "orders", {})
    with pytest.raises(SluicewayError, match=r"'nonsense' is not a kind of stream; .*broken, ours"):
        open_stream("nonsense", "orders", {})
    # What is shipped is not replaced by a package that says it has it.
    with pytest.raises(SluicewayError, match="dsn_env"):
        open_stream("postgres", "orders", {"publications": "p"})
    install(tmp_path / "site", "others", "ours = elsewhere:from_options")
    with pytest.raises(SluicewayError, match="several packages provide the stream kind ours: others, theirs"):
        open_stream("ours", "orders", {"script": "s"})


@driven
async def test_a_handler_of_ones_own_needs_no_queue(tmp_path: Path) -> None:
    SCRIPTS["s"] = Script([Part("a", (), 3, 1)])
    read: list[bytes] = []

    def reads(stream: ChangeStream, positions: PositionStore) -> Handler:
        async def handle(claim: Claim) -> Any:
            batch = await stream.read(claim.token, claim.position)
            await positions.commit(claim.opening, type(claim.kept)(position=batch.upto))
            read.extend(batch.records.column("payload").to_pylist())
            return batch.end

        return handle

    stop = asyncio.Event()
    runners: list[TaskRunner] = []
    task = asyncio.create_task(run_member(config(tmp_path), stop=stop, handler=reads, watch=runners.append))
    await eventually(lambda: bool(runners) and bool(runners[0].state.sown) and not runners[0].state.partitions)
    stop.set()
    await task
    assert read == [b"a/0", b"a/1", b"a/2"]


@driven
async def test_another_stream_or_log_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SCRIPTS["s"] = Script()
    with running(tmp_path / "data") as server:
        target = {"url": server.url, "queue": server.queue()}
        async with member(config(tmp_path, **target)):
            pass
        monkeypatch.setitem(STREAMS, "other", __name__)
        with pytest.raises(SluicewayError, match="was started with in_this_process, not other"):
            await run_member(config(tmp_path, stream="other", **target), stop=asyncio.Event())
        with pytest.raises(SluicewayError, match="was started with the log meta, not kafka:"):
            await run_member(config(tmp_path, log="kafka:127.0.0.1:1", **target), stop=asyncio.Event())


def agreed(begun: Begun | None, **fields: Any) -> Begun:
    given = {"name": "o", "meta": "sqlite:x", "stream": "kinesis", "options": {"stream": "a"}, "url": "http://h:1", "queue": "q"}
    return capture_begun.agreed(begun, CaptureConfig(**(given | fields)))


@pytest.mark.parametrize(
    ("before", "fields", "field"),
    [
        ({}, {"queue": "other"}, "queue"),
        # A micro-batch query beside a resident one.
        ({}, {"queue": "", "url": ""}, "queue"),
        ({"queue": "", "url": ""}, {}, "queue"),
        ({}, {"options": {"Stream": "b"}}, "stream"),
        ({"options": {"stream": "a", "region": "eu-west-1"}}, {"options": {"stream": "a", "region": "eu-west-2"}}, "region"),
        (
            {"stream": "queue", "options": {"url": "http://one:1", "queue": "s"}},
            {"stream": "queue", "options": {"url": "http://two:1", "queue": "s"}},
            "url",
        ),
        ({"log": "kafka:one:9092"}, {"log": "kafka:two:9092"}, "log"),
        ({"log": "kafka:one:9092"}, {}, "log"),
    ],
)
def test_one_name_has_one_stream_one_target_and_one_log(before: dict[str, Any], fields: dict[str, Any], field: str) -> None:
    begun = agreed(None, **before)
    assert agreed(begun, **before) == begun
    with pytest.raises(SluicewayError, match=r"capture o was started with .*; use another name") as refused:
        agreed(begun, **fields)
    assert refused.value.field == field


def test_what_may_change_of_a_capture() -> None:
    begun = agreed(None, log="kafka:one:9092,two:9092")
    # Servers come and go, one at a time; what was not said is not another one; and so is what an older version did not note.
    moved = agreed(begun, log="kafka:two:9092,three:9092", options={"stream": "a", "region": "eu-west-1"}, limit=7)
    assert moved == Begun(stream="kinesis", log="kafka:two:9092,three:9092", queue="q", identity={"stream": "a", "region": "eu-west-1"})
    assert agreed(moved, log="kafka:three:9092").identity == moved.identity
    assert agreed(Begun(stream="kinesis", log="meta", queue="q")).identity == {"stream": "a"}
    one = {"stream": "postgres", "options": {"publications": "one"}}
    both = {"stream": "postgres", "options": {"publications": "one,two"}}
    assert agreed(agreed(None, **one), **both) == agreed(None, **one)


@driven
async def test_a_meta_store_that_is_away_at_the_beginning_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SCRIPTS["s"] = Script([Part("a", (), 3, 1)])
    monkeypatch.setattr(capture_member, "_AGAIN", 0.01)
    read, away = SqliteMetaStore.read, [True, True, True]

    async def refuse(store: SqliteMetaStore, *given: Any, **more: Any) -> Any:
        # What the server reads is there.
        if away and given == (["captures/orders"],):
            away.pop()
            raise StoreUnavailableError("it is away")
        return await read(store, *given, **more)

    monkeypatch.setattr(SqliteMetaStore, "read", refuse)
    with running(tmp_path / "data") as server:
        told = config(tmp_path, url=server.url, queue=server.queue())
        async with member(told):
            await eventually(lambda: server.totals(told.queue)["produced"] == 3)
    # It ends when it is asked to, and not without a word if the store stays away.
    away[:] = [True] * 10_000
    stop = asyncio.Event()
    stop.set()
    await run_member(told, stop=stop)
    monkeypatch.setattr(capture_member, "BEGIN_FOR", 50)
    with pytest.raises(SluicewayError, match="it is away"):
        await run_member(told, stop=asyncio.Event())


@driven
async def test_a_capture_is_forgotten_when_nobody_is_at_work_and_can_be_begun_again(tmp_path: Path) -> None:
    SCRIPTS["s"], SCRIPTS["other"] = (Script([Part("a", (), 3, 1)]) for _ in range(2))
    with running(tmp_path / "data") as server:
        told = config(tmp_path, url=server.url, queue=server.queue())
        async with member(told) as runner:
            await eventually(lambda: bool(runner.state.sown) and not runner.state.partitions)
            with pytest.raises(SluicewayError, match=f"members of orders are running, or did not leave: {runner.name}; stop them first"):
                await forget("orders", told.meta)
        other = config(tmp_path, name="orders2", options={"script": "other"}, url=server.url, queue=server.queue())
        async with member(other) as runner:
            await eventually(lambda: bool(runner.state.sown) and not runner.state.partitions)
        keys = await _keys(told.meta)
        forgotten = await forget("orders", told.meta)
        left = await _keys(told.meta)
        assert forgotten.keys == len(keys) - len(left) > 4
        assert left
        assert all("orders2" in key for key in left)
        assert forgotten.left == (
            f"the queue {told.queue} remembers the batches of orders for 30 days: until then, use another capture name for that queue",
        )
        with pytest.raises(SluicewayError, match="there is no capture orders"):
            await forget("orders", told.meta)
        # It begins with the first record again, if the stream still has it.
        SCRIPTS["s"] = Script([Part("a", (), 3, 1)])
        again = config(tmp_path, url=server.url, queue=server.queue())
        async with member(again):
            await eventually(lambda: server.totals(again.queue)["produced"] == 3)


async def _keys(meta: str) -> set[str]:
    store = open_meta(meta)
    keys = set((await store.read(prefixes=["captures/", "tasks/", "group/", "rounds/"])).entries)
    await store.close()
    return keys


@driven
async def test_who_died_keeps_nobody_from_forgetting(tmp_path: Path) -> None:
    SCRIPTS["s"] = Script([Part("a", (), 3, 1)])
    store = open_meta(told := f"sqlite:{tmp_path / 'meta.db'}")
    record = MemberRecord(beat=7, lease_timeout=2_000, address="task-0")
    resource = Resource(items=("leader",), parameters=Parameters(beat_interval=50, lease_timeout=100, member_timeout=150))
    keys = Keys("tasks.gone")
    puts = {"captures/gone": Begun(stream="postgres", log="meta"), keys.resource: resource, keys.member("m"): record}
    await store.commit(puts={key: msgspec.json.encode(each) for key, each in puts.items()})
    await open_positions("gone", store).open("shop", 3)
    await store.close()
    forgotten = await forget("gone", told)
    assert forgotten.keys == 4
    assert "SELECT pg_drop_replication_slot('sluiceway_gone_shop');" in forgotten.left[0]
    assert await _keys(told) == set()


@driven
async def test_by_a_log_in_kafka_nobody_is_forgotten_who_may_live(tmp_path: Path) -> None:
    store = open_meta(told := f"sqlite:{tmp_path / 'meta.db'}")
    with closed_port() as port:
        await store.commit(puts={"captures/far": msgspec.json.encode(Begun(stream="kinesis", log=f"kafka:127.0.0.1:{port}"))})
        await store.close()
        with pytest.raises(SluicewayError) as refused:
            await forget("far", told)
        assert refused.value.code == "unavailable"
        assert "topics of Kafka: far_connector_sync" in (await forget("far", told, gone=True)).left[0]


@driven
async def test_alarms_of_members_can_be_seen(tmp_path: Path) -> None:
    SCRIPTS["s"] = Script([Part("a", (), 3, 1)])
    with running(tmp_path / "data") as server:
        told = config(tmp_path, url=server.url, queue="not-there")
        async with member(told) as runner:
            seen = await look("orders", told.meta)
            while not seen.alarms:
                seen = await look("orders", told.meta)
            assert list(seen.alarms) == [runner.name]
            assert "not-there" in seen.alarms[runner.name]["a"]
        assert not (await look("orders", told.meta)).alarms


@driven
async def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    SCRIPTS["s"] = Script()
    with pytest.raises(SluicewayError, match="queue: required"):
        await run_member(config(tmp_path), stop=asyncio.Event())
    assert await captures(config(tmp_path).meta) == {}
    assert await look("orders", config(tmp_path).meta) == ("orders", None, State(), {}, None, {}, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "no spaces"),
        ("meta", ""),
        ("meta", "memory:"),
        ("stream", "rabbit"),
        ("log", "kafka:"),
        ("log", "paper"),
        ("queue", "alone"),
        ("url", "http://127.0.0.1:1"),
        ("api_key", "slw_the_key_itself"),
        ("preset", "random"),
        ("limit", 0),
        ("limit", 100_001),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(SluicewayError) as refused:
        config(tmp_path, **{field: value})
    assert refused.value.code == "invalid_request"
    # Of two that go together the one is named that is missing.
    assert refused.value.field == {"queue": "url", "url": "queue"}.get(field, field)


def test_a_config_can_be_sent_anywhere_and_shown(tmp_path: Path) -> None:
    told = config(tmp_path, meta="postgresql://user:secret@host/db")
    assert "secret" not in repr(told)
    assert pickle.loads(pickle.dumps(told)) == told


@driven
async def test_looking_makes_nothing(tmp_path: Path) -> None:
    for looking in (look("orders", f"sqlite:{tmp_path / 'none.db'}"), captures(f"sqlite:{tmp_path / 'none.db'}")):
        with pytest.raises(SluicewayError, match="there is no file"):
            await looking
    assert not (tmp_path / "none.db").exists()


@driven
async def test_the_meta_store_may_be_named_by_where_its_url_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKS_META", f"sqlite:{tmp_path / 'meta.db'}")
    store = open_meta("env:TASKS_META")
    await store.commit(puts={"a": b"1"})
    await store.close()
    assert (tmp_path / "meta.db").exists()
    monkeypatch.setenv("TASKS_META", "memory:")
    with pytest.raises(SluicewayError, match="a memory: store belongs to one process"):
        open_meta("env:TASKS_META")
    with pytest.raises(SluicewayError, match="'NOT_THERE' is not set"):
        open_meta("env:NOT_THERE")


def test_a_stream_whose_extra_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STREAMS, "kinesis", "a_module_that_is_not_there")
    with pytest.raises(SluicewayError, match=r"kinesis needs a_module_that_is_not_there; .*pip install 'sluiceway\[kinesis\]'"):
        open_stream("kinesis", "orders", {})
    with pytest.raises(SluicewayError, match="expected one of kinesis, postgres, queue"):
        open_stream("rabbit", "orders", {})
