"""What a capture's log and position store say, for people and as JSON. It is told what was seen, and what time it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import msgspec

from sluiceway.capture import Begun, Look
from sluiceway.cli.common import Rows, counted, printable, table
from sluiceway.core.assignment.tasks_state import Partition, Phase
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.node.task_reader import REST
from sluiceway.ports.position_store import Kept, Stored

PHASES: tuple[Phase, ...] = ("created", "ready", "owned", "finished")
_LONGEST = 24
"""A position that is longer is shortened for people: shards have numbers of 56 digits, whose ends differ."""


_UNLED = ": the capture goes on when it is started again under this name"
_STILL: Millis = REST + 5_000
"""What was committed longer ago is of a partition that nobody reads, or that does not go on."""


class TaskPartition(msgspec.Struct, frozen=True, kw_only=True):
    """`waits_for`: parents that have not finished. `planned`: the end of the batch that is being handed on. `at`: nothing older is still
    to come. `behind`: by how much it is behind the end of the stream, if it can be read: as committed, and as long as nothing was since."""

    partition: str
    state: Phase
    parents: list[str]
    waits_for: list[str]
    owner: str | None
    grant: int | None
    moving_to: str | None
    position: str | None
    planned: str | None
    batch: int
    records: int
    at: datetime | None
    behind: str | None
    written_at: datetime | None


class TaskMemberShown(msgspec.Struct, frozen=True, kw_only=True):
    """`in_term`: it is given partitions. Who has joined and is not yet in the term will be in the next."""

    member: str
    leads: bool
    in_term: bool
    partitions: int


class TaskAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """What does not go on without somebody's help. `partition` None: the capture as a whole."""

    member: str
    partition: str | None
    why: str


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A capture. `state_of` has how many partitions are in each state; `stuck` what waits, and for what, if nothing can go on."""

    name: str
    stream: str | None
    log: str | None
    queue: str | None
    """The target; None: there is none, or nobody knows."""
    term: int
    leader: str | None
    members: list[TaskMemberShown]
    state_of: dict[str, int]
    records: int
    """Those of all partitions whose positions are still kept."""
    behind: str | None
    """The most of any partition that can be read, as far as it is known."""
    watermark: datetime | None
    written_at: datetime | None
    """When a position was last written."""
    stuck: dict[str, list[str]]
    alarms: list[TaskAlarm]


class TaskGroup(TaskSummary, frozen=True, kw_only=True):
    """With each of its partitions. `sown`: the stream has said which there are."""

    sown: bool
    partitions: list[TaskPartition]


class UnseenTasks(msgspec.Struct, frozen=True, kw_only=True):
    """A capture whose log cannot be read, and why."""

    name: str
    stream: str
    log: str
    problem: str


def group_of(look: Look, now: Millis) -> TaskGroup:
    state, positions, begun = look.state, look.positions, look.begun
    counts = Counter(each.phase for each in state.partitions.values())
    owners = Counter(each.owner for each in state.partitions.values())
    behind = {token: _behind(positions[token], now) for token in state.active() if token in positions}
    known = [each for each in behind.values() if each is not None]
    return TaskGroup(
        name=look.name,
        stream=None if begun is None else begun.stream,
        log=None if begun is None else begun.log,
        queue=None if begun is None else begun.queue or None,
        term=state.term,
        leader=state.leader or None,
        members=[
            TaskMemberShown(member=member, leads=member == state.leader, in_term=member in state.members, partitions=owners[member])
            for member in sorted(state.joined)
        ],
        sown=bool(state.sown),
        state_of={phase: counts[phase] for phase in PHASES},
        records=sum(stored.kept.records for stored in positions.values()),
        behind=format_duration(max(known)) if known else None,
        watermark=_moment(look.watermark),
        written_at=_moment(max((stored.written_at for stored in positions.values()), default=None)),
        stuck={token: list(parents) for token, parents in sorted(look.stuck.items())},
        alarms=[
            TaskAlarm(member=member, partition=token or None, why=why)
            for member, alarms in sorted(look.alarms.items())
            for token, why in sorted(alarms.items())
        ],
        partitions=[_partition(each, positions.get(token), behind.get(token)) for token, each in sorted(state.partitions.items())],
    )


def _behind(stored: Stored, now: Millis) -> Millis | None:
    """At rest a partition is not committed all the time."""
    age = now - stored.written_at
    return stored.kept.behind if stored.kept.behind is None or age < _STILL else stored.kept.behind + age


def _partition(each: Partition, stored: Stored | None, behind: Millis | None) -> TaskPartition:
    kept = stored.kept if stored is not None else Kept()
    return TaskPartition(
        partition=each.token,
        state=each.phase,
        parents=list(each.parents),
        waits_for=list(each.waits),
        owner=each.owner or None,
        grant=each.grant or None,
        moving_to=each.to or None,
        position=kept.position,
        planned=kept.plan,
        batch=kept.batch,
        records=kept.records,
        at=_moment(kept.at),
        behind=None if behind is None else format_duration(behind),
        written_at=_moment(stored.written_at) if stored is not None else None,
    )


def _moment(at: Millis | None) -> datetime | None:
    """None also for the beginning of time, which stands for what nobody knows."""
    return datetime.fromtimestamp(at / 1_000, UTC) if at else None


# ---- for people -----------------------------------------------------------------------------------------------------------


def facts(group: TaskSummary, now: Millis) -> Rows:
    """What is to be said of the whole."""
    rows: list[tuple[str, str]] = [
        ("capture", group.name),
        ("of", _of(group)),
        ("term", f"{group.term}, led by {_shown(group.leader)}" if group.leader else f"{group.term}, which nobody leads" + _UNLED),
        ("members", str(sum(each.in_term for each in group.members))),
        ("partitions", _counts(group.state_of)),
        ("handed on", counted(group.records, "record")),
    ]
    if group.behind is not None:
        rows.append(("behind", f"{group.behind} at most"))
    if group.watermark is not None:
        rows.append(("watermark", f"{_told(group.watermark)}: nothing older is still to come"))
    if group.written_at is not None:
        ago = format_duration(max(0, now - round(group.written_at.timestamp() * 1_000)) // 1_000 * 1_000)
        rows.append(("last commit", f"{_told(group.written_at)}, {ago} ago"))
    return table(("", ""), [row for row in rows if row[1]])


def _of(group: TaskSummary) -> str:
    return " ".join(
        part
        for part in (
            "" if group.stream is None else f"a stream of the kind {group.stream}",
            "" if group.queue is None else f"into the queue {group.queue}",
            "" if group.log in (None, "meta") else f"by {printable((group.log or '').encode())}",
        )
        if part
    )


def _counts(state_of: Mapping[str, int]) -> str:
    there = [f"{state_of[phase]:,} {phase}" for phase in PHASES if state_of[phase]]
    return ", ".join(there) or "none"


def members(group: TaskSummary) -> Rows:
    rows = [
        (_shown(each.member), each.partitions, "leads" if each.leads else "" if each.in_term else "has joined, not yet in the term")
        for each in group.members
    ]
    return table(("member", "partitions", ""), rows, right=("partitions",))


def partitions(group: TaskGroup, as_tree: bool) -> Rows:
    """One line each; as a tree, children stand below the first of their parents that is still there."""
    lines = list(_tree(group.partitions)) if as_tree else [("", each) for each in group.partitions]
    rows = [
        (
            *(prefix + _shown(each.partition), each.state, _shown(each.owner), each.grant or "", _notes(each)),
            *(_short(each.position), each.batch or "", each.records or "", each.behind or ""),
        )
        for prefix, each in lines
    ]
    columns = ("partition", "state", "owner", "grant", "", "position", "batch", "records", "behind")
    return table(columns, rows, right=("grant", "batch", "records"))


def _notes(each: TaskPartition) -> str:
    told = []
    if each.waits_for:
        told.append("waits for " + ", ".join(map(_shown, each.waits_for)))
    if each.moving_to:
        told.append(f"moves to {_shown(each.moving_to)}")
    return "; ".join(told)


def _tree(all_of_them: list[TaskPartition]) -> Iterator[tuple[str, TaskPartition]]:
    """Each with the lines that lead to it, parents first."""
    known = {each.partition for each in all_of_them}
    below: dict[str | None, list[TaskPartition]] = {}
    for each in all_of_them:
        first = next((parent for parent in each.parents if parent in known), None)
        below.setdefault(first, []).append(each)
    shown: set[str] = set()
    # Depth first, without a call for each generation: a lineage may be long.
    open_lines = [("", "", each) for each in reversed(below.get(None, []))]
    while open_lines:
        own, further, each = open_lines.pop()
        shown.add(each.partition)
        yield own, each
        children = below.get(each.partition, [])
        for number, child in enumerate(reversed(children)):
            last = number == 0
            open_lines.append((further + ("└─ " if last else "├─ "), further + ("   " if last else "│  "), child))
    # Those that a stream named as each other's parents hang from nothing.
    yield from (("", each) for each in all_of_them if each.partition not in shown)


def trouble(group: TaskGroup) -> Iterator[str]:
    """Why something, or nothing at all, goes on no more."""
    known = {each.partition for each in group.partitions}
    for token, parents in group.stuck.items():
        waits = ", ".join(_shown(parent) + ("" if parent in known else " (which the stream has not told of)") for parent in parents)
        yield f"stuck: {_shown(token)} waits for {waits}"
    yield from (f"alarm: {_shown(each.member)}: {alarm_text(each)}" for each in group.alarms)


def alarm_text(alarm: TaskAlarm) -> str:
    what = "the capture" if alarm.partition is None else f"partition {_shown(alarm.partition)}"
    return f"{what} does not go on: {printable(alarm.why.encode(), 1_000)}"


def summary(group: TaskGroup) -> TaskSummary:
    return TaskSummary(**{name: getattr(group, name) for name in TaskSummary.__struct_fields__})


def unseen(name: str, begun: Begun, error: SluicewayError) -> UnseenTasks:
    return UnseenTasks(name=name, stream=begun.stream, log=begun.log, problem=error.detail)


def list_row(group: TaskSummary | UnseenTasks) -> tuple[object, ...]:
    if isinstance(group, UnseenTasks):
        return (group.name, group.stream, *("-",) * (len(LIST_COLUMNS) - 3), f"its log cannot be read: {_shown(group.problem)}")
    return (
        *(group.name, group.stream or "-", group.term, _shown(group.leader) or "-", sum(each.in_term for each in group.members)),
        *(sum(group.state_of.values()), group.records, group.behind or "-"),
        *("-" if group.watermark is None else _told(group.watermark), "-" if group.written_at is None else _told(group.written_at)),
        ", ".join([*(["stuck"] if group.stuck else []), *([counted(len(group.alarms), "alarm")] if group.alarms else [])]),
    )


LIST_COLUMNS = ("capture", "stream", "term", "leader", "members", "partitions", "records", "behind", "watermark", "last commit", "")
LIST_NUMBERS = ("term", "members", "partitions", "records")


def _told(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _shown(text: str | None) -> str:
    return printable((text or "").encode("utf-8", "surrogatepass"))


def _short(position: str | None) -> str:
    text = _shown(position)
    return text if len(text) <= _LONGEST else f"{text[:6]}…{text[-(_LONGEST - 7) :]}"
