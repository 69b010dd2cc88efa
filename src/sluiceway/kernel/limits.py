"""Every limit, with its reason. A limit that is met is an error that names it, never a silent cut."""

from __future__ import annotations

MAX_ITEMS_JSON = 1_000
"""Items in a JSON produce, and ids in a JSON settle: each costs Python work; Querator's limit too."""

MAX_ITEMS_ARROW = 10_000
"""Rows in an Arrow produce, and items in one lease: bounds a turn and an answer."""

MAX_PAGE = 65_536
"""Queues or items on one page of a listing; Querator's limit too. A page of items also ends at MAX_LEASE_BYTES."""

MAX_BODY_BYTES = 32 << 20
"""A request body is held in memory whole."""

MAX_PEER_BYTES = 33 << 20
"""What one instance asks of another: a request's body, written anew, which adds to it the padding of its columns and what it is about."""

MAX_CALL_BYTES = 8 << 20
"""The body of a call that takes no Arrow. 1,000 ids with reasons fit, however escaped; a list of tiny values grows when decoded."""

MAX_BODIES_BYTES = 512 << 20
"""All request bodies that are held at one time. Beyond it a request is told to come back, rather than the process being killed."""

BODIES_SHARE = 4
"""One API key may have at most this part (a quarter) of the memory for bodies: who sends slowly must not shut out the rest."""

MAX_ANSWERS_BYTES = 512 << 20
"""All large answers that are on their way at one time. Beyond it the oldest is cut off: its client takes it too slowly, or not at all."""

MAX_PIPELINED = 16
"""Requests that wait on a connection for the answer to an earlier one: each costs about 3 KB before anybody asks who sent it."""

MAX_PAYLOAD_BYTES = 8 << 20
"""One item. Larger things belong into an object store, with a reference in the queue."""

MAX_TEXT_BYTES = 2_048
"""`kind`, `encoding`, `reference`, a reason, a client id, an idempotency key. Querator's clients send references of up to 2,000."""

MAX_HEADER_BYTES = 8_192
"""All header names and values of one item together."""

MAX_LEASE_BYTES = 32 << 20
"""Payload bytes in one lease (by the average of each blob), unless its first item alone is larger."""

MAX_SNAPSHOTS = 100
"""Snapshots that an instance keeps for those who browse: each keeps what it refers to in the store, also when that is completed."""

MAX_SNAPSHOT_RUNS = 300_000
"""Runs of items in all snapshots of an instance together: about 300 bytes of memory each, and 3 µs in which nothing else is done."""

SNAPSHOT_IDLE = 5 * 60_000
"""Milliseconds a snapshot is kept after a page of it was asked for."""

SNAPSHOT_READ = 30_000
"""Milliseconds a snapshot is kept after its last page: whoever lost that answer asks again."""

MAX_SNAPSHOT_AGE = 3_600_000
"""Milliseconds a snapshot is kept at most: what it pins is disk space that nobody can get back."""

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

MIN_KEY_WINDOW = 600_000
"""The least that a queue may keep idempotency keys: a client repeats a call of its own accord for as long."""

MAX_KEYS = 1_000_000
"""Idempotency keys that one partition remembers: each costs about 300 bytes of memory."""

MAX_KEYS_BYTES = 16 << 20
"""Of idempotency keys, as stored, that go to another partition in one call: it has to fit into MAX_PEER_BYTES. More go in several."""

GENERATED_KEY = "auto/"
"""Begins the keys that a client generates for one call. A call that was surely refused may be repeated under another one."""

PLACED_LONGER = 3_600_000
"""Milliseconds that the target of a keyed produce remembers the key beyond the key's home, which relies on it: more than clocks differ."""

GROUP_KEEP = 30 * 86_400_000
"""Milliseconds after its last produce that an idempotency group is forgotten: a stream that stood still longer may repeat a batch."""

MAX_GROUP_KEYS = 1_000
"""Keys of one sequence of an idempotency group: they are one record, written anew with each."""

MAX_CLOSED_LEASES = 1_000
"""Leases of a partition that are remembered after their end, to tell what became of a stale id: about 1 KB of memory each."""

MAX_WAITING = 100_000
"""Requests that wait on one logical queue. Beyond it a request is told to come back."""

MIN_SPARSE_BYTES = 64 << 10
"""A blob of this size and more is compacted when it is sparse. A smaller one is hardly worth its transaction."""

SPARSE_FACTOR = 4
"""A blob is sparse when at most one row in four is open. Each compaction then leaves a quarter: all that are ever made of a blob write a
third of it at most."""

COMPACTION_INTERVAL = 30_000
"""Milliseconds between two looks for sparse blobs: a blob that two find is compacted. Batches are mostly settled faster than that."""

