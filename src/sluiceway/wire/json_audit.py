"""JSON codec of the audit trail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.audit_answers import AuditEntry, AuditPage
from sluiceway.contract.fields import Label, QueueName, TimeText, time_field
from sluiceway.kernel.clock import Millis, parse_time
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.model import audit as model
from sluiceway.wire.decoding import JsonDecoder, given_queue, given_text


class AuditListCall(msgspec.Struct, forbid_unknown_fields=True):
    """List audit entries, newest first. `pivot`: the id of the previous page's last entry; the page continues with older ones."""

    pivot: Label | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100
    queue_name: QueueName | None = None
    action: Label | None = None
    actor: Label | None = None
    since: TimeText | None = None
    until: TimeText | None = None

    def checked(self) -> AuditListCall:
        """The call itself, once its texts are checked. Raises `invalid_request`."""
        given_text(self.pivot, "pivot")
        given_queue(self.queue_name, "queue_name")
        given_text(self.action, "action")
        given_text(self.actor, "actor")
        return self

    def period(self) -> tuple[Millis, Millis | None]:
        """The start and the end of the period in milliseconds, the end exclusive. None: no end. Raises `invalid_request`."""
        since = 0 if self.since is None else max(0, parse_time(self.since, "since"))
        return since, None if self.until is None else parse_time(self.until, "until")


decode_audit_list = JsonDecoder(AuditListCall)


def audit_page(entries: Sequence[model.AuditEntry], limit: int) -> bytes:
    """The first `limit` of the entries as JSON. Pass one entry more than `limit` to say that there is a next page."""
    following = entries[limit - 1].id if len(entries) > limit else None
    return msgspec.json.encode(AuditPage(items=[_entry(entry) for entry in entries[:limit]], next=following))


def _entry(entry: model.AuditEntry) -> AuditEntry:
    return AuditEntry(
        id=entry.id,
        at=time_field(entry.at),
        actor=entry.actor,
        action=entry.action,
        queue_name=entry.queue_name or None,
        request_id=entry.request_id,
        detail=entry.detail,
    )
