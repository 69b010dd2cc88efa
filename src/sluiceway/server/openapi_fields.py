"""What the fields of calls mean, and those of answers that say nothing themselves: by `Type.name`, or by name where it means the same
everywhere. For the reader of the OpenAPI document."""

from __future__ import annotations

from typing import Final

from sluiceway.contract.consumer_answers import QueryInfo
from sluiceway.contract.fields import texts
from sluiceway.contract.instance_answers import GroupTimes
from sluiceway.contract.key_answers import KeyInfo
from sluiceway.contract.queue_settings import QUEUE_SETTINGS

_CALLS: Final = {
    "queue_name": "1 to 128 of `A-Z a-z 0-9 _ . -`, not beginning with `.` or `-`.",
    "request_timeout": "How long the call may take, at most `15m`.",
    "LeaseCall.request_timeout": "How long to wait for an item, at most `15m`; `0s` answers at once.",
    "client_id": "Only what this client has leased is touched; null: whoever has leased it.",
    "LeaseCall.client_id": "The consumer, by a name of its own.",
    "strict": "End as `stale_ids` if anything is ignored; what is not is settled all the same.",
    "ids": "Items, of any partitions.",
    "lease_ids": "Leases: all that is open in them.",
    "partition": "The partition's number; in a call, what is named must be of it.",
    "items": "The items.",
    "pivot": "The page begins after this; `next` of the page before.",
    "next": "The pivot of the next page; null on the last.",
    "limit": "The most to answer with.",
    "RedriveCall.limit": "The most to send back.",
    "force": "Delete although items are left, or on their way here; these may be lost, or handled twice.",
    "verbs": "What to stop or let go on: `produce`, `lease` or both.",
    "ClearCall.ready": "Drop the items that could be leased now.",
    "ClearCall.scheduled": "Drop the items that wait for their time.",
    "target": "Where the items go; null: to the queue that each came from.",
    "source": "Only items that came from this queue.",
    "RedriveCall.reason": "Only items whose reason contains this text.",
    "dry_run": "Count, and move nothing.",
    "start": "Where to begin in the lease; 0 is its first item.",
    "batch_size": "The most items to lease. There may be fewer: an answer carries at most 32 MiB of payloads.",
    "max_partitions": "The most partitions to lease from.",
    "LeaseCall.partition": "Lease from this partition only; null: from any.",
    "after_lease": "Refuse, as `stale_ids`, if a lease of this partition that the client took after this one was completed.",
    "before_offsets": "By partition, the offset before which items are leased; none of partitions that are not named. Null: any.",
    "lease_key": "A repeated call with the same key answers with the leases that the first one took.",
    "payload": "Whether to answer with the items, or with the leases alone.",
    "BrowseCall.payload": "Whether to answer with the payloads.",
    "BrowseCall.partition": "The partition to read.",
    "BrowseCall.cursor": "The `cursor` of the page before, in place of `states`; null begins anew.",
    "states": "Which items to read: any of `ready`, `leased` and `scheduled`; null: those that are ready.",
    "PeekCall.lease_id": "Look at the items that are still open in this lease.",
    "PeekCall.partition": "Look at what this partition serves next; null: all of them.",
    "idempotency_key": "Makes the call repeatable: with the same key and body it adds nothing and answers as the first time.",
    "idempotency_group": "A stream of keys: they are kept until the group's sequence moves on, instead of for a window.",
    "idempotency_sequence": "The group's sequence, which never falls.",
    "ProduceCall.idempotency_window": "How long the key is remembered; at most the queue's window, which is the default.",
    "ProduceFields.idempotency_window": "How long the key is remembered; at most the queue's window, which is the default.",
    "SettleQuery.incarnation": "The queue's; part of every id.",
    "UpdateCall.version": "Change nothing unless the queue still has this version.",
}

