"""Presenter: converts a capture's view into the shapes shown to users. The current time is passed in."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import get_args

from sluiceway.capture.capture_view import Look
from sluiceway.capture.partition_reader import REST
from sluiceway.capture.registration import Begun
from sluiceway.contract.capture_answers import Phase, TaskAlarm, TaskGroup, TaskMember, TaskPartition, UnseenTasks
from sluiceway.core.group.task_state import Partition, State
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.ports.position_store import PositionRecord, Stored

PHASES: tuple[Phase, ...] = get_args(Phase)
_STILL: Millis = REST + 5_000
"""A commit older than this belongs to a partition that is not being read, or is stalled."""

DEAD_LETTERS_ALARM: Millis = 24 * 3_600_000
"""Duration of an alarm after the last record that became a dead letter."""


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
            TaskMember(member=member, leads=member == state.leader, in_term=member in state.members, partitions=owners[member])
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
        ]
        + [
            TaskAlarm(member=_owner(state, token), partition=token, why=why)
            for token, stored in sorted(positions.items())
            if (why := _dead_letters(stored.kept, now))
        ],
        partitions=[
            _partition(each, state.awaits(token), positions.get(token), behind.get(token))
            for token, each in sorted(state.partitions.items())
        ],
    )


def _owner(state: State, token: str) -> str:
    partition = state.partitions.get(token)
    return "" if partition is None else partition.owner


def _dead_letters(kept: PositionRecord, now: Millis) -> str:
    """The alarm for a partition that went on without some records; empty if there were none lately."""
    if kept.dead is None or now - kept.dead.at > DEAD_LETTERS_ALARM:
        return ""
    those = "1 record was" if kept.dead.count == 1 else f"{kept.dead.count:,} records were"
    at = _moment(kept.dead.at)
    return f"{those} too large for the target, and went to the dead queue {kept.dead.queue}; the last, at {kept.dead.position}, {at:%F %T}Z"


def _behind(stored: Stored, now: Millis) -> Millis | None:
    """Lag of the partition. Idle partitions are committed only now and then, so the record's age counts only above `_STILL`."""
    age = now - stored.written_at
    return stored.kept.behind if stored.kept.behind is None or age < _STILL else stored.kept.behind + age


def _partition(each: Partition, awaits: tuple[str, ...], stored: Stored | None, behind: Millis | None) -> TaskPartition:
    kept = stored.kept if stored is not None else PositionRecord()
    return TaskPartition(
        partition=each.token,
        state=each.phase,
        parents=list(each.parents),
        waits_for=[*each.waits, *awaits],
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
        dead_letters=kept.dead.count if kept.dead is not None else 0,
    )


def _moment(at: Millis | None) -> datetime | None:
    """A time for display; None also for 0, which stands for unknown."""
    return datetime.fromtimestamp(at / 1_000, UTC) if at else None


def unseen(name: str, begun: Begun, problem: str) -> UnseenTasks:
    return UnseenTasks(name=name, stream=begun.stream, log=begun.log, problem=problem)
