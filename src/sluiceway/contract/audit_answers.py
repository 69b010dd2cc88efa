"""The audit trail, as the server answers it."""

from __future__ import annotations

from typing import Annotated, Any

from sluiceway.contract.fields import Answer, QueueName, Time, about


class AuditEntry(Answer, frozen=True, kw_only=True):
    """A change: what, when, and by which key."""

    id: Annotated[str, about("Id of the entry. Later entries have greater ids.")]
    at: Annotated[Time, about("When.")]
    actor: Annotated[str, about("Name of the API key of the request.")]
    action: Annotated[str, about("Name of the call.")]
    queue_name: Annotated[QueueName | None, about("The changed queue; null: none.")] = None
    request_id: Annotated[str, about("Finds the request in the server's log.")] = ""
    detail: Annotated[dict[str, Any], about("Details of the change. The keys depend on the `action`.")] = {}


class AuditPage(Answer, frozen=True, kw_only=True):
    """Some entries, newest first."""

    items: Annotated[list[AuditEntry], about("The entries of this page.")]
    next: Annotated[str | None, about("The pivot of the next, older page; null on the last.")] = None
