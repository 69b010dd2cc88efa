"""Descriptions of fields for the OpenAPI document, by `Type.name`, or by name if it means the same everywhere.

Fields of answers that have their own description are not listed.
"""

from __future__ import annotations

from typing import Final

from sluiceway.contract.consumer_answers import QueryInfo
from sluiceway.contract.fields import texts
from sluiceway.contract.instance_answers import GroupTimes
from sluiceway.contract.key_answers import KeyInfo
from sluiceway.contract.queue_settings import QUEUE_SETTINGS, Setting
from sluiceway.contract.schedule_answers import ScheduleInfo

_CALLS: Final = {
    "queue_name": "1 to 128 of `A-Z a-z 0-9 _ . -`, not beginning with `.` or `-`.",
    "request_timeout": "Maximum duration of the call, up to `15m`.",
    "LeaseCall.request_timeout": "How long to wait for an item, up to `15m`; `0s` answers at once.",
    "client_id": "Only items that this client has leased are affected; null: any client's.",
    "LeaseCall.client_id": "Name of the consumer.",
    "strict": "Fail with `stale_ids` if any id is ignored. The other items are settled nevertheless.",
    "ids": "Item ids, of any partitions.",
    "lease_ids": "Lease ids. They stand for all open items in the leases.",
    "partition": "Number of the partition. In a call, all ids must belong to it.",
    "items": "The items.",
    "pivot": "The page begins after this: the `next` of the previous page.",
    "next": "The pivot of the next page; null on the last.",
    "limit": "Maximum number of entries in the answer.",
    "KeysCall.limit": "Maximum number of keys in each list.",
    "RedriveCall.limit": "Maximum number of items to send back.",
    "force": "Delete the queue even if it has items, or items are in transit to it. They may be lost, or handled twice.",
    "verbs": "What to pause or resume: `produce`, `lease` or both.",
    "ClearCall.ready": "Drop the ready items.",
    "ClearCall.scheduled": "Drop the scheduled items.",
    "target": "Queue that receives the items; null: each item's source queue.",
    "source": "Only items that came from this queue.",
    "RedriveCall.reason": "Only items whose reason contains this text.",
    "dry_run": "Count the items, and move none.",
    "backup_id": "Id of the backup, as `backups.begin` answered.",
    "RecordsCall.incarnation": "The partition's queue; null: the meta store.",
    "RecordsCall.partition": "Number of the partition; null: the meta store.",
    "RecordsCall.start": "First record to read: the `next` of the part before.",
    "BlobsCall.incarnation": "The partition's queue.",
    "BlobsCall.partition": "Number of the partition.",
    "blobs": "Numbers of the blobs to read.",
    "start": "First position in the lease; 0 is its first item.",
    "batch_size": "Maximum number of items to lease. There may be fewer: an answer carries at most 32 MiB of payloads.",
    "max_partitions": "Maximum number of partitions to lease from.",
    "LeaseCall.partition": "Lease from this partition only; null: from any.",
    "after_lease": "Fail with `stale_ids` if this client has already completed a later lease of this partition.",
    "before_offsets": "Offsets by partition. Only items before them are leased, none from other partitions. Null: no limit.",
    "runs": "Whether a lease may have several items of a key, in a queue with `order`; then handle them in order, and none after one that "
    "fails. Otherwise a lease has one item of each key.",
    "lease_key": "A repeated call with the same key returns the leases of the first call.",
    "payload": "Whether the answer has the items, or only the leases.",
    "BrowseCall.payload": "Whether the answer has the payloads.",
    "BrowseCall.partition": "The partition to read.",
    "BrowseCall.cursor": "The `cursor` of the previous page, in place of `states`; null: a new snapshot.",
    "states": "Item states to read: any of `ready`, `leased` and `scheduled`; null: `ready`.",
    "PeekCall.lease_id": "Read the open items of this lease.",
    "PeekCall.partition": "Read the next items of this partition; null: of all partitions.",
    "idempotency_key": "Makes the call repeatable: a repeat with the same key and body adds nothing and returns the first answer.",
    "idempotency_group": "A sequence of keys, which are kept until the group's sequence rises instead of for a window.",
    "idempotency_sequence": "The group's sequence. It never falls.",
    "ProduceCall.idempotency_window": "How long the key is remembered; at most the queue's window, which is the default.",
    "ProduceFields.idempotency_window": "How long the key is remembered; at most the queue's window, which is the default.",
    "SettleQuery.incarnation": "The queue's incarnation, which is part of every id.",
    "UpdateCall.version": "Change nothing unless the queue still has this version.",
}

