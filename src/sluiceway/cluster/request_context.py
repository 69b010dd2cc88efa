"""Request context: the id passed on to other instances, and the instances that did the work, so that the client can go there."""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of this context's request; empty: none."""
SERVED_BY: ContextVar[set[str] | None] = ContextVar("served_by", default=None)
"""Addresses of the instances that served this context's request; '' is this instance. None: not recorded."""


def note(address: str, answer: object) -> None:
    """Record that the instance at this address has answered. An empty answer, such as a lease of no items, does not count."""
    served_by = SERVED_BY.get()
    if served_by is not None and (not hasattr(answer, "leases") or answer.leases):
        served_by.add(address)


def only_other(served_by: set[str]) -> str | None:
    """Return the address of the other instance that did all the work; None if there is none."""
    return next(iter(served_by)) or None if len(served_by) == 1 else None
