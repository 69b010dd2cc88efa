"""Captures and their tasks, as the server and the command line show them."""

from __future__ import annotations

from typing import Annotated, Literal

from sluiceway.contract.fields import Answer, Duration, Time, about, one_of

Phase = Literal["created", "ready", "owned", "finished"]
"""Of a partition. `created`: some parent is not finished. `ready`: it has no owner."""

_NAME = about("The capture.")
_LOG = about("Where its log is: `meta` or `kafka:HOST:PORT`.")
_MEMBER = about("The member, by a name of its own.")


class TaskPartition(Answer, frozen=True, kw_only=True):
    """A partition of a change stream."""

    partition: Annotated[str, about("Its name in the stream.")]
    state: Annotated[str, one_of(Phase), about("`created` (it waits for its parents), `ready` (for an owner), `owned` or `finished`.")]
    parents: Annotated[list[str], about("Its parents in the stream, also those that are not shown any more.")] = []
    waits_for: Annotated[list[str], about("Parents that have not finished.")] = []
    owner: Annotated[str | None, about("The member that reads it; null: none.")] = None
    grant: Annotated[int | None, about("Which assignment of it was the last, part of the fence; null: there was none.")] = None
    moving_to: Annotated[str | None, about("The member to which it goes once its owner has stopped; null: it stays.")] = None
    position: Annotated[str | None, about("How far it was handed on, in the stream's own words; null: nothing was.")] = None
    planned: Annotated[str | None, about("The end of the batch that is being handed on; null: none is.")] = None
    batch: Annotated[int, about("The number of its last batch.")] = 0
    records: Annotated[int, about("Records of it that were handed on.")] = 0
    at: Annotated[Time | None, about("None of its records that is older is still to come; null: not known.")] = None
    behind: Annotated[
        Duration | None,
        about("How far it is from the end of the stream, as committed, plus the time since if nothing was; null: not known."),
    ] = None
    written_at: Annotated[Time | None, about("When its position was last written; null: never.")] = None
    dead_letters: Annotated[
        int, about("Records that the target did not take, because they are too large: they are in its dead queue, in parts.")
    ] = 0


class TaskMember(Answer, frozen=True, kw_only=True):
    """A member of a capture. One that has joined is given partitions from the next term on."""

    member: Annotated[str, _MEMBER]
    leads: Annotated[bool, about("Whether it is the leader.")] = False
    in_term: Annotated[bool, about("Whether it is given partitions; if not, it has just joined.")] = False
    partitions: Annotated[int, about("Number of partitions that it has.")] = 0


class TaskAlarm(Answer, frozen=True, kw_only=True):
    """Something that needs an operator: what makes no progress, or went on without some records."""

    member: Annotated[str, _MEMBER]
    partition: Annotated[str | None, about("The partition that makes no progress; null: the capture as a whole.")] = None
    why: Annotated[str, about("Why it makes no progress.")] = ""


class TaskSummary(Answer, frozen=True, kw_only=True):
    """A capture."""

    name: Annotated[str, _NAME]
    stream: Annotated[str | None, about("The kind of its change stream; null: not known.")] = None
    log: Annotated[str | None, _LOG] = None
    queue: Annotated[str | None, about("The queue to which it hands on, perhaps of another server; null: none, or not known.")] = None
    term: Annotated[int, about("The number of its present leader's term.")] = 0
    leader: Annotated[str | None, about("The member that leads; null: none.")] = None
    members: Annotated[list[TaskMember], about("Those that have joined, by name.")] = []
    state_of: Annotated[dict[str, int], about("Number of partitions in each state.")] = {}
    records: Annotated[int, about("Records that were handed on, of all partitions whose positions are still kept.")] = 0
    behind: Annotated[
        Duration | None, about("How far the partition that is furthest behind is from the end of the stream; null: not known.")
    ] = None
    watermark: Annotated[
        Time | None, about("No record that is older is still to come; null: none is to come, or nothing is known yet.")
    ] = None
    written_at: Annotated[Time | None, about("When a position was last written; null: never.")] = None
    stuck: Annotated[dict[str, list[str]], about("If no partition can go on: those that wait, and for which parents.")] = {}
    alarms: Annotated[list[TaskAlarm], about("What needs an operator.")] = []


class TaskGroup(TaskSummary, frozen=True, kw_only=True):
    """A capture with its partitions."""

    sown: Annotated[bool, about("Whether the stream has said which partitions there are.")] = False
    partitions: Annotated[list[TaskPartition], about("All that have not finished, and those that others still wait for, by name.")] = []


class UnseenTasks(Answer, frozen=True, kw_only=True):
    """A capture whose log cannot be read, and why."""

    name: Annotated[str, _NAME]
    stream: Annotated[str, about("The kind of its change stream.")] = ""
    log: Annotated[str, _LOG] = ""
    problem: Annotated[str, about("Why its log could not be read.")]


class TaskList(Answer, frozen=True, kw_only=True):
    """The captures, by name: those that could be seen, and the others."""

    items: Annotated[list[TaskSummary], about("Those that could be seen, by name.")]
    unseen: Annotated[list[UnseenTasks], about("Those whose log could not be read, by name.")] = []
