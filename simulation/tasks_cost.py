"""`python -m simulation.tasks_cost`: messages and bytes that a change costs a task group, compared with full-state messages.

Our costs are counted, with real members and the records that go to the log. The document's costs are estimated from the fields of its
messages, each as small and as few as possible.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

from sluiceway.core.group.task_fold import fold, fold_all
from sluiceway.core.group.task_member import (
    Append,
    AskSeeds,
    Elected,
    Ended,
    Event,
    Open,
    Opened,
    Prepared,
    Preset,
    Restored,
    SeedsFound,
    Stop,
    Stopped,
    TaskMember,
    Tick,
)
from sluiceway.core.group.task_parts import cut_snapshot
from sluiceway.core.group.task_state import Finish, Record, Snapshot, State, encode
from sluiceway.model.task_records import AnnouncedPartition, Group

MEMBERS, PARTITIONS = 200, 2_000


class Cost(NamedTuple):
    messages: int
    bytes: int
    steps: int
    """Number of sequential message delays."""
    kinds: dict[str, int]


class Fleet:
    """Members over one log without delays or losses. They all read in lockstep until no record is appended."""

    def __init__(self, members: int = MEMBERS, partitions: int = PARTITIONS, preset: Preset = "log-leader") -> None:
        self.state = State()
        self.partitions, self.preset = partitions, preset
        self.members: dict[str, TaskMember] = {}
        self.said: list[Record] = []
        self.generation = self.largest = 0
        """`largest`: bytes of the largest record."""
        for number in range(members):
            self.start(number)
        self.settle()
        self.elect()
        self.settle()

    def start(self, number: int) -> TaskMember:
        name = f"task-{number:04}-{number * 2_654_435_761 % 2**32:08x}"
        member = self.members[name] = TaskMember(name, self.preset)
        self.tell(member, Prepared(0))
        return member

    def elect(self, leader: str = "") -> None:
        """Tell each member the election's result: the current members."""
        self.generation += 1
        group = Group(self.generation, leader or self.state.leader or next(iter(self.members)), tuple(self.members))
        for member in self.members.values():
            self.tell(member, Elected(group))

    def tell(self, member: TaskMember, event: Event) -> None:
        """Tell a member, and whatever its readers and the stream answer, together, as its driver does."""
        events: list[Event] = [event]
        while events:
            effects, events = member.step_all(events, 0), []
            for effect in effects:
                match effect:
                    case Append():
                        self.said.append(effect.record)
                    case Open():
                        events.append(Opened(effect.token, effect.grant, None))
                    case Stop():
                        events.append(Stopped(effect.token, effect.grant))
                    case AskSeeds():
                        events.append(SeedsFound(effect.after, "all", self._seeds() if not effect.after else ()))
                    case _:
                        # Nothing is read, and election results are delivered by hand.
                        pass

    def _seeds(self) -> tuple[AnnouncedPartition, ...]:
        return tuple(AnnouncedPartition(f"shardId-{number:012}", (), f"{number:056}") for number in range(self.partitions))

    def settle(self) -> Cost:
        """Run until no record is appended, and return the cost."""
        messages = size = steps = 0
        kinds: dict[str, int] = {}
        while self.said:
            steps += 1
            said, self.said = self.said, []
            for record in said:
                length = len(encode(record))
                messages, size, self.largest = messages + 1, size + length, max(self.largest, length)
                kinds[type(record).__name__] = kinds.get(type(record).__name__, 0) + 1
                self.state = fold(self.state, self.state.seq + 1, record)
            for member in self.members.values():
                self.tell(member, Restored(self.state))
        for member in self.members.values():
            self.tell(member, Tick())
        return Cost(messages, size, steps, kinds)

    # ---- changes ----------------------------------------------------------------------------------------------------

    def finish_one(self) -> Cost:
        """Finish a partition with two children."""
        token, partition = next((token, each) for token, each in self.state.partitions.items() if each.owner != self.state.leader)
        children = tuple(AnnouncedPartition(f"shardId-{self.partitions + side:012}", (token,), f"{side:056}") for side in (1, 2))
        self.tell(self.members[partition.owner], Ended(token, partition.grant, children, 1_700_000_000_000))
        return self.settle()

    def lose_one(self) -> Cost:
        """Lose a member other than the leader."""
        del self.members[next(name for name in self.members if name != self.state.leader)]
        self.elect()
        return self.settle()

    def lose_leader(self) -> Cost:
        del self.members[self.state.leader]
        self.elect(next(iter(self.members)))
        return self.settle()

    def gain_one(self) -> Cost:
        self.start(self.generation + MEMBERS)
        joined = self.settle()
        self.elect()
        rest = self.settle()
        return Cost(joined.messages + rest.messages, joined.bytes + rest.bytes, joined.steps + rest.steps, joined.kinds | rest.kinds)


# ---- full-state messages --------------------------------------------------------------------------------------------------

