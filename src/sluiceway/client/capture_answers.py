"""Captures, as a server tells of those in its meta store."""

from __future__ import annotations

from datetime import datetime

import msgspec


class TaskPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition of a change stream. `state` is created (it waits for its parents), ready, owned or finished.

    `waits_for`: parents that have not finished. `planned`: the end of the batch that is being handed on. `at`: none of its records that is
    older is still to come. `behind`: how far it is from the end of the stream, a duration such as `1m1s`, if that is known. `dead_letters`:
    records that the target did not take, which are in its dead queue.
    """

    partition: str
    state: str
    parents: list[str] = []
    waits_for: list[str] = []
    owner: str | None = None
    grant: int | None = None
    moving_to: str | None = None
    position: str | None = None
    planned: str | None = None
    batch: int = 0
    records: int = 0
    at: datetime | None = None
    behind: str | None = None
    written_at: datetime | None = None
    dead_letters: int = 0


class TaskMember(msgspec.Struct, frozen=True, kw_only=True):
    """`in_term`: it is given partitions. Who has just joined is not yet."""

    member: str
    leads: bool = False
    in_term: bool = False
    partitions: int = 0


class TaskAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """What does not go on without somebody's help. `partition` None: the capture as a whole."""

    member: str
    partition: str | None = None
    why: str = ""


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A capture. `log` is where its log is, `queue` to where it hands on (None: to no queue). `state_of` has how many partitions are in
    each state, `stuck` what waits for which parents if nothing can go on. No record older than the `watermark` is still to come.
    """

    name: str
    stream: str | None = None
    log: str | None = None
    queue: str | None = None
    term: int = 0
    leader: str | None = None
    members: list[TaskMember] = []
    state_of: dict[str, int] = {}
    records: int = 0
    behind: str | None = None
    watermark: datetime | None = None
    written_at: datetime | None = None
    stuck: dict[str, list[str]] = {}
    alarms: list[TaskAlarm] = []


class TaskGroup(TaskSummary, frozen=True, kw_only=True):
    """With each of its partitions that has not finished, or that others wait for. `sown`: the stream has said which there are."""

    sown: bool = False
    partitions: list[TaskPartition] = []


class UnseenTasks(msgspec.Struct, frozen=True, kw_only=True):
    """A capture whose log the server could not read, and why."""

    name: str
    problem: str
    stream: str | None = None
    log: str | None = None


class TaskList(msgspec.Struct, frozen=True, kw_only=True):
    """The captures by name: those that could be seen, and the others."""

    items: list[TaskSummary]
    unseen: list[UnseenTasks] = []
