"""What `sluiceway dev` shows by itself: driven turn by turn against a real server, as fast as that goes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from server_process import COMMAND, PATIENCE, wait_until
from sluiceway.cli.servers import has_display
from sluiceway.client import Client
from sluiceway.demo.moving import DEAD, EMAILS, FILE, ORDERS, QUEUES, WORKERS, Demo, OtherQueuesError, Pace, prepare
from test_server_reload import Child, child

FAST = Pace(first_move=2, moves=3, backoff=None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Child]:
    with child(tmp_path, prepare(tmp_path / "config").read_text()) as found:
        yield found


@pytest.fixture
def demo(server: Child) -> Iterator[Demo]:
    with ExitStack() as stack:
        *workers, mailer, client = (stack.enter_context(Client(server.url, client_id=name)) for name in (*WORKERS, "mailer", "demo"))
        yield Demo(client, workers, mailer, server.file, FAST)


def backends(client: Client) -> list[str]:
    """Where the partitions that are there to stay lie."""
    stay = [each for each in client.queue_info(ORDERS).partitions if each.state in ("available", "preparing")]
    return sorted(each.backend for each in stay)


def test_it_produces_consumes_fails_and_moves(server: Child, demo: Demo) -> None:
    with Client(server.url) as client:
        demo.begin()
        assert {each.queue_name for each in client.list_queues().items} == QUEUES
        assert backends(client) == ["default"] * 5 + ["second"]
        waiting = sum(part.ready for part in client.stats(ORDERS).partitions)
        assert waiting > 500
        for _ in range(2):
            demo.turn()
        (first,) = client.list_rebalances(queue_name=ORDERS).items
        assert first.drain == "copy"
        wait_until(lambda: client.get_rebalance(first.id).state == "done", "the rebalance")
        assert backends(client) == ["default"] + ["second"] * 5
        for _ in range(3):
            demo.turn()
        second, _ = client.list_rebalances(queue_name=ORDERS).items
        wait_until(lambda: client.get_rebalance(second.id).state == "done", "the rebalance")
        assert backends(client) == ["default"] * 5 + ["second"]
        assert {each.client_id for queue in client.list_consumers().items for each in queue.consumers} == {*WORKERS, "mailer"}
        assert sum(part.completed for part in client.stats(EMAILS).partitions) > 0


def test_what_fails_is_tried_again_and_dies_while_the_rest_is_done(server: Child, demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.demo.moving._OUTAGES", (10, 0))
    with Client(server.url) as client:
        demo.begin()

        def turned() -> bool:
            demo.turn()
            return sum(part.ready for part in client.stats(DEAD).partitions) > 0

        wait_until(turned, "a death")
        parts = client.stats(ORDERS).partitions
        assert sum(part.retried for part in parts) > 0
        assert sum(part.completed for part in parts) > 0
        reasons = {(item.headers or {})["sluiceway-reason"] for item in client.peek(DEAD, limit=1_000)}
        assert any("card processor not reachable" in reason or "no such customer" in reason for reason in reasons)


def test_it_leaves_a_server_with_other_queues_alone_unless_asked(server: Child, demo: Demo) -> None:
    with Client(server.url) as client:
        client.create_queue("mine")
        with pytest.raises(OtherQueuesError) as raised:
            demo.begin()
        assert raised.value.names == ["mine"]
        assert [each.queue_name for each in client.list_queues().items] == ["mine"]
        demo.begin(beside_others=True)
        demo.turn()
        assert {each.queue_name for each in client.list_queues().items} == {*QUEUES, "mine"}


def test_dev_runs_it_in_a_new_folder_and_ends_it_with_itself(tmp_path: Path) -> None:
    command = [*COMMAND, "dev", "--data", str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            url = process.stdout.readline().split()[-1]
            assert process.stdout.readline() == f"dashboard at {url}/ui\n"
            assert next(line for line in process.stderr if line.startswith(f"A demo uses {ORDERS} and {EMAILS}"))
            with Client(url) as client:
                wait_until(lambda: sum(part.completed for part in client.stats(ORDERS).partitions) > 0, "the work")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()
    assert (tmp_path / "data" / FILE).exists()


def test_dev_without_a_demo_is_as_empty_as_ever_and_serves_what_one_has_left(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare(data)
    with subprocess.Popen([*COMMAND, "dev", "--no-demo", "--data", str(data)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with Client(process.stdout.readline().split()[-1]) as client:
                assert client.list_queues().items == []
                assert [each["backend"] for each in client.list_backends()] == ["default", "second"]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("environment", "platform", "terminal", "seen"),
    [
        ({"DISPLAY": ":0"}, "linux", True, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True, True),
        ({}, "darwin", True, True),
        ({}, "linux", True, False),
        ({"DISPLAY": ":0"}, "linux", False, False),
        ({"DISPLAY": ":10", "SSH_CONNECTION": "a b"}, "linux", True, False),
    ],
)
def test_a_browser_is_opened_where_somebody_sees_it(environment: dict[str, str], platform: str, terminal: bool, seen: bool) -> None:
    assert has_display(environment, platform, terminal) is seen
