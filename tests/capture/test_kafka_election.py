"""KafkaElection on a real Kafka server: by consumers of this process, and by processes that are killed and frozen."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sluiceway.capture.log_reader import whole
from sluiceway.capture.logs import kafka_election
from sluiceway.capture.logs.kafka_election import KafkaElection
from sluiceway.capture.logs.kafka_log import KafkaSyncLog
from sluiceway.capture.logs.kafka_topics import ensure
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import Group
from sluiceway.testing.drive import driven
from tests.capture import kafka_member
from tests.capture.kafka_member import OPTIONS, Arrivals
from tests.instance.instance_rig import eventually
from tests.servers.kafka_server import KafkaServer, server_or_skip
from tests.servers.pids import stop
from tests.servers.postgres_server import free_port, wait_until

SESSION: Millis = 3_000
HEARTBEAT: Millis = 300
numbers = itertools.count()

_MEMBER = """
import asyncio, json, sys
from sluiceway.capture.logs.kafka_election import KafkaElection
from sluiceway.capture.logs.kafka_topics import ensure

async def main(bootstrap, capture, name, session, heartbeat):
    election = KafkaElection(bootstrap, capture, session_timeout=int(session), heartbeat=int(heartbeat))
    await election.join(name, lambda group: print(json.dumps(group), flush=True))
    # Leaves in order when its input ends.
    await asyncio.to_thread(sys.stdin.read)
    await election.leave()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[KafkaServer]:
    with server_or_skip() as server:
        yield server


@pytest.fixture
def capture() -> str:
    return f"capture-{next(numbers)}"


class Member:
    """A member of an election in this process, and all that it was told."""

    def __init__(self, server: KafkaServer, capture: str, name: str) -> None:
        self.name = name
        self.told: list[Group] = []
        self._election = KafkaElection(server.bootstrap, capture, session_timeout=SESSION, heartbeat=HEARTBEAT)

    async def join(self) -> None:
        await self._election.join(self.name, self.told.append)

    async def leave(self) -> None:
        await self._election.leave()

    @property
    def group(self) -> Group | None:
        return self.told[-1] if self.told else None


@contextlib.asynccontextmanager
async def members(server: KafkaServer, capture: str, *names: str) -> AsyncIterator[list[Member]]:
    made = [Member(server, capture, name) for name in names]
    try:
        yield made
    finally:
        await asyncio.gather(*(member.leave() for member in made))


