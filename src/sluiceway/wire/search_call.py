"""The search call of a queue, and its answer as JSON."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import Duration, ItemIdText, ItemKey, Label
from sluiceway.contract.item_answers import BrowseState, Searched
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.ids import parse_item_id
from sluiceway.kernel.limits import MAX_HEADERS, MAX_ITEMS_JSON, MAX_SEARCHED
from sluiceway.model.inspection import BEGIN, Place, Search, SearchedQueue
from sluiceway.model.item_filter import ItemFilter
from sluiceway.model.queue import QueueRecord
from sluiceway.wire.browse_call import items_of
from sluiceway.wire.decoding import Call, JsonDecoder, given_text, request_timeout

_PLACE: Final = r"^(0|[1-9][0-9]{0,8})\.(line|scheduled)\.(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})$"
_IS_PLACE: Final = re.compile(_PLACE, re.ASCII)
STATES: Final[tuple[BrowseState, ...]] = ("ready", "leased", "scheduled")


class SearchCall(Call):
    id: ItemIdText | None = None
    kind: Label | None = None
    reference: Label | None = None
    key: ItemKey | None = None
    unique_key: ItemKey | None = None
    headers: Annotated[dict[str, str | None], Meta(extra_json_schema={"maxProperties": MAX_HEADERS})] | None = None
    contains: Label | None = None
    reason: Label | None = None
    states: Annotated[list[BrowseState], Meta(extra_json_schema={"minItems": 1, "maxItems": 3, "uniqueItems": True})] | None = None
    next: Annotated[str, Meta(extra_json_schema={"pattern": _PLACE, "maxLength": 60})] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100
    look_at: Annotated[int, Meta(ge=1, le=MAX_SEARCHED)] = MAX_SEARCHED
    payload: bool = True
    request_timeout: Duration = "5s"

    def request(self) -> Search:
        """The search to run, from the partition and the place on that `next` names. Raises `invalid_request`."""
        states = STATES if self.states is None else tuple(self.states)
        if not states or len(set(states)) < len(states):
            raise invalid("states", "expected one or more of ready, leased and scheduled, each once")
        contains = given_text(self.contains, "contains")
        wanted = ItemFilter(
            None if self.id is None else parse_item_id(self.id, "id"),
            given_text(self.kind, "kind"),
            given_text(self.reference, "reference"),
            given_text(self.key, "key"),
            given_text(self.unique_key, "unique_key"),
            self._headers(),
            None if contains is None else contains.encode(),
            given_text(self.reason, "reason"),
        )
        partition, start = _place(self.next)
        timeout = request_timeout(self.request_timeout)
        return Search(partition, states, wanted, self.limit, self.look_at, timeout, start, self.payload)

    def _headers(self) -> dict[str, str | None]:
        headers = self.headers or {}
        if len(headers) > MAX_HEADERS:
            raise invalid("headers", f"expected at most {MAX_HEADERS} headers")
        for name, value in headers.items():
            given_text(name, "headers")
            given_text(value or None, "headers")
        return headers


def _place(text: str | None) -> tuple[int, Place]:
    """The partition, and the place in it, at which a search continues. Raises `invalid_request`."""
    if text is None:
        return 0, BEGIN
    found = _IS_PLACE.fullmatch(text)
    if found is None:
        raise invalid("next", "expected the `next` of the previous answer")
    return int(found[1]), Place(found[2] == "scheduled", int(found[3]), int(found[4]))


decode_search = JsonDecoder(SearchCall)


def searched(record: QueueRecord, request: Search, found: SearchedQueue) -> bytes:
    """What was found, as JSON."""
    items = [item for rows in found.rows for item in items_of(record, *rows, payload=request.payload)]
    following = None
    if found.next is not None:
        partition, place = found.next
        following = f"{partition}.{'scheduled' if place.scheduled else 'line'}.{place.at}.{place.row}"
    answer = Searched(queue_name=record.queue_name, items=items, looked_at=found.looked_at, skipped=found.skipped, next=following)
    return msgspec.json.encode(answer)
