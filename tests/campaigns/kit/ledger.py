"""What the clients of one queue were told, kept outside the server, and what follows from it.

Every item has a name of its own, `WHO.REQUEST.N`, and a payload that can be made again from the name.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

SENT, STORED, REFUSED = "sent", "stored", "refused"


def payload_of(name: str) -> str:
    """The name and a filler that follows from it, up to 2 KB, so that torn or swapped bytes show."""
    mark = crc32(name.encode())
    return f"{name}|" + f"{mark:08x}" * (mark % 16 if mark % 10 else 250)


def name_of(payload: str) -> str | None:
    """The name, or None if these are not the bytes that were sent under it."""
    name = payload.partition("|")[0]
    return name if payload == payload_of(name) else None


def request_of(name: str) -> str:
    return name.rpartition(".")[0]


@dataclass(slots=True)
class Holder:
    """The newest lease under which an item was served."""

    lease: str
    granted_at: int
    let_go: bool = False
    """Its client asked to put the item back, so the next may have it before the deadline."""


@dataclass(slots=True)
class Tally:
    """Counts over a campaign. Those in `WRONG` must stay 0."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    WRONG = ("lost", "doubled", "phantom", "torn", "leased twice", "early", "came back", "other")

    def wrong(self, kind: str, example: str) -> None:
        self.counts[kind] += 1
        self.examples.append(f"{kind}: {example}")

    @property
    def faults(self) -> int:
        return sum(self.counts[kind] for kind in self.WRONG)

    def summary(self) -> str:
        good = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()) if kind not in self.WRONG)
        return f"{good}; " + ", ".join(f"{self.counts[kind]} {kind}" for kind in self.WRONG)