_ITEMS: Final = {
    "bytes": "The payload, in base64.",
    "utf8": "The payload as text; instead of `bytes`.",
    "kind": "What sort of item it is; yours to choose, 2,048 bytes at most.",
    "encoding": "How the payload is encoded; yours to choose, 2,048 bytes at most.",
    "reference": "A note of yours, 2,048 bytes at most.",
    "headers": "Names and values of yours, 8,192 bytes together.",
    "enqueue_at": "Not served before this time; from 1970 on, at most 366 days ahead.",
    "id": "The item, while it lies at this place: it is also the proof of who has leased it.",
    "origin": "The id that the item was first given, and keeps for life.",
    "attempts": "How often it was leased, this time included.",
    "enqueued_at": "When it was produced.",
    "lease_id": "The lease that it is in.",
    "lease_deadline": "When the lease runs out, unless it is extended.",
    "retry_at": "Not served before this time.",
    "retry_after": "Not served before so much time has passed; `0s`: now. Without a time, as the queue's `retry_backoff` says.",
    "RetryItem.dead": "Send it to the dead queue; it is dropped where there is none.",
    "reason": "Why, in words.",
    "outcome": "What becomes of it when the lease is completed.",
}

_ANSWERS: Final = {
    "leases": "The leases.",
    "completed": "Items that are done.",
    "retried": "Items put back.",
    "dead": "Items that died: asked for, or because their attempts were used up.",
    "released": "Items given back untouched.",
    "cleared": "Items dropped by `queue.clear`.",
    "redriven": "Items sent back that have arrived.",
    "state": "Whether the partition serves.",
    "ready": "Items that could be leased now.",
    "scheduled": "Items that wait for their time.",
    "leased": "Items leased, counted each time.",
    "backend": "The storage that holds it.",
    "partitions": "The queue's partitions.",
}

_SETTINGS: Final = {
    **{
        f"{kind}.{name}": f"{each.about} Default: {each.default_text}."
        for kind in ("CreateCall", "UpdateCall", "QueueInfo")
        for name, each in QUEUE_SETTINGS.items()
    },
    "LeaseCall.lease_timeout": "How long the lease lives; null: as the queue says.",
    "ExtendCall.lease_timeout": "From now; null: as the queue says.",
    "requested_partitions": "Number of partitions.",
    "incarnation": "Given to the queue when it was created; part of every id.",
    "created_at": "When it was created.",
    "updated_at": "When its settings were last changed.",
}

_PROBLEM: Final = {
    "type": "Where the server explains the code.",
    "title": "What the code means.",
    "status": "The HTTP status.",
    "detail": "What happened this time.",
    "code": "Stable; programs decide by it.",
    "retryable": "The same call, repeated, is safe and may succeed.",
    "request_id": "Finds the request in the server's log.",
    "message": "The detail again, under the name that Querator's clients read.",
    "field": "The field at fault.",
    "Problem.ignored": "With `stale_ids`: what was ignored, 1,000 at most.",
}

_STORAGE: Final = {
    "ListItemsCall.pivot": "The id of the item after which the page begins.",
    "DeleteItemsCall.ids": "Items that wait: ready or scheduled.",
    "ImportItem.payload": "The payload, in base64.",
    "ListedItem.payload": "The payload, in base64.",
    "ListedItem.max_attempts": "The queue's limit of attempts; 0: none.",
    "ListedItem.created_at": "When it was produced.",
    **{f"ImportItem.{name}": "Not taken over." for name in ("id", "origin", "is_leased", "lease_id", "lease_deadline", "expire_deadline")},
    **{f"ImportItem.{name}": "Not taken over." for name in ("created_at", "attempts", "max_attempts")},
    "is_leased": "Whether it is in a lease.",
    "expire_deadline": "When it is dead unless it is completed.",
    "deleted": "Items dropped.",
}

_ADMIN: Final = {
    **{f"CreateKeyCall.{name}": text for name, text in texts(KeyInfo).items()},
    "key_id": "Names the key; it is no secret.",
    "name": "What it is called.",
    "expires_after": "How long the key is good; null: for ever.",
    "AuditListCall.queue_name": "Only what is about this queue.",
    "AuditListCall.action": "Only what was done by this; one that ends with a dot (`rebalance.`) stands for all that begin so.",
    "AuditListCall.actor": "Only what was asked for by this one: a key's NAME/ID, its name, or `system`.",
    "since": "From this time on.",
    "until": "Before this time.",
    "at": "When.",
    "actor": "The name of the key with which it was asked for.",
    "file": "Where the configuration is read from; null: nowhere.",
    "applied_at": "When it took effect.",
    "last_error": "Why the last reload was not applied; null: it was.",
    "configuration": "Every key with its value.",
    "value": "As a file would have it; a secret is `***`.",
    "ConfigValue.origin": "Who said so: `default`, FILE:LINE, a variable or a flag.",
    "restart": "Whether a change takes effect at a restart only.",
    "server": "How it listens.",
    "log": "What it logs.",
    "limits": "What a key may use up, unless it says so itself.",
    "trace": "Where traces are sent.",
    "ConfigTables.cluster": "How the server takes part in a cluster.",
    "backends": "By name.",
}