TIMER_BATCH = 200
"""Expired leases, due entries and expired extents that one turn handles at most, in all partitions together: a mass expiry must not stop
other requests. `core.timer_pace` gives a turn as many as fit into TIMER_SLICE."""

TIMER_SLICE = 4
"""Milliseconds of processor time that a turn spends on these: a request may wait for two or three such turns and their commits."""

BODY_TIMEOUT = 30_000
"""Milliseconds a request's body may take to arrive: a slow sender holds memory and a connection."""

AUDIT_ENTRIES = 10_000
"""Audit entries that are kept unless the configuration says otherwise: years of changes made by people, and soon read for a listing."""

MIN_AUDIT_ENTRIES = 100
"""Fewer would not outlive the rebalance of one queue."""

MAX_AUDIT_ENTRIES = 100_000
"""The most that can be kept: a listing reads them whole."""

AUDIT_TRIM_BATCH = 500
"""Old audit entries that one commit removes: it shares the meta store with everybody's changes."""

MAX_AUDIT_TEXT = 256
"""Characters of a text in an audit entry's detail: a note to recognise the thing by, not a copy of it."""

MAX_AUDIT_DETAIL_BYTES = 4_096
"""An audit entry's detail. It shares its commit with the change, and a listing holds all entries in memory."""

MAX_ENDED_REBALANCES = 1_000
"""Rebalances that are kept after their end, and some more until they are counted again."""

MAX_API_KEYS = 1_000
"""API keys of one meta store: each process holds all of them in memory, and reads them again and again."""

MAX_WORKERS = 64
"""Processes of one `serve`: each holds its own connections, caches and event loop, and asks every other."""

MAX_KEY_SCOPES = 100
"""Scopes of one API key: every request of the key looks through them."""

MAX_KEY_TIMEOUT = 3_650 * 86_400_000
"""Milliseconds after which an API key may expire at most. One that is to live longer has no expiry."""

MAX_KEY_RATE = 1 << 40
"""The highest rate of an API key, per second: beyond anything that a server can do, and small enough to calculate with."""

MIN_ADMIN_KEY = 32
"""Characters that the configured admin key has at least: it is guarded by a fast hash, which only a long secret may be."""

MAX_EVENTS = 10_000
"""Events that are remembered for readers that come back, or are slow: some 2 MB. Who has missed more is told to read the state again."""

MAX_STREAMS = 1_000
"""Readers of events at one time. Each costs a connection, and work each second."""

MAX_KEY_STREAMS = 100
"""Readers of events with one API key: it must not keep everybody else from reading."""

STREAM_SEND_TIMEOUT = 10_000
"""Milliseconds in which a reader of events must take what it was sent, some 64 KiB: one that does not read is cut off."""

MAX_CONSUMERS = 1_000
"""Consumers of a queue that an instance remembers, or tells another instance of: some 200 bytes each."""

MAX_CONSUMERS_SHOWN = 200
"""Consumers of one queue in an answer: more than anybody reads. Those with queries, and with most items, come first."""

MAX_QUERIES = 100
"""Queries that tell an instance of themselves, by queue: each may be 3 KB, and is what its client says that it is."""

MAX_METRIC_QUEUES = 200
"""Queues with metrics of their own, some 20 series each; the rest is summed up, so that a scrape stays small however many there are."""

MAX_CONNECTIONS = 10_000
"""Connections of one listener: about 9 KB each while idle. Beyond it, or beyond half of the files that the process may open, so that the
stores can still open theirs, a connection is told to come back."""

MAX_HEADERS = 100
"""Headers of a request, and of what follows a body in chunks: each costs Python work before anybody asks who sent it."""

MAX_HEAD_BYTES = 64 << 10
"""The request line and the headers together: they are in memory before a limit on bodies, or a key, is looked at."""

HEAD_TIMEOUT = 10_000
"""Milliseconds in which a connection, or the first byte of a request on it, must be followed by all of the headers; and a connection by
the agreement on TLS."""

LEFTOVER_TIMEOUT = 10_000
"""Milliseconds that the rest of a body may go on after its request was answered: a client that reads the refusal late still gets it."""

SEND_TIMEOUT = 30_000
"""Milliseconds in which a client must take something of its answer: what it does not take is held in memory."""

GOODBYE_TIMEOUT = 2_000
"""Milliseconds in which the client of a TLS connection that the server closes must take the rest and close it, too. Clients that only keep
a connection open for later do not look, and each would hold up the stop of the server."""

MAX_CLOCK_STEP = 10_000
"""Milliseconds by which the wall clock may differ from the time of the process, or a partition's stored time be ahead of its owner's,
before it is a jump. Corrections by a time service are far smaller."""

CLOCK_PATIENCE = 3_600_000
"""Milliseconds for which a jump of the wall clock is not followed: an operator has that long to set it right, and nothing comes early."""
