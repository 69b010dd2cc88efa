"""Limits, each with its reason. Exceeding one raises an error that names it, never a silent cut."""

from __future__ import annotations

MAX_ITEMS_JSON = 1_000
"""Items in a JSON produce, and ids in a JSON settle: each costs Python work. Same as Querator's limit."""

MAX_ITEMS_ARROW = 10_000
"""Rows in an Arrow produce, and items in a lease call that returns them: bounds a scheduling cycle and an answer."""

MAX_ITEMS_UNREAD = 100_000
"""Items in a lease call without payloads, whose answer has the leases alone: bounds a scheduling cycle."""

MAX_REASONS = 100
"""Reasons in an answer that counts the dead items of a queue by why they died."""

MAX_SHOWN_KEYS = 100
"""Keys in each list of an answer on the keys of a queue: each costs the read of a blob."""

MAX_PAGE = 65_536
"""Queues or items on one page of a listing; same as Querator's limit. A page of items also ends at MAX_LEASE_BYTES."""

MAX_BODY_BYTES = 32 << 20
"""A request body, held in memory as a whole."""

MAX_PEER_BYTES = 33 << 20
"""A request between instances: a client's request body, re-encoded, which adds column padding and metadata."""

MAX_CALL_BYTES = 8 << 20
"""Body of a call that takes no Arrow. Fits 1,000 ids with reasons, however escaped; a list of tiny values grows when decoded."""

MAX_BODIES_BYTES = 512 << 20
"""Total of request bodies held at one time. Beyond it requests are told to come back, rather than the process being killed."""

BODIES_SHARE = 4
"""One API key may use at most this part (a quarter) of the memory for bodies: slow senders must not shut out the rest."""

MAX_ANSWERS_BYTES = 512 << 20
"""Total of large answers in transit. Beyond it the oldest is cut off: its client reads too slowly, or not at all."""

MAX_PIPELINED = 16
"""Pipelined requests per connection: each costs about 3 KB before authentication."""

MAX_PAYLOAD_BYTES = 8 << 20
"""One item. Larger payloads belong in an object store, with a reference in the queue."""

MAX_TEXT_BYTES = 2_048
"""`kind`, `encoding`, `reference`, reasons, client ids, idempotency keys. Querator's clients send references of up to 2,000."""

MAX_KEY_BYTES = 256
"""The key of an item, and its unique key. Short, since they are names, such as that of a customer."""

MAX_PRIORITY = 9
"""Of an item; the lowest is 0. As in Java Message Service."""

MAX_TRACE_BYTES = 4_096
"""Of an exception's trace: its last lines are kept for each failed attempt."""

MAX_HEADER_BYTES = 8_192
"""Total of header names and values of one item."""

MAX_LEASE_BYTES = 32 << 20
"""Payload bytes in one lease (by each blob's average), unless its first item alone is larger."""

MAX_SNAPSHOTS = 100
"""Browse snapshots per instance: each keeps its items' blobs in the store, even once they are completed."""

MAX_SNAPSHOT_RUNS = 300_000
"""Total runs of items in an instance's snapshots: each costs about 300 bytes of memory, and blocks the event loop for 3 µs."""

SNAPSHOT_IDLE = 5 * 60_000
"""Milliseconds a snapshot is kept after a page was requested."""

SNAPSHOT_READ = 30_000
"""Milliseconds a snapshot is kept after its last page: a client that lost the answer asks again."""

MAX_SNAPSHOT_AGE = 3_600_000
"""Maximum lifetime of a snapshot in milliseconds: it pins disk space that cannot be reclaimed."""

BACKUP_IDLE = 60_000
"""Milliseconds a backup is kept after a part of it was read: it keeps the stored records in memory, and blobs in the stores."""

BACKUP_PART_BYTES = 8 << 20
"""Stored bytes in one answer of a backup, unless its first blob alone is larger."""

MAX_BACKUP_BLOBS = 10_000
"""Blobs that one call of a backup names."""

MAX_SEARCHED = 100_000
"""Items compared by one call of a search: tens of milliseconds of processor time, unless payloads are large. More take several."""

BLOB_BYTES = 1 << 20
"""Small produces of one scheduling cycle share a blob up to this size; a larger request gets its own."""

