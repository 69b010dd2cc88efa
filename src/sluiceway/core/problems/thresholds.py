"""Thresholds of the judge. Times are in milliseconds; an incident is to be named within 15 s, so no rule needs more than 10 s of
samples."""

from __future__ import annotations

from typing import Final

from sluiceway.kernel.clock import Millis

INTERVAL: Final[Millis] = 2_000
"""Time between two samples: five of them make a window, and a thousand queues cost a few per cent of a core."""
WINDOW: Final[Millis] = 10_000
"""The span over which rates are judged: long enough to tell a steady trouble from a hiccup, and short enough to name it within 15 s."""
MEMORY: Final[Millis] = 60_000
"""The span over which slow queues are judged, which do too little in a window to judge by."""
CLEARS_AFTER: Final[Millis] = 6_000
"""A problem is gone when three samples in a row did not show it: one quiet sample between two bad ones is no recovery."""

NO_CONSUMER_AFTER: Final[Millis] = 8_000
"""Items wait this long without a lease call before nobody consumes them: a consumer that restarts is back sooner."""
FIRST_GAP: Final[Millis] = 6_000
"""The habit of a consumer that has asked only once: a batch job may come back in twice that time."""
MAX_GAP: Final[Millis] = 30_000
"""Longest pause between two lease calls that is a consumer's habit; a longer one was an outage. Twice the habit is then waited for."""

FAILING: Final = 0.25
"""Share of outcomes that are failures from which on the failure rate is high: an occasional failure stays far below."""
FAILING_CLEARS: Final = 0.10
"""Share below which a high failure rate is over."""
FAILING_CRITICAL: Final = 0.5
"""Share from which on most of the work fails."""
MIN_OUTCOMES: Final = 10
"""Fewer outcomes are no rate: two failures in a row happen."""

REPEATS: Final = 4
"""Failed attempts that make an item suspect: at a failure rate of 5 %, one item in 160,000 has as many by chance."""
ENDLESS: Final = 10
"""Failed attempts that are too many whatever else happens in the queue."""
FEW_ITEMS: Final = 8
"""Suspect items up to which the items are at fault, and not what they all depend on."""
GOOD_PER_POISON: Final = 3
"""Items completed for each suspect one, at least: otherwise it is not known whether others do better."""

EXPIRING: Final = 0.20
"""Share of closed leases' items whose lease ran out. A consumer that crashed once stays below in a busy queue."""
MIN_EXPIRED: Final = 3
"""Fewer expired items are one crash."""
EXPIRY_WINDOW: Final[Millis] = 30_000
"""Leases that run out come in waves as long as the lease: a window of this length sees two of the short ones."""

HELD: Final[Millis] = 6_000
"""An item in the same lease for so long counts as held: most handlers take less, and the incident is to be named within 15 s."""
HELD_SHARE: Final = 0.5
"""Share of the leased items that must be held for the handlers to be slow, or the consumer to hoard."""
ROUNDS_WAITING: Final = 2
"""Backlog, in multiples of what all consumers hold: below, their next round may take it all."""
MIN_HOARD: Final = 10
"""Items a consumer may hold without a progress: as many as a small batch."""

HELD_UP_AFTER: Final[Millis] = 60_000
"""Time that a key may be held up by a lease, or is still to be by a retry, before that is a problem: most handlers take less."""
MIN_BEHIND: Final = 10
"""Items of a key that have to wait for that: fewer are no backlog."""

DEAD_SHOWN: Final[Millis] = 60_000
"""A death is news for a minute: it happens in an instant, and an operator looks later."""
PAUSED_AFTER: Final[Millis] = 6_000
"""Time a queue is paused, with items waiting or calls refused, until somebody may have forgotten it."""
PAUSE_FORGOTTEN: Final[Millis] = 3_600_000
"""Time after which a pause of produces is forgotten although no producer has called."""
REFUSED_CALLS: Final = 3
"""Refused produces in a window: fewer are repeated by the client, and nobody notices."""

UPGRADE_OPEN: Final[Millis] = 86_400_000
"""Time after which an upgrade that could be finalized may be forgotten: a day shows whether the new release works."""

UNSERVED_AFTER: Final[Millis] = 4_000
"""Time a partition may take to open, as after a start or a move, before that is a problem."""
SLOW_COMMIT: Final[Millis] = 500
"""Average commit duration that is slow: a healthy disk or database takes a few milliseconds, and consumers wait for each."""
STUCK_COMMIT: Final[Millis] = 4_000
"""A single commit in flight for so long is stuck, whatever the average."""
STARTS_AFTER: Final[Millis] = 4_000
"""A slow commit must be seen this long: one slow flush is no trouble."""
THROTTLED: Final = 0.1
"""Share of a bucket's requests that it refuses from which on it is throttled, if it lasts for STARTS_AFTER: refusals of single requests are
normal, and repetition hides them."""
