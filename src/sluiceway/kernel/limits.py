"""Every limit, with its reason. A limit that is met is an error that names it, never a silent cut."""

from __future__ import annotations

MAX_ITEMS_JSON = 1_000
"""Items in a JSON produce, and ids in a JSON settle: each costs Python work; Querator's limit too."""

MAX_ITEMS_ARROW = 10_000
"""Rows in an Arrow produce, and items in one lease: bounds a turn and an answer."""

MAX_BODY_BYTES = 32 << 20
"""A request body is held in memory whole."""

MAX_CALL_BYTES = 8 << 20
"""The body of a call that takes no Arrow. 1,000 ids with reasons fit, however escaped; a list of tiny values grows when decoded."""

MAX_BODIES_BYTES = 512 << 20
"""All request bodies that are held at one time. Beyond it a request is told to come back, rather than the process being killed."""

MAX_PAYLOAD_BYTES = 8 << 20
"""One item. Larger things belong into an object store, with a reference in the queue."""

MAX_TEXT_BYTES = 1_024
"""`kind`, `encoding`, `reference`, a reason, a client id, an idempotency key."""

MAX_HEADER_BYTES = 8_192
"""All header names and values of one item together."""

MAX_LEASE_BYTES = 32 << 20
"""Payload bytes in one lease (by the average of each blob), unless its first item alone is larger."""

BLOB_BYTES = 1 << 20
"""Small produces of one turn share a blob up to this size; a larger request stands alone."""

MAX_PARTITIONS = 1_000
"""Partitions of one queue. Each costs a storage handle."""

MAX_REQUEST_TIMEOUT = 15 * 60_000
"""Milliseconds a request may wait."""

MAX_LEASE_TIMEOUT = 30 * 86_400_000
"""Milliseconds a lease may live without being extended. Long, because a stopped Spark job holds its leases."""

MAX_SCHEDULE = 366 * 86_400_000
"""Milliseconds into the future that an item may be scheduled."""

KEY_WINDOW = 86_400_000
"""Milliseconds an idempotency key without a group is remembered, at most and unless the request says less."""

LEAST_KEY_WINDOW = 600_000
"""The least that a queue may keep idempotency keys: a client repeats a call of its own accord for as long."""

MAX_KEYS = 1_000_000
"""Idempotency keys that one partition remembers: each costs about 300 bytes of memory."""

GROUP_KEEP = 30 * 86_400_000
"""Milliseconds after its last produce that an idempotency group is forgotten: a stream that stood still longer may repeat a batch."""

MAX_GROUP_KEYS = 1_000
"""Keys of one sequence of an idempotency group: they are one record, written anew with each."""

MAX_CLOSED_LEASES = 1_000
"""Leases of a partition that are remembered after their end, to tell what became of a stale id: about 1 KB of memory each."""

MAX_WAITING = 100_000
"""Requests that wait on one logical queue. Beyond it a request is told to come back."""

TIMER_BATCH = 1_000
"""Leases, due entries and extents that one turn puts back or lets die, in all partitions together: a mass expiry must not stop the rest."""

BODY_TIMEOUT = 30_000
"""Milliseconds a request's body may take to arrive: a slow sender holds memory and a connection."""