_ITEMS: Final = {
    "bytes": "The payload, in base64.",
    "utf8": "The payload as text; instead of `bytes`.",
    "kind": "Kind of the item, free text of up to 2,048 bytes.",
    "encoding": "Encoding of the payload, free text of up to 2,048 bytes.",
    "reference": "Free text of up to 2,048 bytes.",
    "key": "What the item belongs to, such as a customer: text of 1 to 256 bytes. Not an idempotency key.",
    "priority": "From 0, the lowest, to 9. An item without one counts as of 4. Matters where the queue's `priority` is set.",
    "unique_key": "Text of 1 to 256 bytes. Of the items with the same one and the same `key`, a queue with `unique` has at most one.",
    "headers": "Names and values, up to 8,192 bytes together.",
    "enqueue_at": "Not served before this time; from 1970, and at most 366 days ahead.",
    "id": "Id of the item at its present offset. A caller that names it proves that it holds the lease.",
    "origin": "The item's first id, which never changes.",
    "attempts": "Number of leases so far, this one included.",
    "enqueued_at": "When the item was produced.",
    "lease_id": "The item's lease.",
    "lease_deadline": "When the lease runs out, unless it is extended.",
    "retry_at": "Not served before this time.",
    "retry_after": "Delay before the item is served again; `0s`: none. Without a time, the queue's `retry_backoff` applies.",
    "RetryItem.dead": "Send the item to the dead queue. Without one it is dropped.",
    "reason": "The reason, as text.",
    "trace": "Last lines of the exception's trace, up to 4,096 bytes. Kept with the failed attempt.",
    "host": "The client's machine. Kept with the failed attempt.",
    "handler_time": "How long the handler ran. Kept with the failed attempt.",
    "Completion.request_timeout": "How long the completion may take, up to `15m`. The answer does not wait for it for more than a second.",
    "LeaseCall.complete": "Items and leases to complete in the same call, as by `queue.complete`; null: none.",
    "handler_times": "Handler times of the completed items, for the queue's statistics.",
    "HandlerTime.handler_time": "How long the handler ran for each of the items.",
    "HandlerTime.items": "Number of items with this handler time.",
    "outcome": "Outcome that takes effect when the lease is completed.",
}

_ANSWERS: Final = {
    "leases": "The leases.",
    "completed": "Number of completed items.",
    "retried": "Number of items put back.",
    "dead": "Number of dead items: by request, or out of attempts.",
    "released": "Number of items given back unprocessed.",
    "cleared": "Number of items dropped by `queue.clear`.",
    "redriven": "Number of items sent back that have arrived.",
    "state": "Whether the partition is served.",
    "ready": "Number of items that could be leased now.",
    "scheduled": "Number of items that are not due yet.",
    "leased": "Number of leased items, each lease counted.",
    "backend": "The storage backend that holds it.",
    "partitions": "The queue's partitions.",
}


def _of_new(setting: Setting) -> str:
    off = "" if setting.new is None else f"; null: {setting.unset}"
    return f"{setting.about} Default: {setting.new_text}{off}."


_SETTINGS: Final = {
    **{
        f"{kind}.{name}": f"{each.about} Default: {each.default_text}."
        for kind in ("UpdateCall", "QueueInfo")
        for name, each in QUEUE_SETTINGS.items()
    },
    **{f"CreateCall.{name}": _of_new(each) for name, each in QUEUE_SETTINGS.items()},
    "LeaseCall.lease_timeout": "Duration of the lease; null: the queue's.",
    "ExtendCall.lease_timeout": "New duration of the leases from now; null: the queue's.",
    "requested_partitions": "Number of partitions.",
    "incarnation": "Assigned to the queue at creation, and part of every id.",
    "created_at": "When it was created.",
    "updated_at": "When its settings were last changed.",
}

_PROBLEM: Final = {
    "type": "Link to the explanation of the code.",
    "title": "Meaning of the code.",
    "status": "The HTTP status.",
    "detail": "What happened, and what to do.",
    "code": "Stable error code, for programs.",
    "retryable": "Whether a repeat of the same call is safe and may succeed.",
    "request_id": "Finds the request in the server's log.",
    "message": "Same as `detail`, for Querator's clients.",
    "field": "The invalid field.",
    "Problem.ignored": "With `stale_ids`: the ignored ids, up to 1,000.",
}

