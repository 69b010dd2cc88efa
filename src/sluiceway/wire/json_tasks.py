"""Captures and their tasks in JSON: for the API, and for the command line, which reads the meta store by itself."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import Duration
from sluiceway.core.group.task_state import Phase
from sluiceway.kernel.names import QUEUE_NAME
from sluiceway.wire.decoding import JsonDecoder
from sluiceway.wire.shapes import Shape

CaptureName = Annotated[str, Meta(title="capture name", extra_json_schema={"pattern": f"^{QUEUE_NAME.pattern}$", "examples": ["orders"]})]


class TasksGetCall(msgspec.Struct, forbid_unknown_fields=True):
    """The capture of that name."""

    name: CaptureName


class TaskPartition(Shape, kw_only=True):
    """`waits_for`: parents that have not finished. `planned`: the end of the batch that is being handed on. `at`: nothing older is still
    to come. `behind`: by how much it is behind the end of the stream, if it can be read: as committed, and as long as nothing was since.
    `dead_letters`: records that the target did not take, which are in its dead queue."""

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
    behind: Duration | None
    written_at: datetime | None
    dead_letters: int = 0


class TaskMemberShown(Shape, kw_only=True):
    """`in_term`: it is given partitions. Who has joined and is not yet in the term will be in the next."""

    member: str
    leads: bool
    in_term: bool
    partitions: int


class TaskAlarm(Shape, kw_only=True):
    """What does not go on without somebody's help, or went on without some records. `partition` None: the capture as a whole."""

    member: str
    partition: str | None
    why: str


class TaskSummary(Shape, kw_only=True):
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
    behind: Duration | None
    """The most of any partition that can be read, as far as it is known."""
    watermark: datetime | None
    written_at: datetime | None
    """When a position was last written."""
    stuck: dict[str, list[str]]
    alarms: list[TaskAlarm]


class TaskGroup(TaskSummary, kw_only=True):
    """With each of its partitions. `sown`: the stream has said which there are."""

    sown: bool
    partitions: list[TaskPartition]


class UnseenTasks(Shape, kw_only=True):
    """A capture whose log cannot be read, and why."""

    name: str
    stream: str
    log: str
    problem: str


class TaskList(Shape, kw_only=True):
    """The captures, by name: those that could be seen, and the others."""

    items: list[TaskSummary]
    unseen: list[UnseenTasks]


decode_get = JsonDecoder(TasksGetCall)


def summary(group: TaskGroup) -> TaskSummary:
    return TaskSummary(**{name: getattr(group, name) for name in TaskSummary.__struct_fields__})


def task_list(found: Iterable[TaskSummary | UnseenTasks]) -> bytes:
    seen: list[TaskSummary] = []
    unseen: list[UnseenTasks] = []
    for each in found:
        if isinstance(each, UnseenTasks):
            unseen.append(each)
        else:
            seen.append(each)
    return msgspec.json.encode(TaskList(items=seen, unseen=unseen))