MAX_PARTITIONS = 1_000
"""Partitions of one queue. Each costs a storage handle."""

MAX_REQUEST_TIMEOUT = 15 * 60_000
"""Milliseconds a request may wait."""

MAX_LEASE_TIMEOUT = 30 * 86_400_000
"""Milliseconds a lease may live without being extended. Long, since a stopped Spark job holds its leases."""

MAX_SCHEDULE = 366 * 86_400_000
"""Milliseconds into the future that an item may be scheduled."""

MAX_SCHEDULES = 100_000
"""Schedules of one meta store: every instance holds all in memory, about 2 KB each with a small item."""

MAX_STORED_ITEM = 64 << 10
"""Bytes of the item of a schedule or of a bundle's follow-up, as JSON: it lies in the meta store, and in the memory of every instance."""

MAX_BUNDLES = 100_000
"""Bundles of one meta store, those that ended within a day included: every instance holds all in memory."""

MAX_JITTER = 86_400_000
"""Milliseconds by which the firings of a schedule may be spread."""

MAX_CATCH_UP = 1_000
"""Missed times of a schedule that are fired once it can be: two weeks of one that fires every twenty minutes."""

KEY_WINDOW = 86_400_000
"""Milliseconds an ungrouped idempotency key is remembered; requests may ask for less."""

MIN_KEY_WINDOW = 600_000
"""Minimum key window of a queue: a client retries on its own for as long."""

MAX_KEYS = 1_000_000
"""Idempotency keys remembered by one partition: each costs about 300 bytes of memory."""

MAX_KEYS_BYTES = 16 << 20
"""Stored idempotency keys sent to another partition in one call, which must fit into MAX_PEER_BYTES. More take several calls."""

GENERATED_KEY = "auto/"
"""Prefix of keys that a client generates for one call. A call that was surely refused may be repeated under another one."""

BURST_KEY = "auto/+"
"""Prefix of generated keys that name a burst of calls: `auto/+BURST/CALL`. All keys of a burst have the same home partition."""

PLACED_LONGER = 3_600_000
"""Milliseconds that the target of a keyed produce remembers the key beyond its home, which relies on it: more than clocks differ."""

GROUP_KEEP = 30 * 86_400_000
"""Milliseconds an idempotency group is remembered after its last produce: a stream idle for longer may repeat a batch."""

MAX_GROUP_KEYS = 1_000
"""Keys per sequence of an idempotency group: they share one record, rewritten with each."""

MAX_CLOSED_LEASES = 1_000
"""Closed leases that a partition remembers to explain stale ids: about 1 KB of memory each."""

MAX_WAITING = 100_000
"""Requests waiting on one logical queue. Beyond it requests are told to come back."""

MIN_SPARSE_BYTES = 64 << 10
"""Minimum size of a blob to be compacted when sparse. A smaller one is hardly worth its transaction."""

SPARSE_FACTOR = 4
"""A blob is sparse when at most one row in four is open. Each compaction then leaves a quarter: all compactions of a blob together write at
most a third of it."""

MAX_CYCLE_LEASES = 100
"""Waiting leases that are given items in one scheduling cycle: some five milliseconds of work, and as much for their answers. When
thousands wait for the same items, other requests are served between the cycles."""

COMPACTION_INTERVAL = 30_000
"""Milliseconds between two searches for sparse blobs: a blob found by both is compacted. Batches are mostly settled faster."""

TIMER_BATCH = 200
"""Expired leases, due entries and expired extents per scheduling cycle, over all partitions: a mass expiry must not stop other requests.
`core.queue.timer_pacing` allows as many per cycle as fit into TIMER_SLICE."""

TIMER_SLICE = 4
"""Milliseconds of processor time per cycle for these: a request may wait for two or three such cycles and their commits."""

UNPACKED_LEASES = 10_000
"""Newest live leases of a partition that are kept as objects: about 1 KB of memory each. Older ones of one run take some 60 bytes."""

PACKED_AT_ONCE = 512
"""Leases packed per scheduling cycle: two milliseconds of work, for more leases than a cycle makes."""

BODY_TIMEOUT = 30_000
"""Milliseconds for a request's body to arrive: a slow sender holds memory and a connection."""