_STORAGE: Final = {
    "ListItemsCall.pivot": "Id of the item after which the page begins.",
    "DeleteItemsCall.ids": "Ids of waiting items, ready or scheduled.",
    "RunNowCall.ids": "Ids of scheduled items.",
    "MoveItemsCall.ids": "Ids of waiting items, ready or scheduled.",
    "MoveItemsCall.target": "Queue that receives the items; null: for each, the queue in which it died.",
    "SearchCall.id": "Only the item with this id or origin.",
    "SearchCall.kind": "Only items of this kind.",
    "SearchCall.reference": "Only items with this reference.",
    "SearchCall.key": "Only items with this key.",
    "SearchCall.unique_key": "Only items with this unique key.",
    "SearchCall.headers": "Only items with these headers. A value of null: any.",
    "SearchCall.contains": "Only items whose payload contains this text, in UTF-8.",
    "SearchCall.reason": "Only dead items whose reason contains this text.",
    "SearchCall.states": "Only items in these states; null: in any.",
    "SearchCall.next": "The `next` of the previous answer, with the same search.",
    "SearchCall.limit": "Maximum number of items found. An answer also ends at 32 MiB of payloads.",
    "SearchCall.look_at": "Maximum number of items compared.",
    "SearchCall.payload": "Whether the items come with their payloads.",
    "SearchCall.request_timeout": "How long to search at most.",
    "ImportItem.payload": "The payload, in base64.",
    "ListedItem.payload": "The payload, in base64.",
    "ListedItem.max_attempts": "The queue's limit of attempts; 0: no limit.",
    "ListedItem.created_at": "When the item was produced.",
    **{f"ImportItem.{name}": "Ignored." for name in ("id", "origin", "is_leased", "lease_id", "lease_deadline", "expire_deadline")},
    **{f"ImportItem.{name}": "Ignored." for name in ("created_at", "attempts", "max_attempts")},
    "is_leased": "Whether the item is leased.",
    "expire_deadline": "When the item expires and becomes dead.",
    "deleted": "Number of dropped items.",
}

_ADMIN: Final = {
    **{f"CreateKeyCall.{name}": text for name, text in texts(KeyInfo).items()},
    "key_id": "Id of the key, which is not secret.",
    "name": "The name.",
    "expires_after": "How long the key is valid; null: it never expires.",
    "AuditListCall.queue_name": "Only entries about this queue.",
    "AuditListCall.action": "Only entries with this action. One that ends with a dot (`rebalance.`) is a prefix.",
    "AuditListCall.actor": "Only entries of this actor: a key's NAME/ID, its name, or `system`.",
    "since": "Only entries from this time on.",
    "until": "Only entries before this time.",
    "at": "The time.",
    "actor": "Name of the API key of the request.",
    "file": "The configuration file; null: none.",
    "applied_at": "When the configuration took effect.",
    "last_error": "Why the last reload was not applied; null: it was applied.",
    "configuration": "All settings with their values.",
    "value": "The value as in a file; a secret is `***`.",
    "ConfigValue.origin": "Where the value was set: `default`, FILE:LINE, a variable or a flag.",
    "restart": "Whether a change needs a restart.",
    "server": "Listeners, TLS and authentication.",
    "log": "Logging.",
    "limits": "Default rate limits of API keys.",
    "trace": "Export of traces.",
    "ConfigTables.cluster": "Membership of the server in a cluster.",
    "backends": "Storage backends by name.",
}

_CLUSTER: Final = {
    **{f"InstancesUpdateCall.{name}": text for name, text in texts(GroupTimes).items()},
    "strategy": "How the instances divide the partitions: `rounds` or `claims`.",
    "load_moves": "Partitions that may move in a minute to level the loads of the instances; 0: none.",
    "instance": "The instance's name in the cluster, new at each start.",
    "PartitionPinCall.instance": "Name of an instance of the cluster (`cluster.name`). Give this or `zone`.",
    "zone": "Zone that an instance of the cluster is in. Give this or `instance`.",
    "ScrapeTarget.targets": "HOST:PORT of one instance.",
    "labels": "The instance's scheme (`__scheme__`) and name.",
    "address": "The URL by which other instances reach it; null: not known.",
    "owner": "The instance that owns the partition; null: none at the moment.",
    "era": "Rises with each change of the strategy, and is part of the fence.",
    "ExplainCall.id": "The item to explain. Give this or `partition`.",
    "ExplainCall.partition": "The partition to explain, in place of an item.",
}

_REBALANCES: Final = {
    "PlanCall.requested_partitions": "New number of partitions; null: unchanged, to place them again.",
    "RebalanceCall.requested_partitions": "New number of partitions; null: unchanged, to place them again.",
    "RebalanceManyCall.requested_partitions": "New number of partitions of each queue; null: unchanged, to place them again.",
    "drain": "How draining partitions are emptied. `natural`: by their consumers. `copy`: items are moved to the other partitions.",
    "rate": "With `copy`: maximum number of items moved per second; null: no limit.",
    "RebalanceCall.plan_id": "Carry out exactly this plan, or fail; null: the current plan.",
    "match": "Pattern of queue names; `*` matches any text.",
    "all": "All queues, in place of `match`.",
    "RebalanceIdCall.id": "Id of the rebalance.",
    "RebalancesListCall.queue_name": "Only rebalances of this queue.",
    "open": "Only rebalances that have not ended.",
    "items_left": "Number of items left in draining partitions.",
}

