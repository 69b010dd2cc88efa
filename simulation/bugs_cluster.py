"""Planted bugs of a cluster's instances. First the ablations: each removes a rule that all safety rests on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from simulation.cluster_store import Vault
from simulation.planting import Bug, shelf
from sluiceway.cluster.group_member import GroupMember
from sluiceway.cluster.remote_demand import Demand
from sluiceway.cluster.remote_leases import RemoteLeases
from sluiceway.cluster.router import Router
from sluiceway.core.group.rounds import Rounds
from sluiceway.core.queue import owned_queue
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.partition_openings import Openings
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.changes import Fence
from sluiceway.model.meta import Stamp, View
from sluiceway.model.peers import Ask
from sluiceway.model.requests import Settle, Settled
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError

ABLATIONS: list[Bug] = []
ablation = shelf(ABLATIONS)
BUGS: list[Bug] = []
bug = shelf(BUGS)
MEMBER_BUGS: list[Bug] = []
member_bug = shelf(MEMBER_BUGS)
"""Bugs of the group's driver, which `cluster_group.py` finds."""


# ---- ablations ------------------------------------------------------------------------------------------------


@ablation(Vault, "may_write")
def writes_are_not_fenced(_original: Any) -> Any:
    """A store accepts writes of a former owner."""
    return staticmethod(lambda _store, _fence: True)


@ablation(Rounds, "_awaited")
def takes_over_at_once(_original: Any) -> Any:
    """A member serves newly planned items before their old owner has stopped or its lease has expired."""
    return lambda *_: False


