"""What `sluiceway dev` shows by itself: driven turn by turn against a real server, as fast as that goes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from sluiceway.client import Client, Rebalance
from sluiceway.demo.live_move import DEAD, EMAILS, FILE, ORDERS, QUEUES, WORKERS, Demo, OtherQueuesError, Pace, prepare
from sluiceway.server_cli.servers import has_display
from sluiceway.testing.memory_server import server
from tests.server.server_process import COMMAND, PATIENCE, wait_until
from tests.server.test_server_reload import child

FAST = Pace(first_move=2, moves=3, drain=0.1, backoff=None)


@contextmanager
def demo_at(url: str, config: Path, pace: Pace = FAST) -> Iterator[tuple[Demo, Client]]:
    with ExitStack() as stack:
        *workers, mailer, client = (stack.enter_context(Client(url, client_id=name)) for name in (*WORKERS, "mailer", "demo"))
        yield Demo(client, workers, mailer, config, pace), client


@pytest.mark.slow
def test_it_produces_consumes_and_moves(tmp_path: Path) -> None:
    with child(tmp_path, prepare(tmp_path / "config").read_text()) as running, demo_at(running.url, running.file) as (demo, client):
        demo.begin()
        assert {each.queue_name for each in client.list_queues().items} == QUEUES
        assert [each.backend for each in client.queue_info(ORDERS).partitions].count("default") == 5
        assert sum(part.ready for part in client.stats(ORDERS).partitions) > 500

        def moved() -> list[Rebalance]:
            return [each for each in reversed(client.list_rebalances(queue_name=ORDERS).items) if each.state == "done"]

        def turned() -> bool:
            demo.turn()
            return len(moved()) > 1

        wait_until(turned, "the way there and back")
        there, back, *_ = moved()
        assert [({part.backend for part in each.plan.creates}, len(each.plan.drains)) for each in (there, back)] == [
            ({"second"}, 4),
            ({"default"}, 4),
        ]
        assert {each.client_id for queue in client.list_consumers().items for each in queue.consumers} == {*WORKERS, "mailer"}
        for name in (ORDERS, EMAILS):
            assert sum(part.completed for part in client.stats(name).partitions) > 0


def test_what_fails_is_tried_again_and_dies_while_the_rest_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.demo.live_move._OUTAGES", (10, 0, 10))
    with server() as running, demo_at(running.url, tmp_path, Pace(backoff=None, first_move=1_000_000)) as (demo, client):
        demo.begin()

        def reasons() -> set[str]:
            return {(item.headers or {})["sluiceway-reason"] for item in client.peek(DEAD, limit=1_000)}

        def turned() -> bool:
            demo.turn()
            died = " ".join(reasons())
            return "card processor not reachable" in died and "no such customer" in died

        wait_until(turned, "a death after some attempts, and one at the first")
        parts = client.stats(ORDERS).partitions
        assert sum(part.retried for part in parts) > 0
        assert sum(part.completed for part in parts) > 0


def test_it_leaves_a_server_with_other_queues_alone_unless_asked(tmp_path: Path) -> None:
    with server() as running, demo_at(running.url, tmp_path) as (demo, client):
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
            before = list(takewhile(lambda line: not line.startswith(f"A demo uses {ORDERS} and {EMAILS}"), process.stderr))
            assert not [line for line in before if "was open to other users" in line], "it made the directory itself"
            with Client(url) as client:
                wait_until(lambda: sum(part.completed for part in client.stats(ORDERS).partitions) > 0, "the work")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in process.stderr.read()
    assert (tmp_path / "data" / FILE).exists()


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
