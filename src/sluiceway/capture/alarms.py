"""What does not go on without somebody's help: what a member knows of that, and a place where anybody sees it who looks at the capture."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping

import msgspec

from sluiceway.adapters import system
from sluiceway.core.group.task_state import State
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import PositionUnknownError

log = logging.getLogger(__name__)

DOUBT: Millis = 10_000
"""So long after the position store knew a higher grant of a partition the log must have it, too."""
MOST = 50
"""Alarms of a member that are written; they rarely have different reasons."""
LONGEST = 1_000
"""Characters of a reason that are written."""

AlarmsOf = Mapping[str, Mapping[str, str]]
"""By member: partitions that do not go on, each with why; "" is the stream itself, or the log."""


class AlarmBoard:
    """One key for each member that has alarms, `tasks/NAME/alarms/MEMBER`. The store is not closed with it.

    Who dies leaves its own behind: they mean nothing when it is no member any more.
    """

    def __init__(self, store: MetaStore, name: str) -> None:
        """Raises `invalid_request` for a bad name."""
        self._store = store
        self._prefix = f"tasks/{check_queue_name(name, 'name')}/alarms/"

    async def write(self, member: str, alarms: Mapping[str, str]) -> None:
        """These instead of what was there; none: nothing is there. Raises PositionUnknownError."""
        key = self._prefix + member
        first = {token: why[:LONGEST] for token, why in sorted(alarms.items())[:MOST]}
        try:
            if first:
                await self._store.commit(puts={key: msgspec.json.encode(first)})
            else:
                await self._store.commit(deletes=[key])
        except MetaUnknownError as error:
            raise PositionUnknownError(str(error)) from error

    async def read(self, members: Collection[str]) -> AlarmsOf:
        """Those of these members. Raises PositionUnknownError."""
        return {member: alarms for member, alarms in (await self._all()).items() if member in members}

    async def forget_others(self, members: Collection[str]) -> None:
        """Drop what those have left who are none of these. Raises PositionUnknownError."""
        for member in (await self._all()).keys() - set(members):
            await self.write(member, {})

    async def _all(self) -> AlarmsOf:
        try:
            entries = (await self._store.read(prefixes=[self._prefix])).prefix(self._prefix)
        except StoreUnavailableError as error:
            raise PositionUnknownError(str(error)) from error
        return {key.removeprefix(self._prefix): msgspec.json.decode(entry.value, type=dict[str, str]) for key, entry in entries.items()}


class Alarms:
    """Those of one member, which it also writes to the board, if there is one. Use from one event loop."""

    def __init__(self, member: str, board: AlarmBoard | None, again: Millis) -> None:
        """`again`: between two writes to the board, at least."""
        self._member, self._board, self._again = member, board, again
        self._partitions: dict[str, str] = {}
        self._stream = self._log = ""
        self._log_at: Millis = 0
        self._fenced: dict[str, tuple[int, int, Millis]] = {}
        """Partitions that the position store knows a higher grant of: under which they were opened, that grant, and since when."""
        self._changed = asyncio.Event()
        self._written: dict[str, str] = {}
        self._wrote = False

    @property
    def now(self) -> dict[str, str]:
        """Of partitions that do not go on, why; "" is the stream itself, or the log."""
        capture = "; ".join(why for why in (self._stream, self._log) if why)
        return ({"": capture} if capture else {}) | self._partitions

    @property
    def partitions(self) -> frozenset[str]:
        return frozenset(self._partitions)

    def of_partition(self, token: str, why: str) -> None:
        """ "": it goes on."""
        if self._is_new(self._partitions.get(token, ""), f"partition {token}", why):
            self._partitions[token] = why
            if not why:
                del self._partitions[token]

    def of_stream(self, why: str) -> None:
        """That the stream does not say which partitions there are; "": it does, or it is for others to ask."""
        if self._is_new(self._stream, "the capture", why):
            self._stream = why

    def of_log(self, why: str) -> None:
        """That a record cannot be appended. It stands until `calm` finds it old, as others can be appended meanwhile."""
        self._log_at = system.steady()
        if self._is_new(self._log, "the capture", why):
            self._log = why

    def fenced(self, token: str, grant: int, higher: int) -> None:
        """The position store has refused that grant for a higher one. Usually the log says so in a moment."""
        self._fenced[token] = grant, higher, system.steady()

    def calm(self, state: State, current_at: Millis, after: Millis) -> None:
        """Look again at what time decides. `state` has all that was in the log at `current_at`.

        What could not be appended, and was not tried again for `after`, is done or for others to say.
        """
        if self._log and system.steady() - self._log_at >= after:
            self.of_log("")
        for token, (grant, higher, since) in list(self._fenced.items()):
            partition = state.partitions.get(token)
            if partition is None or partition.owner != self._member or partition.grant != grant:
                del self._fenced[token]
            elif current_at >= since + DOUBT:
                # Grants are numbers of the log.
                known = f"the position store was opened under grant {higher}, which the log does not have"
                self.of_partition(token, f"{known}: was the log lost, or is it another one?")

    def _is_new(self, before: str, what: str, why: str) -> bool:
        if before == why:
            return False
        if why:
            log.error("%s: %s does not go on: %s", self._member, what, why)
        self._changed.set()
        return True

    async def tell(self) -> None:
        """Keep the board as it is here, until cancelled."""
        while self._board is not None:
            await self._changed.wait()
            self._changed.clear()
            if self.now != self._written:
                now, self._wrote = self.now, True
                try:
                    await self._board.write(self._member, now)
                    self._written = now
                except PositionUnknownError as error:
                    log.warning("%s could not write its alarms: %s", self._member, error)
                    self._changed.set()
            await asyncio.sleep(self._again / 1000)

    async def leave(self) -> None:
        """Remove from the board what is there. If that fails it means nothing any more, and others remove it."""
        if self._board is not None and self._wrote:
            with contextlib.suppress(PositionUnknownError):
                await self._board.write(self._member, {})

    async def forget_others(self, members: Collection[str]) -> None:
        """Remove what those have left on the board who are no members any more. Raises PositionUnknownError."""
        if self._board is not None:
            await self._board.forget_others(members)
