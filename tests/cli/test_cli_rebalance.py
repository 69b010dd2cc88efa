"""`sluiceway rebalance` and `partition pause`, against a scripted service: what is shown, what is asked, how it ends."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from rich.console import Console

from sluiceway.cli import rebalance_progress
from sluiceway.contract import rebalances as answers
from sluiceway.contract.queue_stats import LogicalQueueStats, PartitionStats
from sluiceway.core.group.group_records import Pin
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.instances import ClusterInfo, PinInfo
from sluiceway.model.queue import PartitionRecord
from sluiceway.model.rebalance import LeftOut, Plan, Rebalance, RebalanceBatch
from tests.cli.cli_shell import Shell
from tests.server.fake_service import RECORD, FakeService, serving
from tests.server.test_server_rebalance import ENDED, OPEN, PLAN, PROGRESS

STATS = LogicalQueueStats(
    partitions=[
        PartitionStats(partition=0, total=1_000, ready=1_000),
        PartitionStats(partition=1, total=200, ready=200),
        PartitionStats(partition=2, state="unavailable"),
    ]
)
PLANNED = [("p-1", PLAN, RECORD), STATS]
NOTHING = Plan(keeps=(0, 1, 2))


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with serving(service) as url:
        yield service, url


@pytest.fixture
def service(shared: tuple[FakeService, str]) -> FakeService:
    service = shared[0]
    service.record, service.asked, service.script = RECORD, [], []
    return service


@pytest.fixture
def shell(shared: tuple[FakeService, str], monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", shared[1])
    return Shell("q", monkeypatch, capsysbinary)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# -- plan -------------------------------------------------------------------------------------------------------------


def test_a_plan_is_a_table_and_a_line_that_sums_it_up(service: FakeService, shell: Shell) -> None:
    service.script = [*PLANNED, *PLANNED]
    text = shell.says("rebalance", "plan", "q", "--partitions", "2")
    assert rows(text)[1:5] == [
        ["0", "default", "drain", "1,000"],
        ["1", "default", "drain", "200"],
        ["2", "default", "keep", "unknown"],
        ["3", "pg", "create", "0,", "1"],
    ]
    assert text.splitlines()[-1] == "q: from 3 partitions to 2 (1 on default, 1 on pg): keep 1, create 1, drain 2 with 1,200 items"
    assert service.asked == [("q", 2), "q"]
    (plan,) = shell.json("rebalance", "plan", "q")
    assert (plan["plan_id"], plan["plan"]["drains"], [each["items"] for each in plan["partitions"]]) == ("p-1", [0, 1], [1_000, 200, None])


def test_a_plan_says_what_is_special(service: FakeService, shell: Shell) -> None:
    in_order = msgspec.structs.replace(PLAN, in_order=True)
    draining = msgspec.structs.replace(RECORD, partitions=(*RECORD.partitions[:2], PartitionRecord(2, state="paused")))
    service.script = [("p", in_order, draining), STATS, ("p", NOTHING, RECORD), STATS]
    text = shell.says("rebalance", "plan", "q")
    assert "in order: the new partition serves nothing until the old one is gone" in text
    assert rows(text)[3] == ["2", "default", "keep", "unknown", "paused"]
    assert "q: no changes needed, 3 partitions already as requested" in shell.says("rebalance", "plan", "q")


def test_plans_of_several_queues(service: FakeService, shell: Shell) -> None:
    service.script = [*PLANNED]
    text = shell.says("rebalance", "plan", "--match", "q*")
    assert rows(text)[1] == ["q", "3", "to", "2", "1", "2", "1,200"]
    service.script = [SluicewayError("rebalance_open", "7-a is open")]
    assert "7-a is open" in shell.says("rebalance", "plan", "--all")
    service.script = [*PLANNED]
    assert [each["plan_id"] for each in shell.json("rebalance", "plan", "--all")] == ["p-1"]
    assert shell.ends("rebalance", "plan", "--match", "other-*") == (0, "", "No queue matches\n")


@pytest.mark.parametrize("which", [(), ("q", "--all"), ("q", "--match", "q"), ("--all", "--match", "q")])
def test_what_is_meant_must_be_said_once(service: FakeService, shell: Shell, which: tuple[str, ...]) -> None:
    code, _, err = shell.ends("rebalance", "plan", *which)
    assert code == 2
    assert "QUEUE, --match PATTERN and --all" in err
    assert service.asked == []


# -- start ------------------------------------------------------------------------------------------------------------


def test_start_asks_and_does_what_was_shown(service: FakeService, shell: Shell) -> None:
    service.script = [*PLANNED, OPEN]
    code, out, err = shell.ends(
        "rebalance", "start", "q", "--partitions", "2", "--drain", "copy", "--rate", "50/s", stdin=b"y\n", terminal=True
    )
    assert code == 0, err
    assert out == f"Started {OPEN.id}. Watch it: sluiceway rebalance watch {OPEN.id}\n"
    assert re.search(r"0 +default +drain +1,000", err)
    assert "Start this rebalance with a copy drain at 50/s?" in err
    assert service.asked[-1] == ("q", 2, "copy", 50, "p-1")
    service.script, service.asked = [*PLANNED], []
    code, out, err = shell.ends("rebalance", "start", "q", stdin=b"n\n", terminal=True)
    assert (code, out) == (0, "")
    assert "Nothing changed" in err
    assert service.asked == [("q", None), "q"]


def test_start_without_a_terminal_takes_yes(service: FakeService, shell: Shell) -> None:
    code, _, err = shell.ends("rebalance", "start", "q")
    assert code == 2
    assert "--yes" in err
    assert service.asked == []
    service.script = [OPEN, OPEN]
    assert shell.says("rebalance", "start", "q", "--yes").startswith(f"Started {OPEN.id}.")
    assert service.asked == [("q", None, "natural", None, None)]
    assert shell.json("rebalance", "start", "q", "--yes")[0]["id"] == OPEN.id


def test_a_rate_goes_with_copy_alone(service: FakeService, shell: Shell) -> None:
    code, _, err = shell.ends("rebalance", "start", "q", "--yes", "--rate", "50/s")
    assert code == 2
    assert "--drain copy" in err


def test_a_plan_with_nothing_to_do_asks_nothing(service: FakeService, shell: Shell) -> None:
    service.script = [("p", NOTHING, RECORD), STATS, SluicewayError("nothing_to_rebalance", "all is as it should be")]
    code, _, err = shell.ends("rebalance", "start", "q", stdin=b"", terminal=True)
    assert code == 3
    assert "Start this rebalance" not in err
    assert "partition_affinity" in err, "what to do next"


@pytest.mark.parametrize(
    ("code", "hint"),
    [("rebalance_open", "rebalance watch"), ("plan_changed", "rebalance plan"), ("not_cancellable", "wait until it ends")],
)
def test_a_refusal_says_what_to_do_next(service: FakeService, shell: Shell, code: str, hint: str) -> None:
    service.script = [SluicewayError(code, "no")]
    ended, _, err = shell.ends("rebalance", "start", "q", "--yes")
    assert ended == 3
    assert hint in err
    service.script = [SluicewayError(code, "no")]
    ended, _, err = shell.ends("rebalance", "start", "q", "--yes", "--json")
    assert (ended, json.loads(err)["code"]) == (3, code)


def test_several_queues_one_after_the_other(service: FakeService, shell: Shell) -> None:
    waiting = msgspec.structs.replace(OPEN, id="000000000000008-aaaa", queue_name="r", state="waiting")
    batch = RebalanceBatch("b", [OPEN, waiting], [LeftOut("s", "one is open")])
    service.script = [batch]
    text = shell.says("rebalance", "start", "--all", "--yes", "--partitions", "4")
    assert rows(text)[1:] == [["q", OPEN.id, "running"], ["r", waiting.id, "waiting"], ["s", "skipped:", "one", "is", "open"]]
    assert service.asked == [("*", 4, "natural", None)]
    service.script = [*PLANNED, batch]
    code, _, err = shell.ends("rebalance", "start", "--match", "q*", stdin=b"y\n", terminal=True)
    assert code == 0, err
    assert "one after the other?" in err
    service.script = [RebalanceBatch("b", [], [LeftOut("s", "one is open")])]
    assert shell.ends("rebalance", "start", "--all", "--yes")[2] == "Nothing started\n"
    done = msgspec.structs.replace(ENDED, state="done", problem="")
    service.script = [batch, done, ENDED]
    code, out, _ = shell.ends("rebalance", "start", "--all", "--yes", "--wait")
    assert code == 3, "one of them has failed"
    assert out.splitlines()[-2:] == ["q: done", "q: failed: the queue was deleted"]


# -- watch ------------------------------------------------------------------------------------------------------------


def ended(state: str) -> Rebalance:
    return msgspec.structs.replace(ENDED, state=state, problem="")


def test_watch_tells_each_change_once_and_ends_as_it_does(service: FakeService, shell: Shell) -> None:
    service.script = [OPEN, PROGRESS, OPEN, PROGRESS, OPEN, PROGRESS._replace(items_left=1, leased_left=0), ended("done")]
    code, out, err = shell.ends("rebalance", "watch", OPEN.id, "--interval", "1ms")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "q: running, step drain, 83 items left, 3 leased, 12/s, 7s to go",
        "q: running, step drain, 1 item left, 12/s, 7s to go",
        "q: done",
    ]
    for state in ("cancelled", "failed"):
        service.script = [ended(state)]
        assert shell.ends("rebalance", "watch", OPEN.id)[:2] == (3, f"q: {state}\n")


def test_watch_speaks_json_at_each_look(service: FakeService, shell: Shell) -> None:
    service.script = [OPEN, PROGRESS, OPEN, PROGRESS, ended("done")]
    looks = shell.json("rebalance", "watch", OPEN.id, "--interval", "1ms")
    assert [each["state"] for each in looks] == ["running", "running", "done"]
    assert looks[0]["progress"]["items_left"] == 83


def test_watch_finds_a_queue_s_rebalance(service: FakeService, shell: Shell) -> None:
    service.script = [[OPEN], ended("done")]
    assert shell.says("rebalance", "watch", "q") == "q: done\n"
    service.script = [[], [ENDED], ended("done")]
    assert shell.says("rebalance", "watch", "q") == "q: done\n"
    assert service.asked[-3:] == [("q", True), ("q", False), ENDED.id]
    service.script = [[], []]
    code, _, err = shell.ends("rebalance", "watch", "q")
    assert code == 3
    assert "rebalance list" in err


def test_watch_outlives_an_instance_that_does_not_answer(service: FakeService, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    down = SluicewayError("unavailable", "the meta store cannot be read")
    service.script = [down, OPEN, PROGRESS, down, ended("done")]
    code, out, err = shell.ends("rebalance", "watch", OPEN.id, "--interval", "1ms")
    assert (code, out.splitlines()[-1]) == (0, "q: done")
    assert err.splitlines() == ["No answer: the meta store cannot be read"] * 2
    monkeypatch.setattr(rebalance_progress, "PATIENCE", 0.0)
    service.script = [down]
    assert shell.ends("rebalance", "watch", OPEN.id)[0] == 4


def test_start_waits_if_it_is_told_to(service: FakeService, shell: Shell) -> None:
    service.script = [OPEN, OPEN, PROGRESS, ended("done")]
    out = shell.says("rebalance", "start", "q", "--yes", "--wait", "--interval", "1ms")
    assert out.splitlines()[0] == f"Started {OPEN.id}"
    assert out.splitlines()[-1] == "q: done"


def seen(found: answers.Rebalance, picture: rebalance_progress.Picture, note: str = "") -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture.drawn(found, note))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_picture_has_a_bar_for_each_partition_that_is_drained() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    plan = answers.Plan(drains=[0, 1, 2])
    left = answers.RebalanceProgress(
        items_left=150,
        partitions=[answers.DrainingPartition(partition=0, items_left=100), answers.DrainingPartition(partition=1, items_left=50)],
    )
    one = answers.Rebalance(
        id="7-a",
        queue_name="q",
        state="running",
        step="drain",
        requested_partitions=2,
        plan=plan,
        drain="natural",
        created_at=at,
        updated_at=at,
        drain_at=at,
        actor="a",
        steps=[answers.RebalanceStep(step="drain", at=at, instance="i-1", partition=2)],
        progress=left,
    )
    picture = rebalance_progress.Picture()
    assert re.search(r"partition 0 .*100 left", seen(one, picture))
    half = msgspec.structs.replace(left, partitions=[answers.DrainingPartition(partition=0, items_left=50)])
    text = seen(msgspec.structs.replace(one, progress=half, problem="\x1b[31mi-2 does not answer"), picture, "no answer")
    assert re.search(r"partition 0 .*50 left", text)
    assert re.search(r"partition 2 .*removed", text)
    assert "PROBLEM: \\x1b[31mi-2 does not answer" in text
    assert "NOT UP TO DATE: no answer" in text
    # Without colours only what is done is drawn: half of what was seen first, none, all.
    bars = {line[: line.index("━")].strip(): line.count("━") for line in text.splitlines() if "━" in line}
    assert bars == {"partition 0": 20, "partition 2": 40}
    many = msgspec.structs.replace(one, plan=answers.Plan(drains=list(range(50))))
    text = seen(many, rebalance_progress.Picture())
    assert text.count("partition ") == 20
    assert "and 30 more, 1 of 50 removed" in text


# -- list, show, cancel, partitions -----------------------------------------------------------------------------------


def test_list(service: FakeService, shell: Shell) -> None:
    service.script = [[OPEN, ENDED], [], [OPEN]]
    text = shell.says("rebalance", "list")
    assert rows(text)[1][:7] == [OPEN.id, "q", "running", "drain", "2", "1", "2"]
    assert rows(text)[2][:4] == [ENDED.id, "q", "failed", "-"]
    assert "the queue was deleted" in text
    assert shell.ends("rebalance", "list", "--queue", "q", "--open") == (0, "", "No rebalances\n")
    assert [each["id"] for each in shell.json("rebalance", "list", "-n", "1")] == [OPEN.id]
    assert service.asked == [(None, False), ("q", True), (None, False)]


def test_show(service: FakeService, shell: Shell) -> None:
    service.script = [OPEN, PROGRESS, ENDED]
    text = " ".join(shell.says("rebalance", "show", OPEN.id).split())
    for part in ("state running", "step drain", "creates 3 on pg", "drains 0, 1", "keeps 2", "drain copy, up to 50/s", "to drain 90"):
        assert part in text, part
    for part in (
        "left 83, of which 3 leased, 4 scheduled",
        "time left 7s",
        "requested by root/key r-1",
        "drain done",
        "i-1, partition 1",
    ):
        assert part in text, part
    text = " ".join(shell.says("rebalance", "show", ENDED.id).split())
    assert "problem the queue was deleted retries 4" in text
    assert "step drain" not in text
    service.script = [ENDED]
    assert shell.json("rebalance", "show", ENDED.id)[0]["retries"] == 4


def test_cancel(service: FakeService, shell: Shell) -> None:
    cancelling = msgspec.structs.replace(OPEN, state="cancelling")
    service.script = [[OPEN], OPEN, cancelling]
    assert shell.says("rebalance", "cancel", "q") == f"Rebalance {OPEN.id}: cancelling\n"
    assert service.asked[-1] == ("cancel", OPEN.id)
    service.script = [OPEN, cancelling, cancelling, PROGRESS, ended("cancelled")]
    code, out, _ = shell.ends("rebalance", "cancel", OPEN.id, "--wait")
    assert (code, out.splitlines()[-1]) == (0, "q: cancelled")
    service.script = [OPEN, cancelling, ended("failed")]
    assert shell.ends("rebalance", "cancel", OPEN.id, "--wait")[0] == 3
    service.script = [OPEN, cancelling]
    assert shell.json("rebalance", "cancel", OPEN.id)[0]["state"] == "cancelling"


def test_partitions_are_paused_and_go_on(service: FakeService, shell: Shell) -> None:
    service.script = [RECORD, RECORD]
    assert shell.says("partition", "pause", "q", "1") == "Paused partition 1 of q\n"
    assert shell.says("partition", "resume", "q", "1") == "Resumed partition 1 of q\n"
    assert service.asked == [("q", 1, True), ("q", 1, False)]
    service.script = [SluicewayError("rebalance_open", "partition 1 is being drained")]
    assert shell.ends("partition", "pause", "q", "1")[0] == 3


def test_partitions_are_pinned_and_unpinned(service: FakeService, shell: Shell) -> None:
    service.script = [None, None, None]
    assert shell.says("partition", "pin", "q", "1", "--zone", "east") == "Pinned partition 1 of q to zone east\n"
    (told,) = shell.json("partition", "pin", "q", "1", "--instance", "queue-1")
    assert told == {"queue_name": "q", "partition": 1, "instance": "queue-1", "zone": None}
    assert shell.says("partition", "unpin", "q", "1") == "Unpinned partition 1 of q\n"
    assert service.asked == [("q", 1, Pin(zone="east")), ("q", 1, Pin(instance="queue-1")), ("q", 1, None)]
    service.script = [SluicewayError("invalid_request", "zone: there is no instance of zone west in the cluster", "zone")]
    assert shell.ends("partition", "pin", "q", "1", "--zone", "west")[0] == 3
    for wrong in ((), ("--zone", "east", "--instance", "queue-1")):
        assert shell.ends("partition", "pin", "q", "1", *wrong)[0] == 2


def test_pinned_partitions_are_listed(service: FakeService, shell: Shell) -> None:
    pins = [PinInfo("p", 3, "", "east"), PinInfo("q", 1, "queue-1", "")]
    alone = ClusterInfo([], "rounds", 2, 11, 11, pins=pins)
    service.instances.script = [alone] * 3
    assert rows(shell.says("partition", "pins"))[-2:] == [["p", "3", "zone", "east"], ["q", "1", "instance", "queue-1"]]
    assert shell.json("partition", "pins", "q") == [{"queue_name": "q", "partition": 1, "instance": "queue-1", "zone": None}]
    assert shell.ends("partition", "pins", "other")[:2] == (0, "")


def test_a_queue_shows_its_rebalance(service: FakeService, shell: Shell) -> None:
    new = PartitionRecord(3, "pg", parents=(0, 1))
    service.record = msgspec.structs.replace(RECORD, partitions=(PartitionRecord(0, state="draining"), new), rebalance=OPEN.id)
    service.script = [OPEN, PROGRESS]
    text = " ".join(shell.says("queue", "info", "q").split())
    assert f"rebalance {OPEN.id}: running, step drain, 83 items left to drain" in text
    assert "partition 0 draining, on default partition 3 available, on pg, replaces 0, 1" in text
