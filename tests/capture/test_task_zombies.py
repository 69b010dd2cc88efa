"""Real processes that stand still while others take over: when they go on, they write nothing new."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluiceway.capture import Look, captures, look
from tests.capture.task_process import KIND
from tests.server.server_process import PATIENCE
from tests.server.server_running import Running, eventually, running

TESTS = Path(__file__).parent
PARTITIONS, RECORDS = 3, 40

AFTERWARDS = {
    # Where it stood still, and what became of the batch when it went on.
    "plan": ["commit p0", "FencedError"],
    "write": ["write p0", "StaleBatchError"],
    "chunk": ["write p0", "StaleBatchError"],
}


@contextmanager
def process(point: str, *configs: dict[str, object]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(TESTS / "task_process.py"), point, *map(json.dumps, configs)]
    # Its stream is the simulation's, which is beside the package.
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def stands_still(child: subprocess.Popen[str]) -> bool:
    assert child.poll() is None
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def look_at(name: str, meta: str) -> Look:
    return asyncio.run(look(name, meta))


def all_is_read(name: str, meta: str) -> bool:
    state = look_at(name, meta).state
    return bool(state.sown) and not state.partitions


def items(server: Running, queue_name: str) -> list[dict[str, Any]]:
    """With their ids, as they lie there."""
    found = server.ask("queue.peek", queue_name=queue_name, limit=1_000)["items"]
    return [{"id": item["id"], "payload": b64decode(item["bytes"]).decode()} for item in found]


def check_items(payloads: list[str]) -> None:
    """Every record once, in its order, and children after their parents."""
    expected = [f"{kind}{number}/{record}" for kind in "pc" for number in range(PARTITIONS) for record in range(RECORDS)]
    assert sorted(payloads) == sorted(expected)
    for number in range(PARTITIONS):
        mine = [payload for payload in payloads if payload.split("/")[0][1:] == str(number)]
        assert mine == [f"{kind}{number}/{record}" for kind in "pc" for record in range(RECORDS)]


@pytest.mark.slow
def test_a_process_that_stood_still_writes_nothing_new(tmp_path: Path) -> None:
    meta = f"sqlite:{tmp_path / 'meta.db'}"
    with running(tmp_path / "data") as server:
        configs: dict[str, dict[str, object]] = {
            point: {
                "name": f"capture-{point}",
                "meta": meta,
                "stream": KIND,
                "options": {"partitions": str(PARTITIONS), "records": str(RECORDS)},
                "url": server.url,
                "queue": server.queue(),
                "limit": 5,
            }
            for point in AFTERWARDS
        }
        _stand_still_and_go_on(server, meta, configs)


def _stand_still_and_go_on(server: Running, meta: str, configs: dict[str, dict[str, object]]) -> None:
    with ExitStack() as stack:
        victims = {point: stack.enter_context(process(point, config)) for point, config in configs.items()}
        eventually(lambda: all(stands_still(child) for child in victims.values()))
        for config in configs.values():
            begun = look_at(str(config["name"]), meta)
            assert {each.owner for each in begun.state.partitions.values() if each.owner} == set(begun.state.members)
            assert begun.positions["p0"].kept.batch in (4, 5)
        survivor = stack.enter_context(process("never", *configs.values()))
        eventually(lambda: all(all_is_read(str(config["name"]), meta) for config in configs.values()))
        before = {point: items(server, str(config["queue"])) for point, config in configs.items()}

        for point, child in victims.items():
            os.kill(child.pid, signal.SIGCONT)
            assert child.stdout is not None
            told: list[list[str]] = []
            while AFTERWARDS[point] not in told:
                line = child.stdout.readline()
                assert line, f"{point}: {told}"
                told.append(json.loads(line))
            assert [what for what in told if "p0" in what[0]] == [AFTERWARDS[point]]
        for child in (*victims.values(), survivor):
            child.terminate()
            assert child.wait(PATIENCE) == 0
        for point, config in configs.items():
            after = items(server, str(config["queue"]))
            assert after == before[point]
            check_items([item["payload"] for item in after])
    assert set(asyncio.run(captures(meta))) == {str(config["name"]) for config in configs.values()}
