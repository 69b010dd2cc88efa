"""Rebalances of a real server process, as an operator does them: its configuration, its command line, its metrics and events."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.client import Client, Event, Rebalance
from tests.server.server_process import COMMAND, PATIENCE, wait_until
from tests.server.test_server_reload import Child, child

TWO = "[backends.a]\nkind = 'sqlite'\n[backends.b]\nkind = 'sqlite'\n"
ONE = "[backends.a]\nkind = 'sqlite'\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Child]:
    with child(tmp_path, ONE) as served:
        yield served


def ended(client: Client, id: str) -> Rebalance:
    """The last look at it."""
    *_, last = client.watch_rebalance(id, interval="20ms")
    return last


def texts(client: Client, queue: str) -> list[str]:
    """All that is in the queue, taken out of it and completed."""
    found: list[str] = []
    while leased := client.lease(queue, batch_size=1_000, max_partitions=100):
        found += [item.payload.decode() for item in leased]
        client.complete(queue, lease_ids=leased.lease_ids)
    return found


def filled(client: Client, queue: str, calls: int = 40, each: int = 25) -> list[str]:
    """What was put into it."""
    put = [[f"{call}-{number}" for number in range(each)] for call in range(calls)]
    for items in put:
        client.produce(queue, items)
    return [text for items in put for text in items]


def on(client: Client, queue: str) -> dict[str, int]:
    """How many partitions it has on each backend."""
    backends = [each.backend for each in client.queue_info(queue).partitions]
    return {name: backends.count(name) for name in sorted(set(backends))}


def test_a_new_backend_is_spread_over_and_the_old_one_vacated_and_taken_out(server: Child) -> None:
    with Client(server.url) as client:
        for name, partitions in (("many", 6), ("single", 1), ("two", 2)):
            client.create_queue(name, requested_partitions=partitions)
        put = filled(client, "many")
        origins = {item.origin for item in client.peek("many", limit=1_000)}
        assert len(origins) == len(put)

        server.file.write_text(TWO)
        client.reload_config()
        begun = client.rebalance_many("*", drain="copy")
        # One partition over two backends is one, and it is where it should be.
        assert [each.queue_name for each in begun.rebalances] == ["many", "two"]
        assert [(each.queue_name, each.reason) for each in begun.left_out] == [("single", "there is nothing to do")]
        assert [ended(client, each.id).state for each in begun.rebalances] == ["done", "done"]
        assert (on(client, "many"), on(client, "two"), on(client, "single")) == ({"a": 3, "b": 3}, {"a": 1, "b": 1}, {"a": 1})

        server.file.write_text(TWO.replace("'sqlite'\n", "'sqlite'\npartition_affinity = 0.0\n", 1))
        client.reload_config()
        one = client.rebalance("many", drain="copy", rate=100_000)
        assert ended(client, one.id).state == "done"
        begun = client.rebalance_many("*")
        assert [ended(client, each.id).state for each in begun.rebalances] == ["done", "done"]
        assert on(client, "many") == {"b": 6}
        assert client.plan_rebalance("many").plan.is_empty
        held = {each["backend"]: each["partitions"] for each in client.list_backends()}
        assert held["a"] == 0

        server.file.write_text(TWO.partition("[backends.b]")[1] + TWO.partition("[backends.b]")[2])
        assert any("backends.a" in each for each in client.reload_config().changed)
        assert [each["backend"] for each in client.list_backends()] == ["b"]
        assert {item.origin for item in client.peek("many", limit=1_000)} == origins, "moved items keep their origins"
        assert sorted(texts(client, "many")) == sorted(put), "each once"
        assert client.produce("single", ["still here"]).count == 1


def test_what_is_told_of_a_rebalance_while_it_goes_on(server: Child) -> None:
    seen: list[Event] = []

    def listen() -> None:
        with Client(server.url) as listening:
            for event in listening.events(queue_name="q"):
                seen.append(event)
                if event.type == "rebalance.ended":
                    return

    with Client(server.url) as client:
        client.create_queue("q", requested_partitions=3)
        put = filled(client, "q", calls=9, each=10)
        while not all(each.ready for each in client.stats("q").partitions):
            # One whose first commit took long on a busy machine is passed over for a second.
            put += filled(client, "q", calls=1, each=10)
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        wait_until(lambda: any(event.type == "stats" for event in seen), "the first look")
        begun = client.rebalance("q", requested_partitions=1)
        wait_until(lambda: client.get_rebalance(begun.id).step == "drain", "it drains")

        look = client.get_rebalance(begun.id)
        assert look.progress is not None
        drained = set(look.plan.drains)
        assert {each.partition for each in look.progress.partitions} == drained
        info = client.queue_info("q")
        assert info.requested_partitions == 1
        assert {each.partition for each in info.partitions if each.state == "draining"} == drained
        assert info.rebalance is not None
        assert (info.rebalance.id, info.rebalance.items_left) == (begun.id, look.progress.items_left)
        assert {each.state for each in client.stats("q").partitions if each.partition in drained} == {"draining"}
        metrics = server.http.get("/metrics").text
        assert f'sluiceway_queue_draining_items{{queue="q"}} {look.progress.items_left}.0' in metrics
        assert 'sluiceway_queue_partitions{queue="q",state="draining"} 2.0' in metrics
        assert "sluiceway_rebalances_open 1.0" in metrics

        assert sorted(texts(client, "q")) == sorted(put)
        assert ended(client, begun.id).state == "done"
        listener.join(PATIENCE)
        assert not listener.is_alive()
        told = [event for event in seen if event.type.startswith("rebalance.")]
        assert (told[0].type, told[-1].type) == ("rebalance.started", "rebalance.ended")
        steps = [event.data["step"] for event in told if event.type == "rebalance.step" and isinstance(event.data, dict)]
        assert list(dict.fromkeys(steps)) == ["create", "flip", "shut", "keys", "drain"]
        wait_until(lambda: "sluiceway_rebalances_open 0.0" in server.http.get("/metrics").text, "the metric")
        counted = re.search(r'sluiceway_queue_items_produced_total\{queue="q"\} (\S+)', server.http.get("/metrics").text)
        assert counted is not None
        assert float(counted[1]) == len(put), "a removed partition takes nothing away"


@pytest.mark.slow
def test_it_is_watched_in_a_terminal(server: Child) -> None:
    with Client(server.url) as client:
        client.create_queue("q", requested_partitions=2)
        filled(client, "q", calls=10, each=10)
        begun = client.rebalance("q", requested_partitions=1)
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        command = [*COMMAND, "rebalance", "watch", "q", "--interval", "20ms", "--url", server.url]
        screen = bytearray()

        def read() -> None:
            try:
                while part := os.read(ours, 65_536):
                    screen.extend(part)
            except OSError:
                pass  # the other end is closed

        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as watching:
            os.close(theirs)
            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            wait_until(lambda: b" left" in screen, "the bar")
            assert watching.poll() is None
            texts(client, "q")
            assert watching.wait(PATIENCE) == 0
        reader.join(PATIENCE)
        os.close(ours)
        assert ended(client, begun.id).state == "done"
    text = screen.decode()
    assert re.search(r"partition [01] .*\d+ left", text)
    assert "\u2501" in text, "a bar"
    assert "removed" in text
    assert re.search(r"q: done", text)
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h"), "the cursor is given back"
    assert "Traceback" not in text
