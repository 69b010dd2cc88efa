"""The commands on rebalances against a real server, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluiceway.client import Client
from tests.cli.cli_shell import REBALANCES, Shell, covering
from tests.server.server_process import ServerProcess, wait_until

COVERED: set[str] = set()
verb = covering(COVERED)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerProcess(tmp_path_factory.mktemp("cli") / "data") as server:
        yield server.url


@pytest.fixture
def shell(url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", url)
    name = str(request.node.name)[:60]
    with Client(url) as client:
        client.create_queue(name, requested_partitions=2)
    return Shell(name, monkeypatch, capsysbinary)


@verb("rebalance plan", "rebalance start", "rebalance watch", "rebalance list", "rebalance show", "rebalance cancel")
def test_a_rebalance(shell: Shell) -> None:
    queue = shell.queue
    assert f"{queue}: from 2 partitions to 3 (3 on default): keep 2, create 1, drain 0" in shell.says(
        "rebalance", "plan", queue, "--partitions", "3"
    )
    (plan,) = shell.json("rebalance", "plan", queue, "--partitions", "3")
    assert [each["partition"] for each in plan["plan"]["creates"]] == [2]
    out = shell.says("rebalance", "start", queue, "--partitions", "3", "--yes", "--wait", "--interval", "10ms")
    assert out.splitlines()[-1] == f"{queue}: done"
    assert len(shell.json("queue", "info", queue)[0]["partitions"]) == 3
    code, _, err = shell.ends("rebalance", "start", queue, "--yes")
    assert code == 3
    assert "nothing_to_rebalance" in err

    # With items and nobody who takes them it goes on until it is cancelled.
    for _ in range(6):
        shell.says("produce", queue, "a", "b")
    (begun,) = shell.json("rebalance", "start", queue, "--partitions", "1", "--yes")
    code, _, err = shell.ends("rebalance", "start", queue, "--yes", "--partitions", "2")
    assert code == 3
    assert begun["id"] in err
    assert "rebalance cancel" in err
    wait_until(lambda: shell.json("rebalance", "show", begun["id"])[0]["step"] == "drain", "it drains")
    assert "draining" in shell.says("partition", "list", queue)
    assert f"rebalance {begun['id']}: running" in " ".join(shell.says("queue", "info", queue).split())
    assert " ".join(shell.says("rebalance", "show", queue).split()).count("drains") == 1
    (listed,) = shell.json("rebalance", "list", "--queue", queue, "--open")
    assert listed["id"] == begun["id"]
    assert begun["id"] in shell.says("rebalance", "list", "--queue", queue)
    assert shell.json("rebalance", "cancel", queue)[0]["id"] == begun["id"]
    code, out, _ = shell.ends("rebalance", "watch", queue, "--interval", "10ms")
    assert (code, out.splitlines()[-1]) == (3, f"{queue}: cancelled")
    assert {each["state"] for each in shell.json("queue", "info", queue)[0]["partitions"]} == {"available"}

    (begun,) = shell.json("rebalance", "start", queue, "--partitions", "1", "--drain", "copy", "--yes")
    shell.says("rebalance", "watch", begun["id"], "--interval", "10ms")
    assert shell.json("rebalance", "watch", begun["id"])[-1]["state"] == "done"
    assert sum(each["ready"] for each in shell.json("partition", "list", queue)) == 12
    code, _, err = shell.ends("rebalance", "cancel", begun["id"])
    assert code == 3
    assert "not_cancellable" in err
    # Text of what went well by JSON above.
    name = f"{queue}.more"
    shell.says("queue", "create", name, "--partitions", "2")
    for _ in range(4):
        shell.says("produce", name, "a")
    shell.says("rebalance", "start", name, "--partitions", "1", "--yes")
    assert "cancel" in shell.says("rebalance", "cancel", name)
    assert shell.ends("rebalance", "cancel", name, "--wait")[0] in (0, 3)


@verb("partition pause", "partition resume")
def test_a_partition_that_is_paused(shell: Shell) -> None:
    assert shell.says("partition", "pause", shell.queue, "0") == f"Paused partition 0 of {shell.queue}\n"
    assert {each["partition"] for each in shell.json("produce", shell.queue, *"abcd")} == {1}
    states = [each["state"] for each in shell.json("partition", "list", shell.queue)]
    assert states == ["paused", "available"]
    assert shell.json("partition", "resume", shell.queue, "0")[0]["partitions"][0]["state"] == "available"
    assert shell.json("partition", "pause", shell.queue, "1")[0]["partitions"][1]["state"] == "paused"
    assert shell.says("partition", "resume", shell.queue, "1") == f"Resumed partition 1 of {shell.queue}\n"


def test_every_one_of_them_has_a_test() -> None:
    assert COVERED == REBALANCES
