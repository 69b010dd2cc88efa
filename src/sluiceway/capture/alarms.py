"""Alarms of a capture: problems that need an operator, as known to a member, and a board that publishes it."""

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
"""Once the position store knew a higher grant of a partition for this long, the log must have it, too."""
MOST = 50
"""Maximum alarms written per member; their reasons rarely differ."""
LONGEST = 1_000
"""Maximum characters written per reason."""

AlarmsOf = Mapping[str, Mapping[str, str]]
"""Stalled partitions and their reasons, by member; "" stands for the stream itself, or the log."""


class AlarmBoard:
    """Alarms in the meta store, one key per member that has any: `tasks/NAME/alarms/MEMBER`. Does not own the store.

    A member that dies leaves its alarms behind: they are void once it is no longer a member.
    """

    def __init__(self, store: MetaStore, name: str) -> None:
        """Raises `invalid_request` for a bad name."""
        self._store = store
        self._prefix = f"tasks/{check_queue_name(name, 'name')}/alarms/"

    async def write(self, member: str, alarms: Mapping[str, str]) -> None:
        """Replace the member's alarms; none removes its key. Raises PositionUnknownError."""
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
        """The alarms of these members. Raises PositionUnknownError."""
        return {member: alarms for member, alarms in (await self._all()).items() if member in members}

    async def forget_others(self, members: Collection[str]) -> None:
        """Drop the alarms of all but these members. Raises PositionUnknownError."""
        for member in (await self._all()).keys() - set(members):
            await self.write(member, {})

    async def _all(self) -> AlarmsOf:
        try:
            entries = (await self._store.read(prefixes=[self._prefix])).prefix(self._prefix)
        except StoreUnavailableError as error:
            raise PositionUnknownError(str(error)) from error
        return {key.removeprefix(self._prefix): msgspec.json.decode(entry.value, type=dict[str, str]) for key, entry in entries.items()}


class Alarms:
    """The alarms of one member, also written to the board, if there is one. Use from one event loop."""

    def __init__(self, member: str, board: AlarmBoard | None, again: Millis) -> None:
        """`again`: minimum interval between two writes to the board."""
        self._member, self._board, self._again = member, board, again
        self._partitions: dict[str, str] = {}
        self._stream = self._log = ""
        self._log_at: Millis = 0
        self._fenced: dict[str, tuple[int, int, Millis]] = {}
        """Partitions with a higher grant in the position store: the grant they were opened under, the higher one, and since when."""
        self._changed = asyncio.Event()
        self._written: dict[str, str] = {}
        self._wrote = False

    @property
    def now(self) -> dict[str, str]:
        """Reasons by stalled partition; "" stands for the stream itself, or the log."""
        capture = "; ".join(why for why in (self._stream, self._log) if why)
        return ({"": capture} if capture else {}) | self._partitions

    @property
    def partitions(self) -> frozenset[str]:
        return frozenset(self._partitions)

    def of_partition(self, token: str, why: str) -> None:
        """Set the partition's alarm; "" clears it."""
        if self._is_new(self._partitions.get(token, ""), f"partition {token}", why):
            self._partitions[token] = why
            if not why:
                del self._partitions[token]

    def of_stream(self, why: str) -> None:
        """Set the alarm that the stream does not name its partitions; "" clears it, also when other members ask the stream."""
        if self._is_new(self._stream, "the capture", why):
            self._stream = why

    def of_log(self, why: str) -> None:
        """Set the alarm that a record cannot be appended. It stands until `calm` finds it old, since other records may succeed
        meanwhile."""
        self._log_at = system.steady()
        if self._is_new(self._log, "the capture", why):
            self._log = why

    def fenced(self, token: str, grant: int, higher: int) -> None:
        """Note that the position store refused that grant for a higher one. Usually the log shows it in a moment."""
        self._fenced[token] = grant, higher, system.steady()

    def calm(self, state: State, current_at: Millis, after: Millis) -> None:
        """Update the alarms that depend on time. `state` includes everything that was in the log at `current_at`.

        A failed append not repeated for `after` is settled, or for other members to report.
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
            log.error("%s: %s makes no progress: %s", self._member, what, why)
        self._changed.set()
        return True

    async def tell(self) -> None:
        """Keep the board up to date, until cancelled."""
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
        """Remove this member's alarms from the board. If that fails they are void anyway, and others remove them."""
        if self._board is not None and self._wrote:
            with contextlib.suppress(PositionUnknownError):
                await self._board.write(self._member, {})

    async def forget_others(self, members: Collection[str]) -> None:
        """Remove alarms of former members from the board. Raises PositionUnknownError."""
        if self._board is not None:
            await self._board.forget_others(members)
