"""What a reader can have done to queues, their partitions and items."""

from __future__ import annotations

from typing import Final

from sluiceway.kernel.errors import invalid
from sluiceway.server.ui.view import Command, Field, whole

QUEUE: Final = Field("queue_name", "Queue", "known", required=True)
PARTITION: Final = Field("partition", "Partition", "known", required=True, means=lambda text: whole(text, "partition"))


def _backoff(text: str) -> dict[str, str]:
    first, _, most = text.partition(" ")
    if not most.strip():
        raise invalid("retry_backoff", "expected two durations, the first wait and the longest, such as 1s 10m")
    return {"first": first, "most": most.strip()}


def _logical_queues(text: str) -> int | str:
    return text if text == "auto" else whole(text, "logical_queues")


SETTINGS: Final = (
    Field("lease_timeout", "Lease timeout", flag="--lease-timeout", hint="How long a lease lives that does not say otherwise, such as 1m."),
    Field("max_lease_timeout", "Longest lease", flag="--max-lease-timeout", hint="The most that a lease may ask for, such as 30d."),
    Field("max_attempts", "Attempts at most", "number", "--max-attempts", "Leases an item may use up before it is dead; 0: no limit."),
    Field("dead_queue", "Dead queue", flag="--dead-queue", hint="Where dead items go. It must exist, and have none itself."),
    Field(
        "expire_timeout",
        "Items expire after",
        flag="--expire-timeout",
        hint="Not completed so long after it was due, an item is dead; 0s: never.",
    ),
    Field(
        "retry_backoff",
        "Retry back-off",
        flag="--retry-backoff",
        hint="Two durations: a retry waits for the first, then twice as long each time, and for the second at most, such as 1s 10m.",
        means=_backoff,
        words=lambda text: ["--retry-backoff", *text.split()],
    ),
    Field(
        "idempotency_window",
        "Idempotency window",
        flag="--idempotency-window",
        hint="How long an idempotency key is remembered: 10m to 1d.",
    ),
    Field("write_timeout", "Write timeout", flag="--write-timeout", hint="A commit that takes longer has an unknown outcome; 15m at most."),
    Field(
        "logical_queues",
        "Logical queues",
        flag="--logical-queues",
        hint="On how many instances it lies: a number, or auto.",
        means=_logical_queues,
    ),
    Field("reference", "Reference", flag="--reference", hint="A note of yours."),
)
"""Each of them changes nothing while it is empty."""

_UNSET: Final = (
    Field("no_dead_queue", "No dead queue: dead items are dropped", "flag", "--no-dead-queue", gives=("dead_queue", None)),
    Field("no_retry_backoff", "No retry back-off", "flag", "--no-retry-backoff", gives=("retry_backoff", None)),
    Field("no_write_timeout", "Write timeout as the backend says", "flag", "--no-write-timeout", gives=("write_timeout", None)),
    Field("no_logical_queues", "On all instances", "flag", "--no-logical-queues", gives=("logical_queues", None)),
)

VERBS: Final = Field(
    "verbs",
    "What",
    "select",
    choices=(("", "producing and leasing"), ("produce", "only producing"), ("lease", "only leasing")),
    means=lambda text: [text],
    words=lambda text: [f"--{text}"],
)

COMMANDS: Final = (
    Command(
        "queues.create",
        "Create a queue",
        "Create a queue",
        "What is left empty is as the server has it by default.",
        "queues.create",
        "manage",
        "queue create",
        (
            Field("queue_name", "Name", required=True, hint="1 to 128 of A-Z a-z 0-9 _ . - and not beginning with . or -"),
            Field("requested_partitions", "Partitions", "number", "--partitions", "1 to 1,000; more can be added later. Empty: 1."),
            *SETTINGS,
        ),
        then="/ui/queues/{queue_name}",
    ),
    Command(
        "queues.update",
        "Change settings",
        "Change settings",
        "What is left empty stays as it is. It takes effect at once, unless somebody else has changed the queue since you opened this.",
        "queues.update",
        "manage",
        "queue update",
        (QUEUE, Field("version", "Version", "known", "--if-version", means=lambda text: whole(text, "version")), *SETTINGS, *_UNSET),
        then="/ui/queues/{queue_name}/settings",
    ),
    Command(
        "queue.pause",
        "Pause a queue",
        "Pause",
        "Nothing is produced to it or leased from it until it is resumed. What is leased can still be settled.",
        "queue.pause",
        "manage",
        "queue pause",
        (QUEUE, VERBS),
    ),
    Command(
        "queue.resume",
        "Resume a queue",
        "Resume",
        "Producing and leasing go on.",
        "queue.resume",
        "manage",
        "queue resume",
        (QUEUE, VERBS),
    ),
    Command(
        "queue.clear",
        "Clear a queue",
        "Clear",
        "Drops what waits in all of its partitions, for good and without the dead queue. Leased items stay.",
        "queue.clear",
        "manage",
        "queue clear",
        (QUEUE, Field("scheduled", "Also what is scheduled", "flag", "--scheduled")),
        destroys=True,
        tells=True,
    ),
    Command(
        "queues.delete",
        "Delete a queue",
        "Delete",
        "The queue is gone, and its ids with it. One that still has items is deleted only if that is said.",
        "queues.delete",
        "manage",
        "queue delete",
        (QUEUE, Field("force", "Also if items are left in it", "flag", "--force")),
        destroys=True,
        then="/ui/queues",
    ),
    Command(
        "partition.pause",
        "Pause a partition",
        "Pause",
        "It takes nothing and gives out nothing until it is resumed. What is leased can still be settled, and other partitions go on.",
        "partition.pause",
        "manage",
        "partition pause",
        (QUEUE, PARTITION),
    ),
    Command(
        "partition.resume",
        "Resume a partition",
        "Resume",
        "It takes and gives out items again.",
        "partition.resume",
        "manage",
        "partition resume",
        (QUEUE, PARTITION),
    ),
)