class Ledger:
    """Thread safe. Calls before a request say what may happen, calls after its answer what did."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._mutex = threading.Lock()
        self._sent: dict[str, str] = {}
        self._not_before: dict[str, int] = {}
        self._origins: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """Whose origin it is."""
        self._seen: set[str] = set()
        self._holders: dict[str, Holder] = {}
        self._deadlines: dict[str, int] = {}
        self._tried: dict[str, set[str]] = {}
        self._completed: dict[str, int] = {}
        self._dying: set[str] = set()
        self._unsettled: set[str] = set()
        self.acknowledged = 0
        """Items in acknowledged calls; grows for ever."""
        self._before: Counter[str] = Counter()
        """What the server's counters showed when the queue was last empty."""

    # -- producing ------------------------------------------------------------------------------

    def sending(self, names: list[str], not_before: int = 0) -> None:
        with self._mutex:
            self._sent.update(dict.fromkeys(names, SENT))
            self._unsettled.update(names)
            if not_before:
                self._not_before.update(dict.fromkeys(names, not_before))

    def stored(self, names: list[str], first_id: str) -> None:
        place, _, first = first_id.rpartition(".")
        with self._mutex:
            self._sent.update(dict.fromkeys(names, STORED))
            for n, name in enumerate(names):
                self._same_origin(name, f"{place}.{int(first) + n}")
            self._count("produced", len(names))

    def refused(self, names: list[str]) -> None:
        with self._mutex:
            self._sent.update(dict.fromkeys(names, REFUSED))
            self._unsettled.difference_update(names)

    def _same_origin(self, name: str, origin: str) -> None:
        known = self._origins.setdefault(name, origin)
        if known != origin:
            self.tally.wrong("doubled", f"{name} is {known} and {origin}")
        # As two servers do that both believe that a partition is theirs.
        other = self._names.setdefault(origin, name)
        if other != name:
            self.tally.wrong("doubled", f"{origin} was given to {other} and to {name}")

    def _count(self, what: str, items: int) -> None:
        self.acknowledged += items
        self.tally.counts[what] += items

    # -- leasing --------------------------------------------------------------------------------

    def served(self, payload: str, item: dict[str, Any], granted_at: int, deadline: int) -> str | None:
        """Judge one item of a lease's answer. Its name, if it has one."""
        with self._mutex:
            name = self._known(payload)
            if name is None:
                return None
            self._same_origin(name, item["origin"])
            self.tally.counts["served again"] += name in self._seen
            self._seen.add(name)
            if granted_at < self._not_before.get(name, 0):
                self.tally.wrong("early", f"{name} at {granted_at}, not before {self._not_before[name]}")
            if granted_at > self._completed.get(name, granted_at):
                self.tally.wrong("came back", f"{name} was completed and is {item['id']} now")
            self._deadlines[item["lease_id"]] = max(deadline, self._deadlines.get(item["lease_id"], 0))
            self._hold(name, Holder(item["lease_id"], granted_at))
            return name

    def _known(self, payload: str) -> str | None:
        name = name_of(payload)
        if name is None:
            self.tally.wrong("torn", payload[:60])
        elif self._sent.get(name, REFUSED) == REFUSED:
            self.tally.wrong("phantom", f"{name} was {self._sent.get(name, 'never sent')}")
        else:
            return name
        return None

    def _hold(self, name: str, new: Holder) -> None:
        old = self._holders.get(name)
        if old is not None and old.lease == new.lease:
            return
        if old is not None and new.granted_at < old.granted_at:
            old, new = new, old  # the answers were read in another order than they were given
        if old is not None and not old.let_go and new.granted_at < self._deadlines.get(old.lease, 0):
            self.tally.wrong("leased twice", f"{name}: {old.lease} until {self._deadlines[old.lease]}, {new.lease} from {new.granted_at}")
        self._holders[name] = new

    def extended(self, lease: str, deadline: int) -> None:
        with self._mutex:
            self._deadlines[lease] = max(deadline, self._deadlines.get(lease, 0))
            self._count("leases extended", 1)

    # -- settling -------------------------------------------------------------------------------

    def trying(self, names: list[str], verdict: str) -> None:
        """A call that may complete (`done`), put back (`retry`) or kill (`dead`) these is about to leave."""
        with self._mutex:
            for name in names:
                self._tried.setdefault(name, set()).add(verdict)
                if verdict == "retry" and name in self._holders:
                    self._holders[name].let_go = True
            if verdict != "retry":
                self._unsettled.difference_update(names)

    def fated(self, names: list[str], verdict: str) -> None:
        """The server said that it happened."""
        now = time.time_ns() // 1_000_000
        with self._mutex:
            if verdict == "done":
                for name in names:
                    if name in self._completed:
                        self.tally.wrong("doubled", f"{name} was completed twice")
                    self._completed[name] = now
            elif verdict == "dead":
                self._dying.update(names)
            self._count({"done": "completed", "retry": "retried", "dead": "killed"}[verdict], len(names))

    # -- judging --------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Items that may be there, and that nobody has tried to be rid of."""
        return len(self._unsettled)

    def check_counters(self, now: Counter[str]) -> None:
        """Right after a restart, with no call under way: the server's counters lie between what it said and what was asked of it."""
        with self._mutex:
            new = now - self._before
            stored = sum(state == STORED for state in self._sent.values())
            sent = sum(state != REFUSED for state in self._sent.values())
            done = sum("done" in verdicts for verdicts in self._tried.values())
            if not stored <= new["produced"] <= sent:
                self.tally.wrong("lost" if new["produced"] < stored else "phantom", f"produced {stored} to {sent}, found {new['produced']}")
            if not len(self._completed) <= new["completed"] <= done:
                kind = "lost" if new["completed"] < len(self._completed) else "other"
                self.tally.wrong(kind, f"completed {len(self._completed)} to {done}, found {new['completed']}")
            if new["dead"] + new["transferring"] < len(self._dying):
                self.tally.wrong("lost", f"killed {len(self._dying)}, found {new['dead']} and {new['transferring']} on the way")
            self.check_balance(now)

    def check_balance(self, now: Counter[str]) -> None:
        """Whether the server's counters agree with each other."""
        if now["produced"] != now["completed"] + now["dead"] + now["total"] + now["transferring"]:
            self.tally.wrong("other", f"the books do not balance: {dict(now)}")

    def close(self, now: Counter[str], dead: list[tuple[str, dict[str, Any]]], max_attempts: int) -> None:
        """The queue is empty, and these payloads lay in its dead queue: judge every item, and begin anew."""
        with self._mutex:
            arrived = Counter(name for payload, item in dead if (name := self._dead(payload, item, max_attempts)) is not None)
            for name, times in arrived.items():
                if times > 1:
                    self.tally.wrong("doubled", f"{name} arrived {times} times in the dead queue")
                if name in self._completed:
                    self.tally.wrong("doubled", f"{name} was completed and died")
            self._check_losses(arrived)
            landed = {name for name in self._sent if name in self._seen or name in arrived}
            self._check_whole_requests(landed)
            self.check_totals(now - self._before, len(landed), len(arrived))
            self.check_balance(now)
            self.tally.counts["died"] += len(arrived)
            self._begin_anew(now)

    def check_totals(self, new: Counter[str], landed: int, arrived: int) -> None:
        """The queue is empty after so many items landed, of which so many died: what the server's counters must show."""
        for counter, value in {"produced": landed, "completed": landed - arrived, "dead": arrived}.items():
            if new[counter] != value:
                self.tally.wrong("other", f"{counter} is {new[counter]}, but the ledger has {value}")

    def _dead(self, payload: str, item: dict[str, Any], max_attempts: int) -> str | None:
        name = self._known(payload)
        if name is not None:
            self._same_origin(name, item["origin"])
            attempts = int(item["headers"]["sluiceway-attempts"])
            if attempts != max_attempts and "dead" not in self._tried.get(name, ()):
                self.tally.wrong("other", f"{name} died after {attempts} attempts, and nobody asked for it")
        return name

    def _check_losses(self, arrived: Counter[str]) -> None:
        for name, state in self._sent.items():
            gone = name not in arrived
            if state == STORED and gone and "done" not in self._tried.get(name, ()):
                self.tally.wrong("lost", f"{name} was stored, and is nowhere")
            if name in self._dying and gone:
                self.tally.wrong("lost", f"{name} was killed, and did not arrive in the dead queue")

    def _check_whole_requests(self, landed: set[str]) -> None:
        """A produce without an answer has landed whole or not at all."""
        sizes = Counter(request_of(name) for name in self._sent)
        found = Counter(request_of(name) for name in landed)
        unknown = {request_of(name) for name, state in self._sent.items() if state == SENT}
        for request in unknown:
            if found[request] not in (0, sizes[request]):
                self.tally.wrong("torn", f"{found[request]} of {sizes[request]} items of request {request}")
            self.tally.counts["unknown, landed" if found[request] else "unknown, not landed"] += 1

    def _begin_anew(self, now: Counter[str]) -> None:
        self._before = Counter(now)
        for book in (
            self._sent,
            self._not_before,
            self._origins,
            self._names,
            self._holders,
            self._deadlines,
            self._tried,
            self._completed,
        ):
            book.clear()
        for names in (self._seen, self._dying, self._unsettled):
            names.clear()
