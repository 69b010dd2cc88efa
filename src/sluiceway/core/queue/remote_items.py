"""What an instance knows of items at the others, and what it asks them.

A poll waits at each other instance and names the queues that are wanted here: those for which leases wait, or have waited within LINGER.
So consumers that come and go cost no call. An instance with items of such a queue ends its poll. What no lease here takes is noted, and
the next lease that finds nothing in its own share gets it. Polls do not name a queue to an instance that is known to have items of it.

All of it is hints. Each poll names all that is wanted, and it ends after `poll_time` at the latest, with all loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sluiceway.core.queue.routing import Peer
from sluiceway.kernel.clock import Millis
from sluiceway.model.peers import Load

POLL: Millis = 1_000
"""Duration of a poll in a small cluster, on average."""
MAX_POLLS = 33
"""Polls of an instance per second, on average: in larger clusters each one lasts longer."""
AFTER_FAILURE: Millis = 200
LINGER: Millis = 600_000
"""How long a queue is named in polls after the last lease that has waited for it here: without it, the first lease after a pause has all
owners of the queue polled anew."""


def poll_time(peers: int) -> Millis:
    """Duration of a poll of each of so many other instances, on average."""
    return max(POLL, peers * 1_000 // MAX_POLLS)


def after_failure(peers: int) -> Millis:
    """Time until an instance that has not answered is polled again: many may be away at once."""
    return max(AFTER_FAILURE, poll_time(peers) // 5)


@dataclass(eq=False)
class Wish:
    """A lease that waits for a queue's items. `offered`: the instance that is said to have some for it."""

    incarnation: str
    batch_size: int
    offered: Peer | None = None


@dataclass
class _Known:
    """What another instance has said last, and which queues the last poll of it named. `loads` None: it has said nothing yet."""

    loads: Mapping[str, Load] | None = None
    asked: frozenset[str] = frozenset()


class RemoteItems:
    """Queues wanted here, and what other instances have of them."""

    def __init__(self) -> None:
        self._known: dict[Peer, _Known] = {}
        self._wishes: dict[str, list[Wish]] = {}
        """Leases that wait, or have their offer and have not ended, oldest first."""
        self._until: dict[str, Millis] = {}
        """Of each queue for which leases have waited and none does: until when it is wanted."""
        self._has: dict[str, dict[Peer, int]] = {}
        """Items, by queue, that an instance is known to have and that no lease here was offered yet."""

    # ---- the other instances ----------------------------------------------------------------------------------

    def follow(self, peers: Iterable[Peer]) -> None:
        """These are all other instances."""
        there = dict.fromkeys(peers)
        for peer in [peer for peer in self._known if peer not in there]:
            self.failed(peer)
            del self._known[peer]
        for peer in there:
            self._known.setdefault(peer, _Known())

    def failed(self, peer: Peer) -> None:
        """The instance has not answered: nothing is known of it."""
        self._known[peer] = _Known()
        for has in self._has.values():
            has.pop(peer, None)

    def loads(self, incarnation: str) -> dict[Peer, Load]:
        """Last reported loads of the queue's shares on other instances."""
        return {peer: known.loads[incarnation] for peer, known in self._known.items() if known.loads and incarnation in known.loads}

    def busy(self, incarnation: str) -> dict[Peer, int]:
        """Last reported busy share of the queue on each other instance that has reported; 0 if it did not name the queue."""
        reported = ((peer, known.loads) for peer, known in self._known.items() if known.loads is not None)
        return {peer: loads[incarnation].busy if incarnation in loads else 0 for peer, loads in reported}

    # ---- polls ------------------------------------------------------------------------------------------------

    def asks(self, peer: Peer, now: Millis) -> tuple[str, ...]:
        """The queues that the poll of this instance names which begins now."""
        for incarnation in [incarnation for incarnation, until in self._until.items() if until <= now]:
            del self._until[incarnation]
            self._has.pop(incarnation, None)
        asked = tuple(sorted(each for each in self.wanted() if peer not in self._has.get(each, ())))
        self._known[peer].asked = frozenset(asked)
        return asked

    def wanted(self) -> list[str]:
        """All queues that are wanted here."""
        return [*self._wishes, *self._until]

    def is_wanted(self, incarnation: str) -> bool:
        return incarnation in self._wishes or incarnation in self._until

    def unasked(self, incarnation: str, owners: Iterable[Peer]) -> list[Peer]:
        """Those of the queue's owners whose polls do not name it, though they are not known to have items of it: to be polled anew."""
        has = self._has.get(incarnation, {})
        found = ((peer, self._known.get(peer)) for peer in owners if peer not in has)
        return [peer for peer, known in found if known is not None and incarnation not in known.asked]

    def answered(self, peer: Peer, loads: Mapping[str, Load]) -> list[Wish]:
        """The instance's poll has ended with these loads. Returns the waiting leases that are offered its items."""
        self._known[peer].loads = loads
        offered = []
        for incarnation in self.wanted():
            load = loads.get(incarnation)
            if load is None or load.ready <= 0:
                if incarnation in self._has:
                    self._has[incarnation].pop(peer, None)
                continue
            left, has = load.ready, self._has.setdefault(incarnation, {})
            for wish in self._wishes.get(incarnation, ()):
                if left <= 0:
                    break
                if wish.offered is None:
                    wish.offered = peer
                    offered.append(wish)
                    left -= wish.batch_size
            if left > 0:
                has[peer] = left
            else:
                has.pop(peer, None)
        return offered

    # ---- waiting leases ---------------------------------------------------------------------------------------

    def wish(self, wish: Wish) -> bool:
        """A lease begins to wait. It is `offered` the items of the instance that is known to have most. True: the queue was not wanted."""
        incarnation = wish.incarnation
        is_new = not self.is_wanted(incarnation)
        self._until.pop(incarnation, None)
        self._wishes.setdefault(incarnation, []).append(wish)
        has = self._has.get(incarnation, {})
        best = max(has, key=lambda peer: (has[peer], peer), default=None)
        if best is not None and has[best] > 0:
            wish.offered = best
            has[best] -= wish.batch_size
        return is_new

    def end(self, wish: Wish, got: bool | None, now: Millis) -> list[Peer]:
        """A lease waits no longer. `got`: whether the instance that it was offered has served it; None: it was not asked.

        Returns the instances of which too little is known now: to be polled anew.
        """
        wishes = self._wishes[wish.incarnation]
        wishes.remove(wish)
        if not wishes:
            del self._wishes[wish.incarnation]
            self._until[wish.incarnation] = now + LINGER
        has, peer = self._has.get(wish.incarnation, {}), wish.offered
        if peer is None or (got and has.get(peer, 1) > 0):
            return []
        # Where one has nothing any more, others that have said so long ago may have nothing, either.
        forgotten = list(has) if got is False else [peer] if peer in has else []
        for each in forgotten:
            del has[each]
        return forgotten
