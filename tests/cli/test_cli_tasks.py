"""`sluiceway tasks`: what a log and a position store say is shown, whoever still lives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.capture import Begun, Look
from sluiceway.capture.alarms import AlarmBoard
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.capture.presenter import group_of
from sluiceway.cli.common import EXIT_REFUSED, EXIT_UNAVAILABLE
from sluiceway.contract.capture_answers import TaskGroup, TaskPartition
from sluiceway.core.group.task_fold import fold
from sluiceway.core.group.task_state import Assign, Finish, Join, Move, Reach, Record, Seeds, Snapshot, State, Supersede, Term, encode
from sluiceway.model.task_records import AnnouncedPartition, PositionRecord
from sluiceway.ports.position_store import Stored
from sluiceway.server_cli.task_tables import partitions
from tests.cli.cli_shell import Shell
from tests.server.server_process import closed_port

LONG = "49590338271490256608559692538361571095921575989136588898"
MERGED = AnnouncedPartition("shard-5", ("shard-1", "shard-2"))
RECORDS: list[Record] = [
    *(Join("one"), Join("two"), Term(1, "one", ("one", "two"), 7)),
    Seeds(1, "", "all", tuple(AnnouncedPartition(f"shard-{number}", since=1_700_000_000_000) for number in range(3))),
    Assign(1, {"shard-0": "one", "shard-1": "two", "shard-2": "two"}),
    Supersede(1, "shard-0", (AnnouncedPartition("shard-3", ("shard-0",)), AnnouncedPartition("shard-4", ("shard-0",)))),
    Finish("shard-1", 5, (MERGED,), 1_700_000_100_000),
    Move(1, {"shard-2": "one"}),
    Join("three"),
]
KEPT = {
    "shard-0": PositionRecord(
        position=LONG, plan="49590338271490256608559692538361571095921575989136588999", batch=12, records=345, behind=61_000
    ),
    "shard-2": PositionRecord(position="7", batch=1, records=5, at=1_700_000_050_000),
}


async def write_capture(path: Path, name: str, records: list[Record], kept: dict[str, PositionRecord], log: str = "meta") -> None:
    store = SqliteMetaStore(path)
    shared, positions = MetaSyncLog(store, name), MetaPositions(store, name)
    await store.commit(puts={f"captures/{name}": msgspec.json.encode(Begun(stream="kinesis", log=log, queue="orders"))})
    if records:
        await shared.append([encode(record) for record in records])
    for token, each in kept.items():
        opening, _ = await positions.open(token, 5)
        await positions.commit(opening, each)
    await shared.close()
    await store.close()


@pytest.fixture
def meta(tmp_path: Path) -> str:
    asyncio.run(write_capture(tmp_path / "meta.sqlite", "feed", RECORDS, KEPT))
    return f"sqlite:{tmp_path / 'meta.sqlite'}"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    return Shell("", monkeypatch, capsysbinary)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_all_of_a_capture_is_shown(shell: Shell, meta: str) -> None:
    text = shell.says("tasks", "show", "feed", "--meta", meta)
    assert "term         1, led by one" in text
    assert "partitions   3 created, 2 owned, 1 finished" in text
    assert "delivered    350 records" in text
    assert "behind       1m1s at most" in text
    assert "watermark    2023-11-14 22:13:20 UTC" in text
    assert "last commit  " in text
    table = rows(text)
    assert ["one", "1", "leads"] in table
    assert ["two", "1"] in table
    assert ["three", "0", "joining,", "not", "yet", "in", "the", "term"] in table
    assert ["shard-0", "owned", "one", "5", f"{LONG[:6]}…{LONG[-17:]}", "12", "345", "1m1s"] in table
    assert ["shard-2", "owned", "two", "5", "moving", "to", "one", "7", "1", "5"] in table
    assert ["shard-5", "created", "waiting", "for", "shard-2"] in table
    assert "stuck" not in text


def test_programs_get_all_of_it(shell: Shell, meta: str) -> None:
    (found,) = shell.json("tasks", "show", "feed", "--meta", meta)
    assert (found["name"], found["stream"], found["queue"], found["term"], found["leader"]) == ("feed", "kinesis", "orders", 1, "one")
    assert found["state_of"] == {"created": 3, "ready": 0, "owned": 2, "finished": 1}
    assert found["watermark"] == "2023-11-14T22:13:20Z"
    assert found["members"][0] == {"member": "one", "leads": True, "in_term": True, "partitions": 1}
    first, *_ = found["partitions"]
    assert (first["position"], first["planned"], first["batch"], first["grant"]) == (LONG, KEPT["shard-0"].plan, 12, 5)
    assert found["partitions"][5]["waits_for"] == ["shard-2"]


async def write_alarms(path: Path) -> None:
    store = SqliteMetaStore(path)
    board = AlarmBoard(store, "feed")
    await board.write("one", {"shard-0": "the key has no scope\nfor this", "": "wal_level is not logical"})
    # It has died, and is no member any more.
    await board.write("zero", {"shard-1": "old"})
    await store.close()


def test_alarms_of_members_are_shown(shell: Shell, meta: str) -> None:
    asyncio.run(write_alarms(Path(meta.removeprefix("sqlite:"))))
    lines = shell.says("tasks", "show", "feed", "--meta", meta).splitlines()
    assert "Alarm: one: partition shard-0 is stalled: the key has no scope\\nfor this" in lines
    assert "Alarm: one: the capture is stalled: wal_level is not logical" in lines
    (found,) = shell.json("tasks", "show", "feed", "--meta", meta)
    assert found["alarms"] == [
        {"member": "one", "partition": None, "why": "wal_level is not logical"},
        {"member": "one", "partition": "shard-0", "why": "the key has no scope\nfor this"},
    ]
    assert shell.says("tasks", "list", "--meta", meta).splitlines()[1].endswith("2 alarms")


def test_what_stands_still_is_ever_further_behind() -> None:
    """By as much as it was, and as long as nothing was committed; but not for what a partition at rest may leave out."""
    state = State()
    for number, record in enumerate(RECORDS, 1):
        state = fold(state, number, record)
    positions = {"shard-0": Stored(5, PositionRecord(behind=400), 1_000_000), "shard-1": Stored(5, PositionRecord(behind=10**9), 1_000_000)}
    seen = Look("feed", None, state, positions, None, {}, {})
    fresh, dead = group_of(seen, 1_030_000), group_of(seen, 1_600_000)
    # What has ended is behind nothing.
    assert [(each.behind, [part.behind for part in each.partitions[:2]]) for each in (fresh, dead)] == [
        ("400ms", ["400ms", None]),
        ("10m400ms", ["10m400ms", None]),
    ]


def test_a_partition_at_a_barrier_says_what_it_waits_for(shell: Shell, tmp_path: Path) -> None:
    handoff = "shard-2>shard-0@9"
    asyncio.run(write_capture(tmp_path / "meta.sqlite", "feed", [*RECORDS, Reach("shard-0", 5, 9, (), (handoff,))], KEPT))
    meta = f"sqlite:{tmp_path / 'meta.sqlite'}"
    (found,) = shell.json("tasks", "show", "feed", "--meta", meta)
    assert found["partitions"][0]["waits_for"] == [handoff]
    assert found["stuck"] == {}
    assert f"waiting for {handoff}" in " ".join(shell.says("tasks", "show", "feed", "--meta", meta).split())


def test_a_capture_is_forgotten_only_if_that_is_meant(shell: Shell, meta: str) -> None:
    code, _, err = shell.ends("tasks", "forget", "feed", "--meta", meta)
    assert (code, "--yes" in err) == (2, True)
    assert "feed" in shell.says("tasks", "list", "--meta", meta)
    assert shell.says("tasks", "forget", "feed", "--meta", meta, "--yes").startswith("Removed feed: ")
    code, _, err = shell.ends("tasks", "forget", "feed", "--meta", meta, "--yes")
    assert (code, "there is no capture feed" in err) == (EXIT_REFUSED, True)


def test_a_tree_has_children_below_the_first_of_their_parents(shell: Shell, meta: str) -> None:
    text = shell.says("tasks", "show", "feed", "--tree", "--meta", meta)
    lines = [line for line in text.splitlines() if "shard-" in line]
    starts = ["shard-0", "├─ shard-3", "└─ shard-4", "shard-1", "└─ shard-5", "shard-2"]
    assert all(line.startswith(f"{start} ") for line, start in zip(lines, starts, strict=True))


def _partition(token: str, *parents: str) -> TaskPartition:
    return TaskPartition(
        partition=token,
        state="created",
        parents=list(parents),
        waits_for=list(parents),
        owner=None,
        grant=None,
        moving_to=None,
        position=None,
        planned=None,
        batch=0,
        records=0,
        at=None,
        behind=None,
        written_at=None,
    )


def test_a_tree_has_each_partition_once_however_long_it_is() -> None:
    names = [f"p{number:05}" for number in range(5_000)]
    line = [_partition(name, *([before] if before else [])) for before, name in zip([None, *names], names, strict=False)]
    ring = [_partition("x", "y"), _partition("y", "x")]
    group = TaskGroup(
        name="n",
        stream=None,
        log=None,
        queue=None,
        term=0,
        leader=None,
        members=[],
        state_of={},
        records=0,
        behind=None,
        watermark=None,
        written_at=None,
        stuck={},
        alarms=[],
        sown=True,
        partitions=[*line, *ring],
    )
    shown = [str(row[0]).lstrip("└─ ") for row in partitions(group, as_tree=True).rows]
    assert shown == [*names, "x", "y"]


def test_what_is_stuck_is_said_with_what_it_waits_for(shell: Shell, tmp_path: Path) -> None:
    records = [
        *RECORDS[:3],
        Seeds(1, "", "all", (AnnouncedPartition("a"),)),
        Assign(1, {"a": "one"}),
        Finish("a", 5, (AnnouncedPartition("c", ("a", "b\n")),), 9),
    ]
    asyncio.run(write_capture(tmp_path / "m", "held", records, {}))
    text = shell.says("tasks", "show", "held", "--meta", f"sqlite:{tmp_path / 'm'}")
    assert "Stuck: c waits for b\\n (not announced by the stream)" in text
    (found,) = shell.json("tasks", "show", "held", "--meta", f"sqlite:{tmp_path / 'm'}")
    assert found["stuck"] == {"c": ["b\n"]}


def test_a_trimmed_log_says_the_same(shell: Shell, tmp_path: Path) -> None:
    state = State()
    for number, record in enumerate(RECORDS, 1):
        state = fold(state, number, record)

    async def write() -> None:
        await write_capture(tmp_path / "m", "feed", [*RECORDS, Snapshot(state)], KEPT)
        store = SqliteMetaStore(tmp_path / "m")
        log = MetaSyncLog(store, "feed")
        await log.trim(len(RECORDS))
        await log.close()
        await store.close()

    asyncio.run(write())
    (found,) = shell.json("tasks", "show", "feed", "--meta", f"sqlite:{tmp_path / 'm'}")
    assert found["state_of"] == {"created": 3, "ready": 0, "owned": 2, "finished": 1}


def test_a_list_has_a_line_for_each(shell: Shell, meta: str) -> None:
    path = Path(meta.removeprefix("sqlite:"))
    asyncio.run(write_capture(path, "begun", [], {}))
    with closed_port() as port:
        asyncio.run(write_capture(path, "elsewhere", [], {}, log=f"kafka:127.0.0.1:{port}"))
        text = shell.says("tasks", "list", "--meta", meta)
        found = {each["name"]: each for each in shell.json("tasks", "list", "--meta", meta)}
        code, _, err = shell.ends("tasks", "show", "elsewhere", "--meta", meta)
    assert code == EXIT_UNAVAILABLE
    assert len(err.splitlines()) == 1
    table = rows(text)
    assert table[0][:3] == ["capture", "stream", "term"]
    assert [row[:6] for row in table[1:] if row[0] != "elsewhere"] == [
        ["begun", "kinesis", "0", "-", "0", "0"],
        ["feed", "kinesis", "1", "one", "2", "6"],
    ]
    assert "log unreadable" in text
    assert found["elsewhere"]["problem"]
    assert found["feed"]["records"] == 350
    assert "partitions" not in found["feed"]


def test_the_meta_store_may_be_that_of_a_server(shell: Shell, meta: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sluiceway.toml"
    file.write_text(f'[cluster]\nmeta = "{meta}"\n')
    assert shell.says("tasks", "list", "--config", str(file)) == shell.says("tasks", "list", "--meta", meta)
    monkeypatch.setenv("SLUICEWAY_CLUSTER__META", meta)
    assert "feed" in shell.says("tasks", "list")
    monkeypatch.setenv("WHERE", meta)
    assert "feed" in shell.says("tasks", "list", "--meta", "env:WHERE")


def test_an_unknown_capture_names_those_that_there_are(shell: Shell, meta: str) -> None:
    code, out, err = shell.ends("tasks", "show", "fed", "--meta", meta)
    assert (code, out) == (EXIT_REFUSED, "")
    assert "there is no capture 'fed' in this meta store; known captures: feed" in err
    code, _, err = shell.ends("tasks", "show", "fed", "--meta", meta, "--json")
    assert (code, json.loads(err)["field"]) == (EXIT_REFUSED, "name")


def test_nothing_is_made_by_looking(shell: Shell, tmp_path: Path) -> None:
    for call in (("list",), ("show", "feed")):
        code, _, err = shell.ends("tasks", *call, "--meta", f"sqlite:{tmp_path / 'none'}")
        assert code == EXIT_REFUSED
        assert "there is no file" in err
    assert not list(tmp_path.iterdir())
    assert shell.ends("tasks", "list")[0] == 2


def test_a_store_that_cannot_be_reached_is_unavailable(shell: Shell) -> None:
    with closed_port() as port:
        for url in (f"etcd://127.0.0.1:{port}", f"postgresql://someone:secret@127.0.0.1:{port}/db"):
            code, _, err = shell.ends("tasks", "list", "--meta", url)
            assert code == EXIT_UNAVAILABLE, err
            assert "secret" not in err