class Process:
    """A member that is a process of its own."""

    def __init__(self, server: KafkaServer, capture: str, name: str) -> None:
        self.name = name
        self.told: list[Group] = []
        arguments = [server.bootstrap, capture, name, str(SESSION), str(HEARTBEAT)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MEMBER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            generation, leader, names = json.loads(line)
            self.told.append(Group(generation, leader, tuple(names)))

    @property
    def group(self) -> Group | None:
        return self.told[-1] if self.told else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


@contextlib.contextmanager
def processes(server: KafkaServer, capture: str, *names: str) -> Iterator[list[Process]]:
    made = [Process(server, capture, name) for name in names]
    try:
        yield made
    finally:
        for process in made:
            process.kill()


def agreed(several: Sequence[Member] | Sequence[Process]) -> bool:
    """Whether all were told the same last: one of them leads, and they are all there is."""
    groups = {member.group for member in several}
    (group,) = groups if len(groups) == 1 else (None,)
    names = sorted(member.name for member in several)
    return group is not None and group.leader in names and list(group.members) == names


def leading(several: Sequence[Process]) -> Process:
    group = several[0].group
    assert group is not None
    return next(each for each in several if each.name == group.leader)


def check_told(told: Sequence[Group]) -> None:
    """Generations rise, each names one leader, and nobody leads in between."""
    # Each leader is followed by nobody, who is followed by a leader.
    assert all(bool(one.leader) != bool(two.leader) for one, two in itertools.pairwise(told))
    generations = [group.generation for group in told if group.leader]
    assert generations == sorted(set(generations))
    for group in told:
        assert group.members == () if not group.leader else group.leader in group.members
    if told:
        assert told[0].leader


@driven
async def test_one_that_is_alone_leads(server: KafkaServer, capture: str) -> None:
    async with members(server, capture, "one") as (one,):
        await one.join()
        await eventually(lambda: agreed([one]))
        assert one.told == [Group(1, "one", ("one",))]


@driven
async def test_whoever_comes_and_leaves_is_known_to_all_and_one_leads(server: KafkaServer, capture: str) -> None:
    async with members(server, capture, "a", "b", "c") as (one, two, three):
        await one.join()
        await eventually(lambda: agreed([one]))
        await two.join()
        await three.join()
        await eventually(lambda: agreed([one, two, three]))
        assert one.group is not None
        before = one.group
        assert before.leader == "a", "whoever leads goes on as long as it is there"
        await one.leave()
        said = len(one.told)
        await eventually(lambda: agreed([two, three]))
        assert two.group is not None
        assert two.group.generation > before.generation
        await three.leave()
        await eventually(lambda: agreed([two]))
        assert len(one.told) == said, "who has left is told nothing more"
        for member in (one, two, three):
            check_told(member.told)
        # The same name for the same generation, whoever was told.
        leaders = {(group.generation, group.leader) for member in (one, two, three) for group in member.told if group.leader}
        assert len(leaders) == len({generation for generation, _ in leaders})


@driven
async def test_captures_do_not_disturb_each_other(server: KafkaServer, capture: str) -> None:
    async with members(server, capture, "one") as (one,), members(server, f"{capture}-b", "two") as (two,):
        await asyncio.gather(one.join(), two.join())
        await eventually(lambda: agreed([one]) and agreed([two]))


@driven
async def test_a_fault_of_the_client_does_not_end_its_part(server: KafkaServer, capture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Exception] = []

    async def fail_once(*given: Any) -> None:
        if not failed:
            failed.append(ValueError("not today"))
            raise failed[0]
        await ensure(*given)

    monkeypatch.setattr(kafka_election, "ensure", fail_once)
    async with members(server, capture, "one") as (one,):
        await one.join()
        await eventually(lambda: agreed([one]))
    assert failed


@driven
async def test_one_leaves_that_never_took_part_or_found_no_server(
    server: KafkaServer, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    election = KafkaElection(server.bootstrap, capture)
    await election.leave()
    told: list[Group] = []
    tried: list[object] = []

    async def noted(*given: Any) -> None:
        tried.append(given)
        await ensure(*given)

    monkeypatch.setattr(kafka_election, "ensure", noted)
    nowhere = KafkaElection(f"127.0.0.1:{free_port()}", capture)
    await nowhere.join("one", told.append)
    # It looks for the server now.
    await eventually(lambda: bool(tried))
    async with asyncio.timeout(30):
        await nowhere.leave()
    assert told == []


@pytest.mark.parametrize("bootstrap", ["", "host", "host:9092,"])
def test_what_names_no_servers_is_refused(bootstrap: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        KafkaElection(bootstrap, "name")
    assert (refused.value.code, refused.value.field) == ("invalid_request", "log")


@pytest.mark.slow
def test_a_leader_that_is_killed_is_followed_by_another(server: KafkaServer, capture: str) -> None:
    with processes(server, capture, "a", "b", "c") as all_:
        wait_until(lambda: agreed(all_), "the first election")
        dead = leading(all_)
        left = [each for each in all_ if each is not dead]
        dead.kill()
        wait_until(lambda: agreed(left), "the second election")
        # In order, it takes no session.
        left[0].leave()
        wait_until(lambda: agreed(left[1:]), "the third election")
        for each in all_:
            check_told(each.told)


@pytest.mark.slow
def test_a_leader_that_stood_still_learns_that_it_leads_no_more(server: KafkaServer, capture: str) -> None:
    with processes(server, capture, "a", "b", "c") as all_:
        wait_until(lambda: agreed(all_), "the first election")
        frozen = leading(all_)
        left = [each for each in all_ if each is not frozen]
        before = frozen.group
        stop(frozen.pid)
        wait_until(lambda: agreed(left), "the election without it")
        assert frozen.group == before
        said = len(frozen.told)
        os.kill(frozen.pid, signal.SIGCONT)
        wait_until(lambda: agreed(all_), "the election with it")
        assert before is not None
        assert frozen.told[said] == Group(before.generation, "", ())
        after = frozen.group
        assert after is not None
        assert after.leader != frozen.name
        for each in all_:
            check_told(each.told)


@pytest.mark.slow
@driven
async def test_when_the_server_is_killed_nobody_leads_until_it_is_back(server: KafkaServer, capture: str) -> None:
    async with members(server, capture, "a", "b") as both:
        for member in both:
            await member.join()
        await eventually(lambda: agreed(both))
        server.kill()
        await eventually(lambda: all(member.group is not None and not member.group.leader for member in both))
        await asyncio.to_thread(server.start)
        await eventually(lambda: agreed(both))
        for member in both:
            check_told(member.told)


@driven
async def test_when_the_server_stands_still_nobody_leads_until_it_goes_on(server: KafkaServer, capture: str) -> None:
    async with members(server, capture, "a", "b") as both:
        for member in both:
            await member.join()
        await eventually(lambda: agreed(both))
        server.pause()
        try:
            await eventually(lambda: all(member.group is not None and not member.group.leader for member in both))
        finally:
            server.resume()
        await eventually(lambda: agreed(both))
        for member in both:
            check_told(member.told)


# ---- a whole capture ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def capturing(server: KafkaServer, capture: str, directory: Path, *names: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Members of a capture, by name."""
    command = [sys.executable, kafka_member.__file__, server.bootstrap, capture]
    with (directory / "log").open("ab") as log:
        made = {name: subprocess.Popen([*command, name, str(directory)], stdin=subprocess.PIPE, stderr=log) for name in names}
    try:
        yield made
    finally:
        for process in made.values():
            process.kill()
            process.wait()


@pytest.mark.slow
@driven
async def test_a_capture_over_kafka_whose_leader_is_killed_hands_on_every_record_once(
    server: KafkaServer, capture: str, tmp_path: Path
) -> None:
    arrivals, log = Arrivals(tmp_path), KafkaSyncLog(server.bootstrap, capture, longest_poll=50)
    count, each = int(OPTIONS["partitions"]), int(OPTIONS["records"])
    expected = sorted(f"{kind}{number}/{record}".encode() for kind in "pc" for number in range(count) for record in range(each))
    try:
        with capturing(server, capture, tmp_path, "a", "b", "c") as processes:
            await eventually(lambda: len(arrivals.all()) > 50)
            state, _ = await whole(log)
            before = state.leader
            assert before in processes
            dead = processes.pop(before)
            dead.kill()
            dead.wait()
            assert len(arrivals.all()) < len(expected)
            await eventually(lambda: len(arrivals.all()) >= len(expected))
            while (state := (await whole(log))[0]).partitions:
                await log.wait(state.seq, 1_000)
            assert sorted(state.members) == sorted(processes)
            assert state.leader in processes
            for process in processes.values():
                assert process.stdin is not None
                process.stdin.close()
                assert await asyncio.to_thread(process.wait, 60) == 0, (tmp_path / "log").read_text()[-4_000:]
        rows = arrivals.all()
        assert sorted(payload for _, payload in rows) == expected
        tokens = [token for token, _ in rows]
        for number in range(count):
            parent, child = f"p{number}", f"c{number}"
            assert max(at for at, token in enumerate(tokens) if token == parent) < tokens.index(child)
    finally:
        await log.close()
        await arrivals.close()