@ablation(Router, "ask")
def takes_an_unheard_answer_for_a_refusal(original: Any) -> Any:
    """A peer's missing answer counts as a refusal, and the request is tried elsewhere."""

    async def ask(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return await original(self, *args, **named)
        except PeerUnknownError as error:
            raise PeerRefusedError(str(error)) from error

    return ask


@ablation(Openings, "claim")
def makes_what_is_missing_as_new(original: Any) -> Any:
    """A partition missing from its storage is created anew, as if the meta store had never heard of it."""

    async def claim(self: Any, ref: Any, fence: Fence) -> None:
        await original(self, ref, fence)

    return claim


# ---- routing --------------------------------------------------------------------------------------------------


def settles_nothing_at(code: str, original: Any) -> Any:
    """Return a replacement for `Router._part` that counts a settle's part as done when it ends with the error `code`."""

    async def one_part(self: Any, record: Any, peer: Any, request: Any) -> Any:
        try:
            return await original(self, record, peer, request)
        except SluicewayError as error:
            if error.code != code or not isinstance(request, Settle):
                raise
            return Settled()

    return one_part


@bug(Router, "_part")
def takes_a_part_that_nobody_heard_of_for_done(original: Any) -> Any:
    """A settle succeeds although one of the owners did not answer."""
    return settles_nothing_at("outcome_unknown", original)


@bug(Router, "_part")
def leaves_out_what_has_another_owner(original: Any) -> Any:
    """A settle succeeds without the part that was refused because its partition had just moved."""
    return settles_nothing_at("not_here", original)


@bug(Service, "_answer")
def passes_on_what_a_peer_asks(original: Any) -> Any:
    """An instance asked to settle another instance's items forwards the request to the owner that it knows."""

    async def answer(self: Any, asked: Ask) -> Any:
        record = self._catalog.of(asked.incarnation)
        if record is not None and isinstance(asked.request, Settle):
            return await self._router.settle(record, asked.request)
        return await original(self, asked)

    return answer


@bug(RemoteLeases, "_holders")
def takes_more_under_a_key(_original: Any) -> Any:
    """A repeated lease key does not find the leases that other instances have granted under it."""

    async def holders(*_: Any) -> list[Any]:
        return []

    return holders


@bug(Demand, "_offer")
def tells_nobody_of_an_offer(_original: Any) -> Any:
    """A waiting consumer does not hear of items at other instances."""

    async def offer(_self: Any, _peer: Any, _loads: Any) -> None:
        return

    return offer


@bug(Demand, "follow")
def asks_nobody_for_items(_original: Any) -> Any:
    """Other instances are not polled for items."""
    return lambda _self, _peers, *, moved=False: None


# ---- shares ---------------------------------------------------------------------------------------------------


@bug(OwnedQueue, "gain")
def counts_openings_from_the_start(original: Any) -> Any:
    """A partition gained again under the same token is opened with the same fences."""

    def gain(self: Any, *args: Any) -> None:
        self._openings.clear()
        original(self, *args)

    return gain


@bug(owned_queue, "SluicewayError")
def refuses_what_it_was_writing(original: Any) -> Any:
    """Writes in flight when a partition moves are reported as not done."""
    return lambda code, *rest: original("unavailable" if code == "outcome_unknown" else code, *rest)


@bug(Service, "learnt")
def forgets_what_it_owns_of_a_new_queue(original: Any) -> Any:
    """Partitions gained before their queue was known are not served."""

    def learnt(self: Any, record: Any) -> None:
        tokens, self.ownership.tokens = self.ownership.tokens, lambda _: {}
        try:
            original(self, record)
        finally:
            self.ownership.tokens = tokens

    return learnt


@bug(Service, "lost")
def goes_on_with_what_it_has_lost(_original: Any) -> Any:
    """A partition that has moved to another instance is still served."""

    async def lost(_self: Any, _incarnation: str, _partition: int) -> None:
        return

    return lost


@bug(Service, "gained")
def does_not_open_what_it_gains(_original: Any) -> Any:
    """A partition gained from another instance is not served."""
    return lambda _self, _incarnation, _partition, _token: None


@bug(QueueDriver, "_fence")
def writes_under_the_first_grant(_original: Any) -> Any:
    """The fence does not contain the token."""
    return lambda _self, _partition, opening: Fence(2, 1, opening)


# ---- group driver ---------------------------------------------------------------------------------------------


@member_bug(View, "after")
def keeps_what_was_deleted(original: Any) -> Any:
    """A refreshed view still has the records that were deleted, so a dead member stays in it for good."""

    def after(self: Any, stamp: Stamp, rows: Any) -> View:
        view: View = original(self, stamp, [row for row in rows if row[1] is not None])
        return view

    return after


@member_bug(GroupMember, "_commit")
def takes_a_beat_that_is_not_answered_for_recorded(original: Any) -> Any:
    """A beat of a large group whose commit has no answer renews the lease as if it were recorded."""

    async def commit(self: Any, writes: Any) -> Any:
        try:
            return await original(self, writes)
        except StoreUnavailableError:
            return self._after_beat(writes, writes.checks[self._keys.member(self.name)] or 0)

    return commit


@member_bug(View, "after")
def says_to_be_newer_than_it_is(original: Any) -> Any:
    """A refreshed view without changes of its own has the stamp of the next commit, whose changes are then missing in it."""

    def after(self: Any, stamp: Stamp, rows: Any) -> View:
        found = list(rows)
        view: View = original(self, stamp if found else stamp + 1, found)
        return view

    return after


@member_bug(GroupMember, "items")
def owns_beyond_its_lease(_original: Any) -> Any:
    """A member that was frozen still claims its items after its lease."""
    return property(lambda self: dict(self._held))


@member_bug(GroupMember, "_lapsed")
def does_not_tell_of_a_lapse(_original: Any) -> Any:
    """An expired lease takes no items away until the store is back."""
    return lambda _self: None


@member_bug(GroupMember, "_tell")
def does_not_wait_for_its_handler(original: Any) -> Any:
    """A member is recorded as stopped while its handler is still running."""
    running = set()

    async def tell(self: Any, change: Any) -> None:
        task = asyncio.ensure_future(original(self, change))
        running.add(task)
        task.add_done_callback(running.discard)

    return tell


@member_bug(GroupMember, "__init__")
def tells_of_two_changes_at_once(original: Any) -> Any:
    """A lapse is reported while the handler is still at work on another change."""

    def begin(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self._telling = contextlib.AsyncExitStack()

    return begin


@member_bug(GroupMember, "stop")
def goes_without_a_word(_original: Any) -> Any:
    """A member that stops is not told that it has lost its items."""

    async def stop(self: Any) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    return stop


@member_bug(GroupMember, "leave")
def leaves_by_dying(_original: Any) -> Any:
    """A member that leaves in order only ends its loop."""

    async def leave(self: Any) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    return leave
