"""What a reader can have done to queues, their partitions and items."""

from __future__ import annotations

from typing import Final

from sluiceway.contract.queue_settings import QUEUE_SETTINGS, Setting
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


def _field(setting: Setting) -> Field:
    flag = f"--{setting.name.replace('_', '-')}"
    hint = f"{setting.about} Default: {setting.default_text}."
    if setting.form.kind == "backoff":
        hint = f"{hint} Two durations, such as 1s 10m."
        return Field(setting.name, setting.label, flag=flag, hint=hint, means=_backoff, words=lambda text: [flag, *text.split()])
    means = _logical_queues if setting.form.kind == "logical queues" else None
    return Field(setting.name, setting.label, "number" if setting.form.kind == "count" else "text", flag, hint, means=means)


SETTINGS: Final = tuple(_field(each) for each in QUEUE_SETTINGS.values())
"""Each of them changes nothing while it is empty."""

_UNSET: Final = tuple(
    Field(
        f"no_{each.name}",
        f"No {each.label.lower()} ({each.unset})",
        "flag",
        f"--no-{each.name.replace('_', '-')}",
        gives=(each.name, None),
    )
    for each in QUEUE_SETTINGS.values()
    if each.is_nullable
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
        "Blank = server default.",
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
        "Blank = unchanged. Takes effect at once. Refused if the queue has changed since you opened this page.",
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
