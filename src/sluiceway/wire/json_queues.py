"""JSON calls on queues as a whole: their settings, pausing, clearing, redrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sluiceway.contract.fields import SOME, Duration, Label, Pivot, QueueName
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, Verb
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_PAGE, MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.requests import Clear, QueuePatch, QueueSpec, Redrive
from sluiceway.wire.decoding import Call, JsonDecoder, Natural, given_queue, given_text, request_timeout

_FIXED = ("incarnation", "created_at", "updated_at", "partitions", "paused", "rebalance")
"""What `queues.info` shows beside the settings. It is named, so that an answer sent back whole is not called misspelt."""

if TYPE_CHECKING:
    _SettingFields = Call
else:
    _SettingFields = msgspec.defstruct(
        "_SettingFields",
        [(each.name, each.form.wire | UnsetType | None, UNSET) for each in QUEUE_SETTINGS.values()],
        bases=(Call,),
        forbid_unknown_fields=True,
        kw_only=True,
        gc=False,
    )


class _Settings(_SettingFields):
    """The settings of a queue. One that is absent is left as it is, one that is null takes its default."""

    def settings(self) -> dict[str, Any]:
        """Those that were named, as `QueueSettings` has them. Raises `invalid_request`."""
        named = {name: getattr(self, name) for name in QUEUE_SETTINGS}
        return {name: QUEUE_SETTINGS[name].read(value) for name, value in named.items() if value is not UNSET}


class CreateCall(_Settings):
    requested_partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1

    def spec(self) -> QueueSpec:
        settings = self.settings()
        spec = QueueSpec(check_queue_name(self.queue_name), self.requested_partitions, **settings)
        if spec.lease_timeout > spec.max_lease_timeout:
            field = "lease_timeout" if "lease_timeout" in settings else "max_lease_timeout"
            most = format_duration(spec.max_lease_timeout)
            raise invalid(field, f"leases of {format_duration(spec.lease_timeout)} are longer than the most of {most}")
        return spec


class UpdateCall(_Settings):
    version: Natural | None = None
    requested_partitions: Natural | None = None
    """It may be said as it is: Querator's clients send back all that they were told."""

    def patch(self) -> QueuePatch:
        check_queue_name(self.queue_name)
        named = self.settings()
        if not named and self.requested_partitions is None:
            raise SluicewayError("invalid_request", f"there is nothing to change; name at least one of {', '.join(QUEUE_SETTINGS)}")
        return QueuePatch(named, self.version)

    def check_partitions(self, partitions: int) -> None:
        """Raises `invalid_request` for another number than the queue has."""
        if self.requested_partitions not in (None, partitions):
            detail = f"cannot be changed by queues.update; it is {partitions}, leave it out, and change it by queue.rebalance"
            raise invalid("requested_partitions", detail)


class ListCall(msgspec.Struct, forbid_unknown_fields=True):
    pivot: Pivot | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 100


class QueueCall(Call):
    """`queues.info` and `queue.stats`: the name alone."""


class DeleteCall(Call):
    force: bool = False


class PauseCall(Call):
    """`queue.pause` and `queue.resume`."""

    verbs: Annotated[tuple[Verb, ...], SOME] = ("produce", "lease")

    def wanted(self) -> Sequence[Verb]:
        if not self.verbs:
            raise invalid("verbs", "must name produce, lease or both")
        return tuple(dict.fromkeys(self.verbs))


class ClearCall(Call):
    ready: bool = True
    scheduled: bool = False
    request_timeout: Duration = "30s"

    def request(self) -> Clear:
        if not self.ready and not self.scheduled:
            raise invalid("ready", "there is nothing to drop: ready or scheduled must be true")
        return Clear(request_timeout(self.request_timeout), self.ready, self.scheduled)


class RedriveCall(Call):
    target: QueueName | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_ARROW)] = 1_000
    reason: Label | None = None
    source: QueueName | None = None
    dry_run: bool = False
    request_timeout: Duration = "30s"

    def request(self) -> Redrive:
        target = given_queue(self.target, "target")
        if target == self.queue_name:
            raise invalid("target", "is the queue that the items are taken from")
        return Redrive(
            request_timeout(self.request_timeout),
            self.limit,
            target,
            given_text(self.reason, "reason"),
            given_queue(self.source, "source"),
            self.dry_run,
        )


_decode_update = JsonDecoder(UpdateCall)


def decode_update(body: bytes) -> UpdateCall:
    """As a JsonDecoder; a field that is no setting but part of a queue is said to be unchangeable."""
    try:
        return _decode_update(body)
    except SluicewayError as error:
        if error.field in _FIXED:
            raise invalid(error.field, "cannot be changed by queues.update; leave it out") from None
        raise


decode_create = JsonDecoder(CreateCall)
decode_list = JsonDecoder(ListCall)
decode_queue_call = JsonDecoder(QueueCall)
decode_delete = JsonDecoder(DeleteCall)
decode_pause = JsonDecoder(PauseCall)
decode_clear = JsonDecoder(ClearCall)
decode_redrive = JsonDecoder(RedriveCall)
