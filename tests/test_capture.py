"""The public face: what a capture is told, what is refused, and what can be seen of it, with members in this process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from node_rig import eventually
from server_running import running
from sluiceway import capture
from sluiceway.capture import CaptureConfig, TaskRunner, captures, look, open_meta, open_stream, run_member
from sluiceway.core.assignment.tasks_state import State
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import ChangeStream
from sluiceway.ports.position_store import PositionStore
from sluiceway.testing.drive import driven
from tasks_rig import Part, Script, ScriptedStream

KIND = "in_this_process"
SCRIPTS: dict[str, Script] = {}


def from_options(name: str, options: dict[str, str]) -> ChangeStream:
    """All members of this process read the same script."""
    return ScriptedStream(SCRIPTS[options["script"]])


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(capture.STREAMS, KIND, __name__)
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
            assert seen.end == seen.state.seq > 0
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


@driven
async def test_a_handler_of_ones_own_needs_no_queue(tmp_path: Path) -> None:
    SCRIPTS["s"] = Script([Part("a", (), 3, 1)])
    read: list[bytes] = []

    def reads(stream: ChangeStream, positions: PositionStore) -> capture.Handler:
        async def handle(claim: capture.Claim) -> Any:
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
        monkeypatch.setitem(capture.STREAMS, "other", __name__)
        with pytest.raises(SluicewayError, match="was begun with in_this_process, not other"):
            await run_member(config(tmp_path, stream="other", **target), stop=asyncio.Event())
        with pytest.raises(SluicewayError, match="was begun with the log meta, not kafka:"):
            await run_member(config(tmp_path, log="kafka:127.0.0.1:1", **target), stop=asyncio.Event())


@driven
async def test_what_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    SCRIPTS["s"] = Script()
    with pytest.raises(SluicewayError, match="queue: required"):
        await run_member(config(tmp_path), stop=asyncio.Event())
    assert await captures(config(tmp_path).meta) == {}
    assert await look("orders", config(tmp_path).meta) == ("orders", None, State(), {}, None, {}, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "no spaces"),
        ("meta", ""),
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


def test_a_config_can_be_sent_anywhere(tmp_path: Path) -> None:
    told = config(tmp_path)
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
    with pytest.raises(SluicewayError, match="'NOT_THERE' is not set"):
        open_meta("env:NOT_THERE")


def test_a_stream_whose_extra_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.STREAMS, "kinesis", "a_module_that_is_not_there")
    with pytest.raises(SluicewayError, match=r"pip install 'sluiceway\[kinesis\]'"):
        open_stream("kinesis", "orders", {})
    with pytest.raises(SluicewayError, match="expected one of kinesis, postgres, queue"):
        open_stream("rabbit", "orders", {})
