"""Harm to what a server has stored: it is stopped, its files are changed, and it is examined while no client can reach it. Then it gets its
files back, and goes on.

What it says of changed files is examined at once: it may refuse to start, or refuse partitions by name; what it does serve must be whole,
and must not be older than what was acknowledged.
"""

from __future__ import annotations

import base64
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.campaigns.blackbox.operation_log import name_of
from tests.campaigns.blackbox.planted_bugs import SOURCE, replace, started_from
from tests.campaigns.blackbox.targets import Member, Target
from tests.campaigns.kit.lines import HOST
from tests.server.server_process import COMMAND, wait_until

SETTLED_WITHIN = 20.0
"""Seconds within which a server has tried to open every partition."""
LATER = "99.0.0"
"""The version of the other release."""
STATES = ["ready", "leased", "scheduled"]


class Surgeon:
    """For a single server whose partitions are files in its data directory."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._folder = member.data.parent
        self._older = self._folder / "older"
        """The partitions at an earlier stop."""

    def flip_a_bit(self, chance: random.Random) -> None:
        """One bit of one file of a partition."""

        def flip(data: Path) -> None:
            file = chance.choice([path for path in (data / "partitions").glob("*.sqlite*") if path.stat().st_size])
            whole = bytearray(file.read_bytes())
            at = chance.randrange(len(whole))
            whole[at] ^= 1 << chance.randrange(8)
            file.write_bytes(whole)

        self._operate(flip, self._serves_what_is_whole)

    def lose_partitions(self, _: random.Random) -> None:
        """The folder with all partitions is empty, as if a disk was not mounted."""

        def lose(data: Path) -> None:
            shutil.rmtree(data / "partitions")
            (data / "partitions").mkdir()

        self._operate(lose, self._serves_nothing)

    def attach_older(self, _: random.Random) -> None:
        """The partitions are those of an earlier stop; the first time there is none yet, and nothing is changed."""

        def attach(data: Path) -> None:
            shutil.rmtree(data / "partitions")
            shutil.copytree(self._older, data / "partitions")

        self._operate(attach, self._serves_nothing) if self._older.exists() else self._member.kill()
        shutil.rmtree(self._older, ignore_errors=True)
        shutil.copytree(self._member.data / "partitions", self._older)

    def _operate(self, change: Callable[[Path], None], examine: Callable[[str], None]) -> None:
        """The server is stopped afterwards, and has the files that it had."""
        member, kept = self._member, self._folder / "kept"
        member.kill()
        shutil.copytree(member.data, kept)
        change(member.data)
        port = member.attempt()
        try:
            if port is not None:
                examine(f"http://{HOST}:{port}")
        finally:
            if member.runs:
                member.kill()
            shutil.rmtree(member.data)
            kept.rename(member.data)

    # ---- what the server says of it -----------------------------------------------------------------------------

    def _serves_what_is_whole(self, url: str) -> None:
        for item in _items(url):
            payload = base64.b64decode(item["bytes"]).decode(errors="replace")
            assert name_of(payload) is not None, f"a bit of a file was flipped, and {item['id']} was served as {payload[:80]!r}"

    def _serves_nothing(self, url: str) -> None:
        states = [(queue, each["partition"], each["state"]) for queue, each in _partitions(url)]
        served = [f"{queue}/{number} is {state}" for queue, number, state in states if state not in ("unavailable", "error")]
        assert not served, f"the storage is not the one that was acknowledged, and it is served: {', '.join(served[:5])}"


def _partitions(url: str) -> list[tuple[str, dict[str, Any]]]:
    """What `queue.stats` says of each partition, with its queue; once none is being opened any more."""
    found: list[tuple[str, dict[str, Any]]] = []
    earlier: list[str] = []
    began = time.monotonic()

    def settled() -> bool:
        found[:] = [
            (queue["queue_name"], each)
            for queue in _ask(url, "queues.list")["items"]
            for share in _ask(url, "queue.stats", queue_name=queue["queue_name"])["logical_queues"]
            for each in share["partitions"]
        ]
        states = [each["state"] for _, each in found]
        is_same, earlier[:] = states == earlier, states
        # `unavailable` is also one that is just being opened.
        return is_same and ("unavailable" not in states or time.monotonic() - began > 3.0)

    wait_until(settled, "an end of opening partitions", SETTLED_WITHIN)
    return found


def _items(url: str) -> Iterator[dict[str, Any]]:
    """All items that can be read."""
    for queue, each in _partitions(url):
        page: dict[str, Any] = {"states": STATES}
        while page:
            body = _ask(url, "queue.browse", queue_name=queue, partition=each["partition"], limit=10_000, **page)
            yield from body.get("items", ())
            page = {"cursor": body["cursor"]} if body.get("cursor") else {}


def _ask(url: str, call: str, **fields: Any) -> dict[str, Any]:
    """The answer, or the problem."""
    body: dict[str, Any] = httpx.post(f"{url}/v1/{call}", json=fields, timeout=30, trust_env=False).json()
    assert body.get("code") != "internal", f"{call}: {body}"
    return body


# ---- another release ----------------------------------------------------------------------------------------------------


def other_release(folder: Path) -> list[str]:
    """Make a later release of the product there, which understands one compatibility level more; the command that starts it."""
    package = folder / "sluiceway"
    shutil.copytree(SOURCE, package)
    version = re.search(r'__version__ = "(.+)"', (package / "__init__.py").read_text())
    levels = package / "kernel" / "compatibility.py"
    newest = re.search(r"NEWEST: Final = (\d+)", levels.read_text())
    assert version is not None
    assert newest is not None
    replace(package / "__init__.py", version[0], f'__version__ = "{LATER}"')
    replace(levels, newest[0], f"NEWEST: Final = {int(newest[1]) + 1}")
    return started_from(folder)


class Releases:
    """Replaces all members by ones of the other release, one after the other."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._commands: list[Sequence[str]] = []

    def change(self) -> None:
        if not self._commands:
            self._commands = [COMMAND, other_release(self._target.members[0].data.parent / "other-release")]
        self._commands.reverse()
        for member in self._target.members:
            member.stop()
            member.command = self._commands[0]
            member.revive()
