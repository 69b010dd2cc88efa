"""JSON codec of captures and their tasks. The API uses it, and so does the command line, which reads the meta store directly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.capture_answers import TaskGroup, TaskList, TaskSummary, UnseenTasks
from sluiceway.kernel.names import QUEUE_NAME
from sluiceway.wire.decoding import JsonDecoder

CaptureName = Annotated[str, Meta(title="capture name", extra_json_schema={"pattern": f"^{QUEUE_NAME.pattern}$", "examples": ["orders"]})]


class TasksGetCall(msgspec.Struct, forbid_unknown_fields=True):
    """Get one capture by its name."""

    name: CaptureName


decode_get = JsonDecoder(TasksGetCall)


def summary(group: TaskGroup) -> TaskSummary:
    """The fields of a capture that the list shows."""
    return TaskSummary(**{name: getattr(group, name) for name in TaskSummary.__struct_fields__})


def task_list(found: Iterable[TaskSummary | UnseenTasks]) -> bytes:
    """The captures as JSON, the ones that could be read apart from the ones that could not."""
    seen: list[TaskSummary] = []
    unseen: list[UnseenTasks] = []
    for each in found:
        if isinstance(each, UnseenTasks):
            unseen.append(each)
        else:
            seen.append(each)
    return msgspec.json.encode(TaskList(items=seen, unseen=unseen))
