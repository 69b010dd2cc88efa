"""Group election: an Election through a Sluiceway group with one item, whose owner leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sluiceway.adapters import system
from sluiceway.cluster.group_member import AGAIN, GroupMember, define
from sluiceway.core.group.group_records import GroupView, Parameters, owners
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.names import QUEUE_NAME, check_queue_name
from sluiceway.model.task_records import Group
from sluiceway.ports.meta_store import MetaStore

log = logging.getLogger(__name__)

ITEM = "leader"
LOOK_AGAIN: Millis = 100
"""Interval at which the member is asked, at no cost, whether it still has its place: losing nothing but that is not notified."""
LEAVE_TIMEOUT: Millis = 5_000
"""Time limit for leaving in order. Beyond it, others notice when the member's lease has run out."""


def group_name(name: str) -> str:
    """The name of the group that elects the capture's leader. Raises `invalid_request`."""
    group = f"tasks.{check_queue_name(name, 'name')}"
    if not QUEUE_NAME.fullmatch(group):
        raise invalid("name", f"{name[:32]}… is too long: the group that elects a leader is called {group[:38]}…, at most 128")
    return group


class MetaElection:
    """The group `tasks.NAME` in the meta store, in which each process is a member with the task's name as its address.

    A member is told that it leads only after its predecessor has stopped, or its lease run out. A process that was frozen learns from its
    clock, soon after it resumes, that it no longer leads. Generations are the numbers of the group's rounds. Does not own the store.
    """

    def __init__(self, store: MetaStore, name: str, parameters: Parameters | None = None) -> None:
        """`parameters` None: the group's current ones, or the defaults. Raises `invalid_request` for a bad name."""
        self._group = group_name(name)
        self._store = store
        self._parameters = parameters
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._told: Group | None = None
        self._member: GroupMember | None = None

    async def join(self, name: str, told: Callable[[Group], None]) -> None:
        assert self._task is None, "one member takes part once"
        self._task = asyncio.create_task(self._run(name, told))

    async def leave(self) -> None:
        """Leave. No notification follows the call. Takes about a round, at most LEAVE_TIMEOUT."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._member is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT / 1000):
                    await self._member.leave()
            await self._member.stop()

    async def _run(self, name: str, told: Callable[[Group], None]) -> None:
        await self._define()
        member = GroupMember(
            self._store,
            self._group,
            lambda _: self._changed.set(),
            name="task",
            address=name,
            on_look=self._looked,
            # A lapse is normal on a machine busy with starting Spark. The leader returns, or another takes over; readers continue.
            lapse_level=logging.DEBUG,
        )
        await member.join()
        self._member = member
        while True:
            self._changed.clear()
            self._tell(_group(member, self._told), told)
            await system.wait(self._changed, LOOK_AGAIN)

    async def _define(self) -> None:
        while True:
            try:
                await define(self._store, self._group, [ITEM], parameters=self._parameters)
                return
            except SluicewayError as error:
                log.warning("group %s: %s", self._group, error)
            except Exception:
                # Such as a record of a later release. A member that gave up would consider itself alive, and never learn the leader.
                log.exception("group %s cannot be joined, will retry", self._group)
            await asyncio.sleep(AGAIN / 1000)

    def _looked(self, _: GroupView) -> None:
        self._changed.set()

    def _tell(self, group: Group | None, told: Callable[[Group], None]) -> None:
        if group is None or group == self._told:
            return
        self._told = group
        told(group)


def _group(member: GroupMember, before: Group | None) -> Group | None:
    """The leader and members as far as that member can know; None: it has had no place yet."""
    look = member.look
    if look is None or look.plan is None or look.round is None or not member.holds or member.name not in look.round.participants:
        return before and Group(before.generation, "", ())
    names = {each: look.members[each].address for each in look.round.participants if each in look.members}
    owner = owners(look).get(ITEM, "")
    if owner == member.name and member.token(ITEM) is None:
        # Not before the previous leader has surely stopped.
        owner = ""
    leader = names.get(owner, "")
    return Group(look.plan.round, leader, tuple(sorted(names.values())) if leader else ())