UID = 2 + 36
"""Size of a UUID field in bytes."""
NUMBER, TIME = 2, 7
TOKEN = 2 + 20
PARTITION = 2 + TOKEN + TIME + NUMBER + UID + TOKEN
"""Minimum state of a partition: token, start, state, owner and one parent."""
TASK = 2 + UID + UID + NUMBER + TIME
"""State of a task without its partitions: two names, a generation, a time."""
MESSAGE = UID + UID + TIME + 3 * NUMBER
"""Message without task states: sender, time, generation, epoch, kind."""


class Document(NamedTuple):
    """Costs of a design whose messages carry the state of their own task, or of all tasks."""

    members: int = MEMBERS
    partitions: int = PARTITIONS

    @property
    def own(self) -> int:
        return MESSAGE + TASK + PARTITION * self.partitions // self.members

    @property
    def all(self) -> int:
        return MESSAGE + TASK * self.members + PARTITION * self.partitions

    def finish_one(self, each: int) -> tuple[int, int]:
        """Messages and bytes: the finisher announces and shares the children, two tasks announce that they take them, the finisher removes
        the partitions finished and taken."""
        return 4, 4 * each

    def lose_one(self, each: int) -> tuple[int, int]:
        """Messages and bytes: each remaining task answers, the leader announces the epoch with the state of all, each task that got a
        partition says so."""
        answers, got = self.members - 1, self.partitions // self.members
        return answers + 1 + got, (answers + got) * each + self.all


def table(fleet: Callable[[Preset], Fleet] = lambda preset: Fleet(preset=preset)) -> list[str]:
    """Return the rows of the table in docs/project/tasks.md."""
    document = Document()
    rows = ["| change | ours, log-leader | ours, finisher-hint | own states | full states |", "| --- | --- | --- | --- | --- |"]
    changes: tuple[tuple[str, Callable[[Fleet], Cost], Callable[[int], tuple[int, int]] | None], ...] = (
        ("a partition finishes, with two children", Fleet.finish_one, document.finish_one),
        ("a member is lost", Fleet.lose_one, document.lose_one),
        ("the leader dies", Fleet.lose_leader, document.lose_one),
        ("a member comes", Fleet.gain_one, None),
    )
    fleets: tuple[Preset, ...] = ("log-leader", "finisher-hint")
    ours = [(group := fleet(preset), [act(group) for _, act, _ in changes])[1] for preset in fleets]
    for number, (what, _, theirs) in enumerate(changes):
        cells = [f"{costs[number].messages} messages, {costs[number].bytes:,} B" for costs in ours]
        cells += [
            f"{count}, {size:,} B" if theirs else "" for count, size in ([theirs(document.own), theirs(document.all)] if theirs else [])
        ]
        rows.append("| " + " | ".join([what, *cells, *[""] * (4 - len(cells))]) + " |")
    return rows


def scale(members: int, partitions: int) -> list[str]:
    """How long one process takes for all of these members, by its own CPU time, and what goes to the log.

    Partitions are counted that finish, each with two children, beside all of these. Memory: the most that the process had.
    """
    began = time.process_time()
    fleet = Fleet(members, partitions)
    lines = [f"{members} members, {partitions:,} partitions: assigned in {time.process_time() - began:.1f} s"]
    for what, act in (("finish", fleet.finish_one), ("lost", fleet.lose_one), ("leader", fleet.lose_leader), ("came", fleet.gain_one)):
        began = time.process_time()
        cost = act()
        lines.append(f"{what}: {cost.messages} messages, {cost.bytes:,} B, {time.process_time() - began:.2f} s for all members")
    lines.append(f"the largest record: {fleet.largest:,} B")
    state, finishes, count = fleet.state, list[Finish](), 200
    for token, each in list(state.partitions.items())[: 2 * count]:
        children = tuple(AnnouncedPartition(f"{token}-{side}", (token,), f"{side:056}") for side in (1, 2))
        finishes.append(Finish(token, each.grant, children, 1_700_000_000_000))
    began = time.process_time()
    for record in finishes[:count]:
        state = fold(state, state.seq + 1, record)
    between = time.process_time()
    state = fold_all(state, list(enumerate(finishes[count:], state.seq + 1)))
    together = (time.process_time() - between) / count
    lines.append(f"folding a record: {(between - began) / count * 1_000:.2f} ms alone, {together * 1_000:.2f} ms of {count} together")
    began = time.process_time()
    sizes = [len(encode(part)) for part in cut_snapshot(state)]
    lines.append(f"a snapshot: {len(sizes)} records, {sum(sizes):,} B, the largest {max(sizes):,} B, {time.process_time() - began:.2f} s")
    lines.append(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,} MiB")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=MEMBERS)
    parser.add_argument("--partitions", type=int, default=0, help="so many: the time and memory of a large capture")
    given = parser.parse_args()
    if given.partitions:
        print("\n".join(scale(given.members, given.partitions)))
        return
    print(f"{MEMBERS} members, {PARTITIONS} partitions")
    print("\n".join(table()))
    fleet = Fleet()
    for what, act in (("finish", fleet.finish_one), ("lost", fleet.lose_one), ("leader", fleet.lose_leader), ("came", fleet.gain_one)):
        print(what, act())
    print(f"a snapshot: {len(encode(Snapshot(fleet.state))):,} B")


if __name__ == "__main__":
    main()
