"""Captures and their tasks, as the server and the command line show them."""

from __future__ import annotations

from typing import Annotated, Literal

from sluiceway.contract.fields import Answer, Duration, Time, about, one_of

Phase = Literal["created", "ready", "owned", "finished"]
"""Of a partition. `created`: some parent is not finished. `ready`: it has no owner."""

_NAME = about("The capture.")
_LOG = about("Location of the capture's log: `meta` or `kafka:HOST:PORT`.")
_MEMBER = about("Name of the member.")


class TaskPartition(Answer, frozen=True, kw_only=True):
    """A partition of a change stream."""

    partition: Annotated[str, about("Name of the partition in the stream.")]
    state: Annotated[
        str, one_of(Phase), about("`created` (waiting for its parents), `ready` (waiting for an owner), `owned` or `finished`.")
    ]
    parents: Annotated[list[str], about("Its parents in the stream, including ones that are no longer shown.")] = []
    waits_for: Annotated[
        list[str], about("Parents that have not finished, and key ranges that other partitions have not handed over.")
    ] = []
    owner: Annotated[str | None, about("The member that reads it; null: none.")] = None
    grant: Annotated[int | None, about("Number of its last assignment, part of the fence; null: none yet.")] = None
    moving_to: Annotated[str | None, about("The member that receives it once its owner has stopped; null: it stays.")] = None
    position: Annotated[str | None, about("Position up to which its records were delivered, in the stream's format; null: none yet.")] = (
        None
    )
    planned: Annotated[str | None, about("End of the batch that is being delivered; null: none.")] = None
    batch: Annotated[int, about("The number of its last batch.")] = 0
    records: Annotated[int, about("Number of its delivered records.")] = 0
    at: Annotated[Time | None, about("No record older than this will follow; null: not known.")] = None
    behind: Annotated[
        Duration | None,
        about("Lag behind the end of the stream, plus the time since the last commit; null: not known."),
    ] = None
    written_at: Annotated[Time | None, about("When its position was last written; null: never.")] = None
    dead_letters: Annotated[int, about("Records too large for the target. They are in its dead queue, in parts.")] = 0


class TaskMember(Answer, frozen=True, kw_only=True):
    """A member of a capture. One that has joined is given partitions from the next term on."""

    member: Annotated[str, _MEMBER]
    leads: Annotated[bool, about("Whether it is the leader.")] = False
    in_term: Annotated[bool, about("Whether partitions are assigned to it; false: it has just joined.")] = False
    partitions: Annotated[int, about("Number of its partitions.")] = 0


class TaskAlarm(Answer, frozen=True, kw_only=True):
    """Something that needs an operator: what makes no progress, or went on without some records."""

    member: Annotated[str, _MEMBER]
    partition: Annotated[str | None, about("The partition without progress; null: the whole capture.")] = None
    why: Annotated[str, about("The reason.")] = ""


class TaskSummary(Answer, frozen=True, kw_only=True):
    """A capture."""

    name: Annotated[str, _NAME]
    stream: Annotated[str | None, about("Kind of its change stream; null: not known.")] = None
    log: Annotated[str | None, _LOG] = None
    queue: Annotated[str | None, about("The queue that receives its records, possibly on another server; null: none, or not known.")] = None
    term: Annotated[int, about("Number of the current leader's term.")] = 0
    leader: Annotated[str | None, about("The leader; null: none.")] = None
    members: Annotated[list[TaskMember], about("The joined members, by name.")] = []
    state_of: Annotated[dict[str, int], about("Number of partitions in each state.")] = {}
    records: Annotated[int, about("Number of delivered records, of all partitions whose positions are still kept.")] = 0
    behind: Annotated[Duration | None, about("Lag of the partition that is furthest behind the end of the stream; null: not known.")] = None
    watermark: Annotated[Time | None, about("No record older than this will follow; null: no records are left, or not known.")] = None
    written_at: Annotated[Time | None, about("When a position was last written; null: never.")] = None
    stuck: Annotated[dict[str, list[str]], about("If no partition can continue: the waiting partitions, each with what it waits for.")] = {}
    alarms: Annotated[list[TaskAlarm], about("Problems that need an operator.")] = []


class TaskGroup(TaskSummary, frozen=True, kw_only=True):
    """A capture with its partitions."""

    sown: Annotated[bool, about("Whether the stream's first partitions are known.")] = False
    partitions: Annotated[
        list[TaskPartition], about("The unfinished partitions, and finished ones that others still wait for, by name.")
    ] = []


class UnseenTasks(Answer, frozen=True, kw_only=True):
    """A capture whose log cannot be read, and why."""

    name: Annotated[str, _NAME]
    stream: Annotated[str, about("Kind of its change stream.")] = ""
    log: Annotated[str, _LOG] = ""
    problem: Annotated[str, about("Why its log could not be read.")]


class TaskList(Answer, frozen=True, kw_only=True):
    """The captures, by name: those that could be seen, and the others."""

    items: Annotated[list[TaskSummary], about("Readable captures, by name.")]
    unseen: Annotated[list[UnseenTasks], about("Captures whose log could not be read, by name.")] = []