_CLUSTER: Final = {
    **{f"InstancesUpdateCall.{name}": text for name, text in texts(GroupTimes).items()},
    "strategy": "How the instances divide the partitions: `rounds` or `claims`.",
    "instance": "The instance's name in the cluster; it is new at each start.",
    "ScrapeTarget.targets": "HOST:PORT of one instance.",
    "labels": "Its scheme (`__scheme__`) and its name.",
    "address": "The URL by which other instances reach it; null: not known.",
    "owner": "The instance that the partition is given to; null: nobody has it at the moment.",
    "era": "Rises with each change of the strategy; part of the fence.",
    "ExplainCall.id": "The item; or else `partition`.",
    "ExplainCall.partition": "The partition to explain, in place of an item.",
}

_REBALANCES: Final = {
    "PlanCall.requested_partitions": "How many there are to be; null: as many as now, to place them anew.",
    "RebalanceCall.requested_partitions": "How many there are to be; null: as many as now, to place them anew.",
    "RebalanceManyCall.requested_partitions": "How many each is to have; null: as many as it has now, to place them anew.",
    "drain": "How the backlog of a drained partition goes: `natural`: consumers take it. `copy`: it is moved to the other partitions.",
    "rate": "With `copy`: items moved in a second at most; null: as fast as it goes.",
    "RebalanceCall.plan_id": "Do exactly what that plan says, or nothing; null: whatever is right now.",
    "match": "A pattern of queue names, in which `*` stands for any text.",
    "all": "All queues, in place of `match`.",
    "RebalanceIdCall.id": "The rebalance.",
    "RebalancesListCall.queue_name": "Only those of this queue.",
    "open": "Only those that have not ended.",
    "items_left": "Items that are left in the partitions that are drained.",
}

_CONSUMERS: Final = {
    "ConsumersListCall.queue_name": "Only the consumers of this queue; null: of every queue that has some.",
    "ConsumersListCall.limit": "The most queues to look at.",
    "ConsumersReportCall.client_id": "The consumer that the query is.",
    "query": "The query, in place of what it told before.",
    **{f"QueryFields.{name}": text for name, text in texts(QueryInfo).items()},
    "minutes": "Number of minutes, up to the last one that has ended.",
    "TasksGetCall.name": "The capture.",
}

_HEALTH: Final = {
    "alive": "Always true: who is not alive does not answer.",
    "Health.status": "`pass` when the server is ready, `fail` otherwise.",
    "Health.version": "The server's version.",
    "Health.checks": "Checks by component and measurement; `queues:storage` is the only one.",
    "HealthCheck.componentType": "Always `datastore`.",
    "HealthCheck.status": "`pass` or `fail`.",
    "HealthCheck.output": "Why it fails; absent when it passes.",
    "Ready.ready": "Whether every partition serves.",
    "problems": "What does not serve, in words.",
    "checks": "Each thing that was looked at; with `verbose`.",
    "CheckInfo.detail": "What was found.",
    "ok": "Whether it is as it should be.",
    "took_ms": "How long the look took.",
    "verbose": "Whatever its value: show every check, to callers that may read all queues or are administrators.",
    "types": "Which events, separated by commas; all of them, if it is not there.",
    "EventsQuery.queue_name": "Only what is about this queue.",
}

FIELDS: Final[dict[str, str]] = (
    _CALLS | _ITEMS | _ANSWERS | _SETTINGS | _PROBLEM | _STORAGE | _ADMIN | _CLUSTER | _REBALANCES | _CONSUMERS | _HEALTH
)
