"""The call on the audit trail."""

from __future__ import annotations

from collections.abc import Callable

from sluiceway.contract.audit_answers import AuditPage
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire.json_audit import AuditListCall, audit_page, decode_audit_list


class AuditCalls:
    """The audit call. `trail` is called each time: the service has a trail once it is started."""

    def __init__(self, trail: Callable[[], AuditTrail]) -> None:
        self._trail = trail

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("/v1/audit.list", "admin", self._list, AuditListCall, AuditPage, "List the audit trail, newest first")]

    async def _list(self, request: Request) -> Body:
        call = decode_audit_list(request.body).checked()
        about = (call.pivot or "", call.queue_name or "", call.action or "", call.actor or "")
        entries = await self._trail().list(call.limit + 1, *about, *call.period())
        return audit_page(entries, call.limit)