_CONSUMERS: Final = {
    "ConsumersListCall.queue_name": "Only consumers of this queue; null: of every queue with consumers.",
    "ConsumersListCall.limit": "Maximum number of queues to check.",
    "ConsumersReportCall.client_id": "The query's name as a consumer.",
    "query": "The query's report, which replaces its previous one.",
    **{f"QueryFields.{name}": text for name, text in texts(QueryInfo).items()},
    "minutes": "Number of minutes, up to the last one that has ended.",
    "TasksGetCall.name": "The capture.",
}

_SCHEDULES: Final = {
    **{
        f"{kind}.{name}": text
        for kind in ("CreateScheduleCall", "UpdateScheduleCall", "NextTimesCall")
        for name, text in texts(ScheduleInfo).items()
    },
    "UpdateScheduleCall.cron": "The new cron expression, from now on; null: as it is.",
    "UpdateScheduleCall.timezone": "The new time zone, from now on; null: as it is.",
    "UpdateScheduleCall.jitter": "The new jitter; null: as it is.",
    "UpdateScheduleCall.catch_up": "What happens with missed times from now on; null: as it is.",
    "UpdateScheduleCall.item": "The new item, which replaces all of the old one; null: as it is.",
    "ScheduleInfo.name": "Name of the schedule.",
    "CreateScheduleCall.name": "Name of the schedule: 1 to 128 of `A-Z a-z 0-9 _ . -`, not beginning with `.` or `-`.",
    "CreateScheduleCall.cron": "Five fields (minute, hour, day of month, month, day of week), such as `*/5 * * * *`, or `@hourly`.",
    "CreateScheduleCall.timezone": "The time zone of the expression, an IANA name.",
    "CreateScheduleCall.jitter": "Each firing is delayed by a part of this, up to `1d` and never to the next time.",
    "CreateScheduleCall.catch_up": "Which missed times are fired later: the `last`, none (`skip`), or `all`, up to 1,000.",
    "ListSchedulesCall.queue_name": "Only schedules of this queue; null: of all that the key may read.",
    "ListSchedulesCall.name_contains": "Only schedules whose names have this text, in either case; null: all.",
    "NextTimesCall.count": "Number of times.",
    "NextTimesCall.after": "The times after this one; null: after now.",
}

_BUNDLES: Final = {
    "ProduceCall.bundle": "Id of the bundle to which the items belong.",
    "ProduceFields.bundle": "Id of the bundle to which the items belong.",
    "CreateBundleCall.queue_name": "The queue of its items.",
    "CreateBundleCall.items": "Close it when so many items are stored; null: by `bundles.close` alone.",
    "CreateBundleCall.follow_up": "The follow-up: an item that is produced when all items have ended; null: none.",
    "FollowUpCall.queue_name": "The queue that gets the item.",
    "FollowUpCall.item": "The item. The server adds the headers `bundle`, `bundle_stored`, `bundle_completed`, `bundle_dead`, "
    "`bundle_dropped`.",
    "BundleCall.id": "Id of the bundle.",
    "BundleInfo.id": "Id of the bundle.",
    "ListBundlesCall.queue_name": "Only bundles of this queue; null: of all that the key may read.",
    "ListBundlesCall.pivot": "Where the page begins: after that id; null: at the first.",
}

_HEALTH: Final = {
    "alive": "Always true.",
    "Health.status": "`pass` when the server is ready, `fail` otherwise.",
    "Health.version": "The server's version.",
    "Health.checks": "Checks by component and measurement; `queues:storage` is the only one.",
    "HealthCheck.componentType": "Always `datastore`.",
    "HealthCheck.status": "`pass` or `fail`.",
    "HealthCheck.output": "Why it fails; absent when it passes.",
    "Ready.ready": "Whether every partition is served.",
    "problems": "The reasons if the server is not ready, as text.",
    "checks": "The individual checks; with `verbose`.",
    "attention": "With `verbose`: current problems of this instance and its queues. The server may be ready nevertheless.",
    "ProblemsListCall.queue_name": "Only problems of this queue; null: of everything that the key may read.",
    "CheckInfo.detail": "Result of the check, as text.",
    "ok": "Whether the check passed.",
    "took_ms": "Duration of the check in milliseconds.",
    "verbose": "Show every check; the value does not matter. Needs the scope `read:*` or `admin`.",
    "types": "Event types, separated by commas; by default all.",
    "EventsQuery.queue_name": "Only events about this queue.",
}

FIELDS: Final[dict[str, str]] = (
    _CALLS
    | _ITEMS
    | _ANSWERS
    | _SETTINGS
    | _PROBLEM
    | _STORAGE
    | _ADMIN
    | _CLUSTER
    | _REBALANCES
    | _CONSUMERS
    | _SCHEDULES
    | _BUNDLES
    | _HEALTH
)
