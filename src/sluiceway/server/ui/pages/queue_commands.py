"""Commands on queues and partitions."""

from __future__ import annotations

from typing import Final

from sluiceway.contract.queue_settings import QUEUE_SETTINGS, Setting, read_circuit_breaker, read_key_weights, read_rate
from sluiceway.kernel.errors import invalid
from sluiceway.server.ui.view import Command, Field, whole

QUEUE: Final = Field("queue_name", "Queue", "known", required=True)
PARTITION: Final = Field("partition", "Partition", "known", required=True, means=lambda text: whole(text, "partition"))


def _backoff(text: str) -> dict[str, str]:
    first, _, most = text.partition(" ")
    if not most.strip():
        raise invalid("retry_backoff", "expected two durations, the first and the longest delay, such as 1s 10m")
    return {"first": first, "most": most.strip()}


def _breaker(text: str) -> dict[str, float]:
    try:
        breaker = read_circuit_breaker(text)
    except ValueError as error:
        raise invalid("circuit_breaker", str(error)) from None
    return {"failure_rate": breaker.failure_rate, "failures": breaker.failures}


def _rate(text: str, name: str) -> dict[str, float]:
    try:
        rate = read_rate(text)
    except ValueError as error:
        raise invalid(name, str(error)) from None
    return {"per_second": rate.per_second, "burst": rate.burst}


def _key_weights(text: str) -> dict[str, int]:
    try:
        return read_key_weights(text)
    except ValueError as error:
        raise invalid("key_weights", str(error)) from None


def _logical_queues(text: str) -> int | str:
    return text if text == "auto" else whole(text, "logical_queues")


def _field(setting: Setting, is_new: bool) -> Field:
    flag = f"--{setting.name.replace('_', '-')}"
    hint = f"{setting.about} Default: {setting.new_text if is_new else setting.default_text}."
    if setting.form.kind == "backoff":
        hint = f"{hint} Two durations, such as 1s 10m."
        return Field(setting.name, setting.label, flag=flag, hint=hint, means=_backoff, words=lambda text: [flag, *text.split()])
    if setting.form.kind == "breaker":
        hint = f"{hint} The share of failed items, such as 0.5, and after a colon their number, such as 0.5:20."
        return Field(setting.name, setting.label, flag=flag, hint=hint, means=_breaker)
    if setting.form.kind in ("key rate", "rate"):
        hint = f"{hint} Items a second, such as 10, and after a colon how many at once, such as 10:50."
        return Field(setting.name, setting.label, flag=flag, hint=hint, means=lambda text: _rate(text, setting.name))
    if setting.form.kind == "key weights":
        hint = f"{hint} Such as tenant-a=5 tenant-b=2."
        return Field(setting.name, setting.label, flag=flag, hint=hint, means=_key_weights)
    means = _logical_queues if setting.form.kind == "logical queues" else None
    return Field(setting.name, setting.label, "number" if setting.form.kind == "count" else "text", flag, hint, means=means)


def _off(setting: Setting) -> Field:
    """To go without the setting."""
    flag = f"--no-{setting.name.replace('_', '-')}"
    return Field(f"no_{setting.name}", f"No {setting.label.lower()} ({setting.unset})", "flag", flag, gives=(setting.name, None))


_OF_NEW: Final = (
    *(_field(each, True) for each in QUEUE_SETTINGS.values()),
    *(_off(each) for each in QUEUE_SETTINGS.values() if each.new is not None),
)
_TO_CHANGE: Final = (
    *(_field(each, False) for each in QUEUE_SETTINGS.values()),
    *(_off(each) for each in QUEUE_SETTINGS.values() if each.can_be_off),
)
"""Form fields of the queue settings; a blank field changes nothing."""

VERBS: Final = Field(
    "verbs",
    "Operations",
    "select",
    choices=(("", "producing and leasing"), ("produce", "producing only"), ("lease", "leasing only")),
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
            Field("queue_name", "Name", required=True, hint="1 to 128 characters of A-Z a-z 0-9 _ . -, not starting with . or -"),
            Field("requested_partitions", "Partitions", "number", "--partitions", "1 to 1,000; more can be added later. Blank = 1."),
            *_OF_NEW,
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
        (QUEUE, Field("version", "Version", "known", "--if-version", means=lambda text: whole(text, "version")), *_TO_CHANGE),
        then="/ui/queues/{queue_name}/settings",
    ),
    Command(
        "queue.pause",
        "Pause a queue",
        "Pause",
        "Stops producing and leasing until the queue is resumed. Leased items can still be settled.",
        "queue.pause",
        "manage",
        "queue pause",
        (QUEUE, VERBS),
    ),
    Command(
        "queue.resume",
        "Resume a queue",
        "Resume",
        "Producing and leasing continue.",
        "queue.resume",
        "manage",
        "queue resume",
        (QUEUE, VERBS),
    ),
    Command(
        "queue.clear",
        "Clear a queue",
        "Clear",
        "Permanently drops the ready items of all partitions. They do not go to the dead queue. Leased items stay.",
        "queue.clear",
        "manage",
        "queue clear",
        (QUEUE, Field("scheduled", "Include scheduled items", "flag", "--scheduled")),
        destroys=True,
        tells=True,
    ),
    Command(
        "queues.delete",
        "Delete a queue",
        "Delete",
        "Permanently deletes the queue. Its item IDs become invalid. A queue with items is deleted only with the option below.",
        "queues.delete",
        "manage",
        "queue delete",
        (QUEUE, Field("force", "Delete remaining items", "flag", "--force")),
        destroys=True,
        then="/ui/queues",
    ),
    Command(
        "partition.pause",
        "Pause a partition",
        "Pause",
        "Stops producing to and leasing from the partition until it is resumed. Leased items can still be settled.",
        "partition.pause",
        "manage",
        "partition pause",
        (QUEUE, PARTITION),
    ),
    Command(
        "partition.resume",
        "Resume a partition",
        "Resume",
        "Producing to and leasing from the partition continue.",
        "partition.resume",
        "manage",
        "partition resume",
        (QUEUE, PARTITION),
    ),
)
