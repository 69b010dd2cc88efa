"""JSON codec of the calls on whole queues: settings, pause, clear, redrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sluiceway.contract.fields import SOME, Duration, Label, Pivot, QueueName
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, Verb, settings_of_new
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_PAGE, MAX_PARTITIONS, MAX_SHOWN_KEYS
from sluiceway.kernel.names import QUEUE_NAME, check_queue_name
from sluiceway.model.requests import Clear, QueuePatch, QueueSpec, Redrive
from sluiceway.wire.decoding import Call, JsonDecoder, Natural, given_queue, given_text, request_timeout

_FIXED = ("incarnation", "created_at", "updated_at", "partitions", "paused", "rebalance")
"""Fields of `queues.info` that are not settings. A client that sends a whole answer back is told that they are read-only, not unknown."""

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
    """The settings of a queue. An absent setting keeps its value; null is the default, which for most is to go without."""

    def settings(self) -> dict[str, Any]:
        """The settings in the call by name, with values as in `QueueSettings`. Raises `invalid_request`."""
        named = {name: getattr(self, name) for name in QUEUE_SETTINGS}
        return {name: QUEUE_SETTINGS[name].read(value) for name, value in named.items() if value is not UNSET}


class CreateCall(_Settings):
    requested_partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = 1

    def spec(self, is_safe: bool = False) -> QueueSpec:
        """The queue to create. `is_safe`: settings that are absent are those of a new queue, not the defaults. Raises `invalid_request`."""
        named = self.settings()
        settings = (settings_of_new(check_queue_name(self.queue_name)) if is_safe else {}) | named
        makes = "dead_queue" not in named and "dead_queue" in settings
        if makes and not QUEUE_NAME.fullmatch(settings["dead_queue"]):
            detail = f"{settings['dead_queue'][:64]!r}… is too long for a queue's name: name another dead queue, or pass null for none"
            raise invalid("dead_queue", detail)
        spec = QueueSpec(check_queue_name(self.queue_name), self.requested_partitions, makes, **settings)
        if spec.lease_timeout > spec.max_lease_timeout:
            field = "lease_timeout" if "lease_timeout" in settings else "max_lease_timeout"
            most = format_duration(spec.max_lease_timeout)
            raise invalid(field, f"lease_timeout is {format_duration(spec.lease_timeout)}, longer than max_lease_timeout, which is {most}")
        return spec


class UpdateCall(_Settings):
    version: Natural | None = None
    requested_partitions: Natural | None = None
    """Accepted if it equals the queue's number, because Querator's clients send back every field of the queue."""

    def patch(self) -> QueuePatch:
        """The change to make. Raises `invalid_request`, also if the call changes nothing."""
        check_queue_name(self.queue_name)
        named = self.settings()
        if not named and self.requested_partitions is None:
            raise SluicewayError("invalid_request", f"nothing to change; give at least one of {', '.join(QUEUE_SETTINGS)}")
        return QueuePatch(named, self.version)

    def check_partitions(self, partitions: int) -> None:
        """Raises `invalid_request` if `requested_partitions` differs from the queue's number of partitions."""
        if self.requested_partitions not in (None, partitions):
            detail = f"cannot be changed with queues.update; it is {partitions}. Leave it out, and use queue.rebalance"
            raise invalid("requested_partitions", detail)


class ListCall(msgspec.Struct, forbid_unknown_fields=True):
    pivot: Pivot | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 100


class QueueCall(Call):
    """`queues.info` and `queue.stats`: only the queue's name."""


class KeysCall(Call):
    limit: Annotated[int, Meta(ge=1, le=MAX_SHOWN_KEYS)] = 20


class DepthQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query string of `queue.depth`."""

    queue_name: QueueName


class DeleteCall(Call):
    force: bool = False


class PauseCall(Call):
    """`queue.pause` and `queue.resume`."""

    verbs: Annotated[tuple[Verb, ...], SOME] = ("produce", "lease")

    def wanted(self) -> Sequence[Verb]:
        """The verbs, each once. Raises `invalid_request` if there are none."""
        if not self.verbs:
            raise invalid("verbs", "must name produce, lease or both")
        return tuple(dict.fromkeys(self.verbs))


class ClearCall(Call):
    ready: bool = True
    scheduled: bool = False
    request_timeout: Duration = "30s"

    def request(self) -> Clear:
        """The clear to run. Raises `invalid_request` if it would drop nothing."""
        if not self.ready and not self.scheduled:
            raise invalid("ready", "nothing to drop; set ready or scheduled to true")
        return Clear(request_timeout(self.request_timeout), self.ready, self.scheduled)


class RedriveCall(Call):
    target: QueueName | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_ARROW)] = 1_000
    reason: Label | None = None
    source: QueueName | None = None
    dry_run: bool = False
    request_timeout: Duration = "30s"

    def request(self) -> Redrive:
        """The redrive to run. Raises `invalid_request`."""
        target = given_queue(self.target, "target")
        if target == self.queue_name:
            raise invalid("target", "must differ from the queue that the items come from")
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
    """Decode an update. Raises as JsonDecoder does. For a read-only field of the queue, the error says so."""
    try:
        return _decode_update(body)
    except SluicewayError as error:
        if error.field in _FIXED:
            raise invalid(error.field, "cannot be changed with queues.update; leave it out") from None
        raise


decode_create = JsonDecoder(CreateCall)
decode_list = JsonDecoder(ListCall)
decode_queue_call = JsonDecoder(QueueCall)
decode_keys = JsonDecoder(KeysCall)
decode_delete = JsonDecoder(DeleteCall)
decode_pause = JsonDecoder(PauseCall)
decode_clear = JsonDecoder(ClearCall)
decode_redrive = JsonDecoder(RedriveCall)
