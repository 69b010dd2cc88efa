"""What is wrong, as the server answers it."""

from __future__ import annotations

from typing import Annotated, Literal

from sluiceway.contract.fields import Answer, QueueName, Time, about, one_of

Severity = Literal["critical", "warning"]
Kind = Literal[
    "no_consumer",
    "failure_rate",
    "circuit_open",
    "poison_item",
    "key_held_up",
    "backlog_age",
    "dead_letters",
    "queue_paused",
    "leases_expiring",
    "slow_handlers",
    "consumer_hoarding",
    "produce_refused",
    "partition_unavailable",
    "query_failed",
    "backend_down",
    "backend_slow",
    "bucket_throttled",
    "disk_full",
    "instance_silent",
    "instance_idle",
    "clock_wrong",
    "upgrade_open",
]


class ProblemInfo(Answer, frozen=True, kw_only=True):
    """One thing that is wrong, what is known of its cause, and the command that mends it."""

    kind: Annotated[str, one_of(Kind), about("Kind of the problem; docs/guides/operations.md has a row for each.")]
    severity: Annotated[
        str, one_of(Severity), about("`critical`: items or calls fail now. `warning`: it gets worse unless an operator acts.")
    ]
    subject: Annotated[str, about("The queue, backend, instance or client concerned, by name.")]
    queue_name: Annotated[QueueName | None, about("The queue concerned; null: none in particular.")] = None
    message: Annotated[str, about("One sentence with the figure that shows it.")]
    cause: Annotated[str, about("The cause, as far as it is known; empty: not known.")] = ""
    command: Annotated[str, about("A command that fixes it, or shows more.")] = ""
    page: Annotated[str, about("The dashboard page about it, as a path.")] = ""
    since: Annotated[Time, about("When it began, as far as this server knows.")]
    instance: Annotated[str | None, about("Instance that found it; null: a standalone server.")] = None


class ProblemList(Answer, frozen=True, kw_only=True):
    """What is wrong now, most severe first, and what was looked at."""

    items: Annotated[list[ProblemInfo], about("The problems that the key may see.")] = []
    queues: Annotated[int, about("Number of queues that were checked.")] = 0
    watched: Annotated[bool, about("False: the server started only seconds ago and has not checked yet.")] = True
    silent: Annotated[list[str], about("Instances that did not answer. Their problems are missing.")] = []
