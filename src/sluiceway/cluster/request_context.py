"""What goes along with a request to other instances, and which of them did its work, so that its client can be told where to go."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""That of the request of this context; empty: there is none."""
SERVED_BY: ContextVar[set[str] | None] = ContextVar("served_by", default=None)
"""The addresses of those that have done something for the request of this context; '' is this instance. None: nobody wants to know."""


def note(address: str, answer: object) -> None:
    """That instance has answered. An answer that is empty, as a lease of nothing, is no work."""
    served_by = SERVED_BY.get()
    if served_by is not None and (not hasattr(answer, "leases") or answer.leases):
        served_by.add(address)


def only_other(served_by: set[str]) -> str | None:
    """The address of the one other instance that has done it all; None: there is no such."""
    return next(iter(served_by)) or None if len(served_by) == 1 else None
