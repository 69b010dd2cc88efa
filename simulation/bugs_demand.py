"""Planted bugs of consumers that wait for items of other instances."""

from __future__ import annotations

from typing import Any

from simulation.planting import Bug, shelf
from sluiceway.cluster import remote_demand
from sluiceway.cluster.remote_demand import Demand
from sluiceway.core.queue import remote_items
from sluiceway.core.queue.poll_line import PollLine
from sluiceway.core.queue.remote_items import POLL, RemoteItems
from sluiceway.kernel.clock import Millis

BUGS: list[Bug] = []
bug = shelf(BUGS)


# ---- what is asked --------------------------------------------------------------------------------------------


@bug(RemoteItems, "unasked")
def tells_no_owner_of_a_new_wish(_original: Any) -> Any:
    """The first lease of a queue waits until each poll ends by itself."""
    return lambda _self, _incarnation, _owners: []


@bug(RemoteItems, "end")
def trusts_what_was_said_once(_original: Any) -> Any:
    """An instance that had items once is not polled for them again."""

    def end(self: Any, wish: Any, _got: Any, now: Millis) -> list[Any]:
        wishes = self._wishes[wish.incarnation]
        wishes.remove(wish)
        if not wishes:
            del self._wishes[wish.incarnation]
            self._until[wish.incarnation] = now + remote_items.LINGER
        return []

    return end


@bug(RemoteItems, "answered")
def drops_what_no_lease_takes(original: Any) -> Any:
    """Items of which an instance has told are forgotten if no lease waits at that moment, and are not asked for again."""

    def answered(self: Any, peer: Any, loads: Any) -> Any:
        offered = original(self, peer, loads)
        for has in self._has.values():
            if peer in has:
                has[peer] = 0
        return offered

    return answered


@bug(remote_demand, "poll_time")
def polls_each_second_in_any_cluster(_original: Any) -> Any:
    """Polls of a large cluster are as short as those of a small one."""
    return lambda _peers: POLL


# ---- polls told ----------------------------------------------------------------------------------------------


@bug(PollLine, "tell")
def tells_all_at_once(original: Any) -> Any:
    """An item ends the polls of all instances."""

    def tell(self: Any, incarnation: str, ready: int, now: Millis) -> list[str]:
        told: list[str] = []
        while more := original(self, incarnation, ready, now + remote_items.LINGER * len(told)):
            told += more
        return told

    return tell


@bug(PollLine, "next_look")
def waits_for_those_it_has_told(_original: Any) -> Any:
    """An instance that was told and has died keeps others from being told until something happens to the queue."""
    return lambda _self, _incarnation: None


@bug(Demand, "look")
def tells_none_of_what_is_produced(_original: Any) -> Any:
    """A queue's cycle ends no polls."""
    return lambda _self, _incarnation: None


@bug(PollLine, "join")
def hears_the_first_queue_of_each_poll(original: Any) -> Any:
    """A poll for several queues waits for one of them only."""
    return lambda self, asker, wanted: original(self, asker, wanted[:1])