AUDIT_ENTRIES = 10_000
"""Default number of audit entries kept: years of manual changes, and quick to read for a listing."""

MIN_AUDIT_ENTRIES = 100
"""Minimum: fewer would not outlive the rebalance of one queue."""

MAX_AUDIT_ENTRIES = 100_000
"""Maximum: a listing reads all entries."""

AUDIT_TRIM_BATCH = 500
"""Old audit entries removed per commit: it shares the meta store with all other changes."""

MAX_AUDIT_TEXT = 256
"""Characters of a text in an audit entry's detail: enough to recognise the subject, not a copy."""

MAX_AUDIT_DETAIL_BYTES = 4_096
"""Size of an audit entry's detail. It shares its commit with the change, and a listing holds all entries in memory."""

MAX_ENDED_REBALANCES = 1_000
"""Ended rebalances kept, plus some until the next count."""

MAX_API_KEYS = 1_000
"""API keys of one meta store: each process holds all in memory, and rereads them regularly."""

MAX_WORKERS = 64
"""Processes of one `serve`: each has its own connections, caches and event loop, and asks every other."""

MAX_KEY_SCOPES = 100
"""Scopes of one API key: every request of the key scans them."""

MAX_KEY_TIMEOUT = 3_650 * 86_400_000
"""Maximum lifetime of an expiring API key in milliseconds. For a longer one, set no expiry."""

MAX_KEY_RATE = 1 << 40
"""Maximum rate of an API key, per second: beyond any server's capacity, and small enough for arithmetic."""

MIN_ADMIN_KEY = 32
"""Minimum length of the configured admin key: it is guarded by a fast hash, which requires a long secret."""

MAX_EVENTS = 10_000
"""Events kept for readers that reconnect or are slow: some 2 MB. A reader that missed more is told to reread the state."""

MAX_STREAMS = 1_000
"""Concurrent event readers. Each costs a connection, and work every second."""

MAX_KEY_STREAMS = 100
"""Concurrent event readers of one API key, so that others can still read."""

STREAM_SEND_TIMEOUT = 10_000
"""Milliseconds for an event reader to take the data sent to it, some 64 KiB: a stalled reader is cut off."""

MAX_CONSUMERS = 1_000
"""Consumers of a queue that an instance remembers, or reports to another: some 200 bytes each."""

MAX_CONSUMERS_SHOWN = 200
"""Consumers of one queue in an answer. Those with queries, and with most items, come first."""

MAX_PROBLEMS = 500
"""Problems that an instance reports, the most severe first: more are one problem, and nobody reads them."""

MAX_QUERIES = 100
"""Query reports per queue at one instance: each may be 3 KB, and its content is up to the client."""

MAX_METRIC_QUEUES = 200
"""Queues with their own metrics, some 20 series each; the rest is summed, so that a scrape stays small."""

MAX_CONNECTIONS = 10_000
"""Connections of one listener: about 9 KB each while idle. Beyond it, or beyond half of the process's file limit, so that the stores can
still open theirs, connections are told to come back."""

MAX_HEADERS = 100
"""Headers of a request, and trailers of a chunked body: each costs Python work before authentication."""

MAX_HEAD_BYTES = 64 << 10
"""Request line plus headers: in memory before body limits and keys are checked."""

HEAD_TIMEOUT = 10_000
"""Milliseconds from a connection, or the first byte of a request on it, to the end of the headers; also for a TLS handshake."""

LEFTOVER_TIMEOUT = 10_000
"""Milliseconds that the rest of a body may keep coming after its request was answered: a client that reads the refusal late still gets
it."""

SEND_TIMEOUT = 30_000
"""Milliseconds without progress before an answer is abandoned: the unsent rest is held in memory."""

GOODBYE_TIMEOUT = 2_000
"""Milliseconds for the client of a closing TLS connection to take the rest and close it, too. Idle keep-alive clients do not notice, and
each would delay the server's stop."""

MAX_CLOCK_STEP = 10_000
"""Milliseconds by which the wall clock may differ from the process's time, or a partition's stored time be ahead of its owner's, before it
counts as a jump. Time-service corrections are far smaller."""

CLOCK_PATIENCE = 3_600_000
"""Milliseconds for which a jump of the wall clock is not followed: an operator has that long to set it right, and no deadline comes
early."""
