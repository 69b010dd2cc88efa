"""JSON codec of what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sluiceway.contract.fields import QueueName, time_field
from sluiceway.contract.problem_answers import ProblemInfo, ProblemList
from sluiceway.model.problems import Problem
from sluiceway.wire.decoding import JsonDecoder


class ProblemsListCall(msgspec.Struct, forbid_unknown_fields=True):
    queue_name: QueueName | None = None


decode_list = JsonDecoder(ProblemsListCall)


def infos(problems: Iterable[Problem]) -> list[ProblemInfo]:
    """Problems as answers have them."""
    return [
        ProblemInfo(
            kind=each.kind,
            severity=each.severity,
            subject=each.subject,
            queue_name=each.queue_name or None,
            message=each.message,
            cause=each.cause,
            command=each.command,
            page=each.page,
            since=time_field(each.since),
            instance=each.instance or None,
        )
        for each in problems
    ]


def listed(problems: Iterable[Problem], queues: int, watched: bool, silent: Sequence[str]) -> bytes:
    """The answer to `problems.list`. `queues`: how many were looked at."""
    return msgspec.json.encode(ProblemList(items=infos(problems), queues=queues, watched=watched, silent=list(silent)))
