"""JSON codec of the calls on leased items: complete, release, retry, settle, extend."""

from __future__ import annotations

from itertools import repeat
from typing import Annotated, Any, Literal

import msgspec

from sluiceway.contract.fields import (
    SOME_ARROW,
    SOME_JSON,
    UP_TO_JSON,
    Duration,
    ItemIdText,
    Label,
    LeaseIdText,
    ShortText,
    TimeText,
    TraceText,
)
from sluiceway.kernel.clock import Millis, check_duration, parse_time
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON, MAX_SCHEDULE, MAX_TRACE_BYTES
from sluiceway.kernel.names import check_text
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import DONE, Disposition, Extend, Settle
from sluiceway.wire.decoding import Call, JsonDecoder, PartitionNumber, given_text, lease_timeout, request_timeout
from sluiceway.wire.item_limits import check_count
from sluiceway.wire.outcome_selection import Grouped, check_partition, group_items, group_leases, select_leases


class HandlerTime(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The handler time of each of some items."""

    handler_time: Duration
    items: Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS_ARROW)] = 1


HandlerTimes = Annotated[tuple[HandlerTime, ...], UP_TO_JSON]


class SettleFields(Call):
    """The fields of every settling call."""

    request_timeout: Duration = "30s"


class _CheckedCall(SettleFields):
    """A call with two optional checks: `client_id` must own the leases, and `strict` fails if an id is ignored."""

    client_id: Label | None = None
    strict: bool = False

    def owner(self) -> str | None:
        """The client that must own the leases; None: any. Raises `invalid_request`."""
        return given_text(self.client_id, "client_id")


class _IdsCall(_CheckedCall):
    """A call that names items, leases, or both."""

    ids: Annotated[list[ItemIdText], UP_TO_JSON] | None = None
    lease_ids: Annotated[list[LeaseIdText], UP_TO_JSON] | None = None

    def grouped(
        self, record: QueueRecord, disposition: Disposition, partition: int | None
    ) -> tuple[Grouped, list[tuple[int, int]], list[str]]:
        """The items by partition, the leases as (partition, number), and the ids of leases of other queues.

        Raises `invalid_request` and `too_many_items`.
        """
        ids, lease_ids = self.ids or [], self.lease_ids or []
        if not ids and not lease_ids:
            raise invalid("ids", "give at least one id in ids or lease_ids")
        check_count(ids, "ids", MAX_ITEMS_JSON, least=0)
        check_count(lease_ids, "lease_ids", MAX_ITEMS_JSON, least=0)
        check_partition(partition, record, removed=True)
        grouped = group_items(ids, repeat(disposition), record, "ids[{}]".format, partition) if ids else Grouped({}, [])
        return grouped, *group_leases(lease_ids, record, partition)


class SelectCall(_IdsCall):
    """`queue.complete` and `queue.release`: one outcome for all named items and leases."""

    partition: PartitionNumber | None = None

    def request(self, record: QueueRecord, disposition: Disposition) -> Settle:
        """The settle to run, with `disposition` for all. Raises `invalid_request` and `too_many_items`."""
        grouped, leases, foreign = self.grouped(record, disposition, self.partition)
        select_leases(grouped, leases, disposition)
        return Settle(
            grouped.selections,
            request_timeout(self.request_timeout),
            foreign=grouped.foreign + foreign,
            client_id=self.owner(),
            strict=self.strict,
        )


class CompleteCall(SelectCall):
    """`queue.complete`: also the items' handler times."""

    handler_times: HandlerTimes = ()

    def done(self, record: QueueRecord) -> Settle:
        """The settle to run. Raises `invalid_request` and `too_many_items`."""
        wanted = self.request(record, DONE)
        wanted.handler_times = [
            (check_duration(each.handler_time, f"handler_times[{at}].handler_time", 0, MAX_SCHEDULE), each.items)
            for at, each in enumerate(self.handler_times)
        ]
        return wanted


class Completion(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What `queue.lease` completes, with the fields of `queue.complete`."""

    ids: Annotated[list[ItemIdText], UP_TO_JSON] | None = None
    lease_ids: Annotated[list[LeaseIdText], UP_TO_JSON] | None = None
    handler_times: HandlerTimes = ()
    request_timeout: Duration = "30s"

    def done(self, record: QueueRecord) -> Settle:
        """The settle to run. Raises `invalid_request` and `too_many_items`, which name the field within `complete`."""
        call = CompleteCall(
            queue_name=record.queue_name,
            ids=self.ids,
            lease_ids=self.lease_ids,
            handler_times=self.handler_times,
            request_timeout=self.request_timeout,
        )
        try:
            return call.done(record)
        except SluicewayError as error:
            raise SluicewayError(error.code, f"complete.{error.detail}", f"complete.{error.field}") from None


class RetryItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: ItemIdText
    retry_at: TimeText | None = None
    retry_after: Duration | None = None
    dead: bool = False
    reason: ShortText | None = None
    trace: TraceText | None = None
    host: ShortText | None = None
    handler_time: Duration | None = None

    def disposition(self, at: int, now: Millis) -> Disposition:
        """The disposition of the item at index `at` of the call. `now` is in milliseconds. Raises `invalid_request`."""
        return self._outcome(f"items[{at}]", now)._replace(**self._failure(f"items[{at}]"))

    def _failure(self, path: str) -> dict[str, Any]:
        """What is known of the failed attempt."""
        found: dict[str, Any] = {}
        if self.trace:
            found["trace"] = check_text(self.trace, f"{path}.trace", MAX_TRACE_BYTES)
        if self.host:
            found["host"] = check_text(self.host, f"{path}.host")
        if self.handler_time is not None:
            found["handler_time"] = check_duration(self.handler_time, f"{path}.handler_time", 0, MAX_SCHEDULE)
        return found

    def _outcome(self, path: str, now: Millis) -> Disposition:
        reason = "" if self.reason is None else check_text(self.reason, f"{path}.reason")
        if self.dead:
            if self.retry_at is not None or self.retry_after is not None:
                raise invalid(f"{path}.dead", "a dead item is not retried: leave out retry_at and retry_after")
            return Disposition("dead", reason=reason)
        if self.retry_at is not None:
            if self.retry_after is not None:
                raise invalid(f"{path}.retry_after", "an item has retry_at or retry_after, not both")
            moment = parse_time(self.retry_at, f"{path}.retry_at")
            if moment > now + MAX_SCHEDULE:
                raise invalid(f"{path}.retry_at", f"more than {MAX_SCHEDULE // 86_400_000} days ahead")
            return Disposition("retry", retry_at=moment, reason=reason)
        return Disposition("retry", retry_after=_delay(self.retry_after, path), reason=reason)


class RetryCall(_CheckedCall, kw_only=True):
    items: Annotated[list[RetryItem], SOME_JSON]
    partition: PartitionNumber | None = None

    def request(self, record: QueueRecord, now: Millis) -> Settle:
        """The settle to run. `now` is in milliseconds. Raises `invalid_request` and `too_many_items`."""
        check_count(self.items, "items", MAX_ITEMS_JSON)
        check_partition(self.partition, record, removed=True)
        dispositions = [item.disposition(at, now) for at, item in enumerate(self.items)]
        grouped = group_items([item.id for item in self.items], dispositions, record, "items[{}].id".format, self.partition)
        return Settle(
            grouped.selections,
            request_timeout(self.request_timeout),
            foreign=grouped.foreign,
            client_id=self.owner(),
            strict=self.strict,
        )


class SettleItem(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: ItemIdText
    outcome: Literal["done", "retry", "dead"]
    retry_after: Duration | None = None
    reason: ShortText | None = None

    def disposition(self, at: int) -> Disposition:
        """The disposition of the item at index `at` of the call. Raises `invalid_request`."""
        path = f"items[{at}]"
        if self.retry_after is not None and self.outcome != "retry":
            raise invalid(f"{path}.retry_after", "requires the outcome retry")
        reason = "" if self.reason is None else check_text(self.reason, f"{path}.reason")
        return Disposition(self.outcome, retry_after=_delay(self.retry_after, path), reason=reason)


class SettleCall(SettleFields, kw_only=True):
    items: Annotated[list[SettleItem], SOME_ARROW]

    def request(self, record: QueueRecord) -> Settle:
        """The staging settle to run. Raises `invalid_request` and `too_many_items`."""
        check_count(self.items, "items", MAX_ITEMS_ARROW)
        dispositions = [item.disposition(at) for at, item in enumerate(self.items)]
        grouped = group_items([item.id for item in self.items], dispositions, record, "items[{}].id".format)
        return Settle(grouped.selections, request_timeout(self.request_timeout), stage=True, foreign=grouped.foreign)


class SettleQuery(SettleFields, kw_only=True):
    """The query string of an Arrow settle."""

    incarnation: ShortText


class ExtendCall(_IdsCall):
    lease_timeout: Duration | None = None

    def request(self, record: QueueRecord) -> Extend:
        """The extend to run. Raises `invalid_request` and `too_many_items`."""
        # An extend has no disposition. Grouping needs one, so any will do.
        grouped, leases, foreign = self.grouped(record, DONE, None)
        offsets = {partition: chosen.offsets for partition, (chosen,) in grouped.selections.items() if chosen.offsets is not None}
        return Extend(
            leases,
            request_timeout(self.request_timeout),
            lease_timeout(self.lease_timeout, record),
            foreign=grouped.foreign + foreign,
            offsets=offsets,
            client_id=self.owner(),
            strict=self.strict,
        )


def _delay(text: str | None, path: str) -> Millis | None:
    return None if text is None else check_duration(text, f"{path}.retry_after", 0, MAX_SCHEDULE)


decode_complete = JsonDecoder(CompleteCall)
decode_select = JsonDecoder(SelectCall)
decode_retry = JsonDecoder(RetryCall)
decode_settle = JsonDecoder(SettleCall)
decode_extend = JsonDecoder(ExtendCall)
