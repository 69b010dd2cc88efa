"""Tables of `sluiceway tasks`, rendered from a capture's log and position store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from sluiceway.capture.presenter import PHASES
from sluiceway.cli.common import Rows, counted, printable, table
from sluiceway.contract.capture_answers import TaskAlarm, TaskGroup, TaskPartition, TaskSummary, UnseenTasks
from sluiceway.kernel.clock import Millis, format_duration

_LONGEST = 24
"""Maximum characters of a position. Longer ones lose their middle: shard numbers have 56 digits and differ at the end."""
_UNLED = ": the capture resumes when it is restarted under this name"


def facts(group: TaskSummary, now: Millis) -> Rows:
    """The facts of a capture as a whole."""
    rows: list[tuple[str, str]] = [
        ("capture", group.name),
        ("stream", _of(group)),
        ("term", f"{group.term}, led by {_shown(group.leader)}" if group.leader else f"{group.term}, no leader" + _UNLED),
        ("members", str(sum(each.in_term for each in group.members))),
        ("partitions", _counts(group.state_of)),
        ("delivered", counted(group.records, "record")),
    ]
    if group.behind is not None:
        rows.append(("behind", f"{group.behind} at most"))
    if group.watermark is not None:
        rows.append(("watermark", _told(group.watermark)))
    if group.written_at is not None:
        ago = format_duration(max(0, now - round(group.written_at.timestamp() * 1_000)) // 1_000 * 1_000)
        rows.append(("last commit", f"{_told(group.written_at)}, {ago} ago"))
    return table(("", ""), [row for row in rows if row[1]])


def _of(group: TaskSummary) -> str:
    return " ".join(
        part
        for part in (
            "" if group.stream is None else group.stream,
            "" if group.queue is None else f"into queue {group.queue}",
            "" if group.log in (None, "meta") else f"with sync log {printable((group.log or '').encode())}",
        )
        if part
    )


def _counts(state_of: Mapping[str, int]) -> str:
    there = [f"{state_of[phase]:,} {phase}" for phase in PHASES if state_of[phase]]
    return ", ".join(there) or "none"


def members(group: TaskSummary) -> Rows:
    rows = [
        (_shown(each.member), each.partitions, "leads" if each.leads else "" if each.in_term else "joining, not yet in the term")
        for each in group.members
    ]
    return table(("member", "partitions", ""), rows, right=("partitions",))


def partitions(group: TaskGroup, as_tree: bool) -> Rows:
    """One row per partition; in a tree, below its first remaining parent."""
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
        told.append("waiting for " + ", ".join(map(_shown, each.waits_for)))
    if each.moving_to:
        told.append(f"moving to {_shown(each.moving_to)}")
    return "; ".join(told)


def _tree(all_of_them: list[TaskPartition]) -> Iterator[tuple[str, TaskPartition]]:
    """Each partition with its tree prefix, parents first."""
    known = {each.partition for each in all_of_them}
    below: dict[str | None, list[TaskPartition]] = {}
    for each in all_of_them:
        first = next((parent for parent in each.parents if parent in known), None)
        below.setdefault(first, []).append(each)
    shown: set[str] = set()
    # Depth first without recursion: a lineage may be long.
    open_lines = [("", "", each) for each in reversed(below.get(None, []))]
    while open_lines:
        own, further, each = open_lines.pop()
        shown.add(each.partition)
        yield own, each
        children = below.get(each.partition, [])
        for number, child in enumerate(reversed(children)):
            last = number == 0
            open_lines.append((further + ("└─ " if last else "├─ "), further + ("   " if last else "│  "), child))
    # Partitions that name each other as parents have no root.
    yield from (("", each) for each in all_of_them if each.partition not in shown)


def trouble(group: TaskGroup) -> Iterator[str]:
    """A line for each stuck partition and each alarm."""
    known = {each.partition for each in group.partitions}
    for token, parents in group.stuck.items():
        waits = ", ".join(_shown(parent) + ("" if parent in known else " (not announced by the stream)") for parent in parents)
        yield f"Stuck: {_shown(token)} waits for {waits}"
    yield from (f"Alarm: {_shown(each.member)}: {alarm_text(each)}" for each in group.alarms)


def alarm_text(alarm: TaskAlarm) -> str:
    what = "the capture" if alarm.partition is None else f"partition {_shown(alarm.partition)}"
    return f"{what} is stalled: {printable(alarm.why.encode(), 1_000)}"


def list_row(group: TaskSummary | UnseenTasks) -> tuple[object, ...]:
    if isinstance(group, UnseenTasks):
        return (group.name, group.stream, *("-",) * (len(LIST_COLUMNS) - 3), f"log unreadable: {_shown(group.problem)}")
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
