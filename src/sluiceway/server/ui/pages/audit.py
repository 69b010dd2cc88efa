"""The audit trail, newest first."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import groupby
from typing import Final
from urllib.parse import urlencode

from sluiceway.adapters.system import now
from sluiceway.kernel.clock import format_time, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.refusal import refusing
from sluiceway.server.ui.view import View, problem_of
from sluiceway.server.ui.visit import Visit, facts_of

_PAGE: Final = 50
_FILTERS: Final = ("queue_name", "action", "actor", "since", "until")
_FLAGS: Final = {"queue_name": "--queue", "action": "--action", "actor": "--actor", "since": "--since", "until": "--until"}


@refusing
async def _gather(visit: Visit) -> Facts:
    given = {name: text.strip() for name, text in facts_of(visit.query, _FILTERS).items() if text.strip()}
    shown: Facts = {"given": given, "line": _line(given), "older": "", "days": [], "problem": None, "is_first": "pivot" not in visit.query}
    shown["filters"] = urlencode(given)
    try:
        page = await visit.api.call("audit.list", limit=_PAGE, pivot=visit.query.get("pivot") or None, **_asked(given))
    except ProblemError as error:
        if error.code != "invalid_request":
            raise
        return {**shown, "problem": error}
    if page["next"]:
        shown["older"] = "/ui/audit/older?" + urlencode({**given, "pivot": page["next"]})
    shown["days"] = [
        {"day": day, "entries": [_entry(each) for each in entries]} for day, entries in groupby(page["items"], lambda each: each["at"][:10])
    ]
    return shown


def _asked(given: Mapping[str, str]) -> Facts:
    """The fields of the call. Raises ProblemError."""
    fields: Facts = dict(given)
    for name in ("since", "until"):
        if name in fields:
            try:
                fields[name] = _moment(fields[name], name)
            except SluicewayError as error:
                raise problem_of(error) from None
    return fields


def _moment(text: str, field: str) -> str:
    """A time, or an age such as 2h, in the API's format. Raises `invalid_request`."""
    try:
        return format_time(max(0, now() - parse_duration(text, field)))
    except SluicewayError:
        pass
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        # The first hours of year 1 may be out of range in UTC.
        raise invalid(field, f"{text[:40]!r} is neither a time such as 2026-01-31T08:00:00Z nor a duration such as 2h") from None


def _entry(entry: Facts) -> Facts:
    detail = entry["detail"]
    rebalance = detail.get("rebalance") if entry["action"].startswith("rebalance") else None
    return {**entry, "facts": [(name, _told(value)) for name, value in detail.items()], "rebalance": rebalance}


def _told(value: object) -> str:
    if isinstance(value, dict) and value.keys() == {"from", "to"}:
        return f"{_told(value['from'])} → {_told(value['to'])}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _line(given: Mapping[str, str]) -> str:
    return shlex.join(["sluiceway", "audit", "list", *(word for name, text in given.items() for word in (_FLAGS[name], text))])


VIEWS: Final = (
    View("/ui/audit", "Audit", "audit_entries.html", _gather, "Audit", still="audit.html"),
    # Older entries never change.
    View("/ui/audit/older", "Audit", "audit_entries.html", _gather, "Audit", still="audit.html", refreshes=False),
)
