"""Audit trail: a durable entry for every change, written in the change's own commit, or before a change that has none in the meta store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

import msgspec

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import AUDIT_ENTRIES, AUDIT_TRIM_BATCH, MAX_AUDIT_DETAIL_BYTES, MAX_AUDIT_TEXT
from sluiceway.model.access import Actor
from sluiceway.model.audit import AuditEntry, decode_entry, encode_entry
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.meta_store import Entry, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.wire.answers import queue_info

log = logging.getLogger(__name__)

AUDIT: Final = "audit/"
RECORD_TIMEOUT: Final[Millis] = 2_000
TRIM_EVERY: Final = 1_000
"""Entries of this process between two counts of all entries, each of which reads them all."""

_AT_DIGITS: Final = 15
_PERIOD_DIGITS: Final = 10
"""The first digits of an id are a period of 100 seconds, whose entries can be read separately."""
_MOST_PERIODS: Final = 20
_ENDING: Final = ("outcome", "code")
_NO_SETTING: Final = ("queue_name", "incarnation", "created_at", "updated_at", "version", "partitions", "rebalance")

T = TypeVar("T")


class AuditTrail:
    """All entries of one meta store, of which the newest `keep` are kept (and some more, until the next count).

    Several trails may share a store, within a process or across processes. `close` after use.
    """

    def __init__(self, meta: MetaStore, keep: int = AUDIT_ENTRIES) -> None:
        self._meta = meta
        self.keep = keep
        """May be changed at any time."""
        self._writer = system.new_incarnation()
        self._last: Millis = 0
        self._until_trim = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- writing ----------------------------------------------------------------------------------------------

    def entry(self, action: str, by: Actor, queue_name: str = "", detail: Mapping[str, Any] | None = None) -> tuple[str, bytes]:
        """Return the key and value to put into the change's own commit, so that neither exists without the other.

        Texts in the detail are cut at MAX_AUDIT_TEXT; a detail still too large is left out, except for how the change ended.
        """
        # One entry a millisecond per trail, so that time and writer suffice as an id.
        self._last = max(system.now(), self._last + 1)
        name = f"{self._last:0{_AT_DIGITS}d}-{self._writer}"
        self._trim_now_and_then()
        return AUDIT + name, encode_entry(
            AuditEntry(name, self._last, by.name, action, queue_name, by.request_id, _bounded(dict(detail or {})))
        )

    async def record(self, action: str, by: Actor, queue_name: str = "", detail: Mapping[str, Any] | None = None) -> None:
        """Write an entry for what changes nothing that is stored. If that fails, the entry is logged.

        Returns after RECORD_TIMEOUT at the latest: a call must end in time though the meta store does not answer. The entry is then still
        written, or logged.
        """
        key, value = self.entry(action, by, queue_name, detail)
        await asyncio.wait([self._spawn(self._put({key: value}))], timeout=RECORD_TIMEOUT / 1000)

    async def recorded(self, action: str, by: Actor, queue_name: str, detail: Mapping[str, Any], change: Callable[[], Awaitable[T]]) -> T:
        """Make a change outside the meta store, with an entry, and return its result.

        The entry is stored as *begun* before the change, and replaced by one that says *done* or *unknown* after it; if the change was
        surely not made, it is removed. So each change has an entry, whatever becomes of this process. Without an answer of the meta store
        within RECORD_TIMEOUT raises `unavailable`, and the change is not made. Once the change is made, the call waits no longer than that
        for the entry to be replaced: until then, and for good if that fails, it stays *begun*.
        """
        begun = await self._begin(action, by, queue_name, detail)
        try:
            result = await change()
        except SluicewayError as error:
            # A final refusal changed nothing. Before other errors, the change may have been made in some of the partitions.
            may_be_made = error.kind.status >= 500 or error.retryable
            ended = {"outcome": "unknown", "code": error.code} if may_be_made else None
            await self._end(begun, action, by, queue_name, ended and {**detail, **ended})
            raise
        except asyncio.CancelledError:
            self._spawn(self._end(begun, action, by, queue_name, {**detail, "outcome": "unknown"}))
            raise
        await self._end(begun, action, by, queue_name, {**detail, "outcome": "done", "result": result})
        return result

    async def _begin(self, action: str, by: Actor, queue_name: str, detail: Mapping[str, Any]) -> str:
        """Store the entry of a change that is about to be made, and return its key. Raises `unavailable`."""
        key, value = self.entry(action, by, queue_name, {**detail, "outcome": "begun"})
        writing = asyncio.ensure_future(self._meta.commit(puts={key: value}))
        is_stored = False
        try:
            await asyncio.wait([writing], timeout=RECORD_TIMEOUT / 1000)
            is_stored = writing.done() and writing.exception() is None
        finally:
            if not is_stored:
                self._spawn(self._take_back(writing, key))
        if not is_stored:
            raise SluicewayError("unavailable", "the audit trail cannot be written, so nothing was changed")
        return key

    async def _take_back(self, writing: asyncio.Future[Any], key: str) -> None:
        """Remove the entry of a change that is not made, which may be stored yet."""
        await asyncio.wait([writing])
        if not isinstance(writing.exception(), StoreUnavailableError):
            await self._put({}, [key])

    async def _end(self, begun: str, action: str, by: Actor, queue_name: str, detail: Mapping[str, Any] | None) -> None:
        """Replace the entry of a change by one that says how it ended; without `detail`, remove it. Returns as `record` does."""
        puts = {} if detail is None else dict([self.entry(action, by, queue_name, detail)])
        await asyncio.wait([self._spawn(self._put(puts, [begun]))], timeout=RECORD_TIMEOUT / 1000)

    async def _put(self, puts: Mapping[str, bytes], deletes: Sequence[str] = ()) -> None:
        try:
            await self._meta.commit(puts=puts, deletes=deletes)
        except (MetaUnknownError, StoreUnavailableError) as error:
            about = [*(value.decode() for value in puts.values()), *(f"remove {key}" for key in deletes)]
            log.error("the audit trail may be without a change of it: %s: %s", "; ".join(about), error)

    # ---- reading ----------------------------------------------------------------------------------------------

    async def list(
        self,
        limit: int,
        pivot: str = "",
        queue_name: str = "",
        action: str = "",
        actor: str = "",
        since: Millis = 0,
        until: Millis | None = None,
    ) -> list[AuditEntry]:
        """Return the newest entries, newest first; with `pivot`, those older than it; filtered by queue, action and actor, from `since` on
        and before `until`.

        An action that ends with a dot matches as a prefix; an actor that is a key's name matches all keys of that name. Raises
        `unavailable`.
        """
        entries = await self._entries(*self._prefixes(since))
        found: list[AuditEntry] = []
        for key in sorted(entries, reverse=True):
            if len(found) == limit:
                break
            if pivot and key >= AUDIT + pivot:
                continue
            entry = decode_entry(entries[key].value)
            asked_for = queue_name in ("", entry.queue_name) and _is_action(entry.action, action) and _is_actor(entry.actor, actor)
            if asked_for and since <= entry.at and (until is None or entry.at < until):
                found.append(entry)
        return found

    async def since(self, at: Millis) -> Sequence[AuditEntry]:
        """The entries since that time, oldest first. Cheap for recent times. Raises `unavailable`."""
        entries = await self._entries(*self._prefixes(at))
        found = (decode_entry(entries[key].value) for key in sorted(entries))
        return [entry for entry in found if entry.at >= at]

    def _prefixes(self, since: Millis) -> Sequence[str]:
        """The key prefixes that cover entries since that time."""
        first, last = (f"{moment:0{_AT_DIGITS}d}"[:_PERIOD_DIGITS] for moment in (since, max(system.now(), self._last)))
        periods = range(int(first), int(last) + 2)
        return [f"{AUDIT}{period:0{_PERIOD_DIGITS}d}" for period in periods] if len(periods) <= _MOST_PERIODS else [AUDIT]

    async def _entries(self, *prefixes: str) -> Mapping[str, Entry]:
        try:
            return (await self._meta.read(prefixes=prefixes or [AUDIT])).entries
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error

    # ---- retention --------------------------------------------------------------------------------------------

    def _trim_now_and_then(self) -> None:
        if self._until_trim == 0:
            self._until_trim = TRIM_EVERY
            self._spawn(self.trim())
        self._until_trim -= 1

    async def trim(self) -> None:
        """Remove the oldest entries beyond those kept. Failures are retried next time."""
        try:
            surplus = sorted((await self._meta.read(prefixes=[AUDIT])).entries)[: -self.keep]
            for start in range(0, len(surplus), AUDIT_TRIM_BATCH):
                await self._meta.commit(deletes=surplus[start : start + AUDIT_TRIM_BATCH])
        except (MetaUnknownError, StoreUnavailableError) as error:
            log.warning("old audit entries were not removed, will retry: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Let begun work finish."""
        if self._tasks:
            await asyncio.wait(self._tasks)


def detail_of(request: Any) -> dict[str, Any]:
    """What a call asks for, as the detail of its entry."""
    return {name: value for name, value in asdict(request).items() if name != "request_timeout" and value is not None}


def settings_of(record: QueueRecord) -> dict[str, Any]:
    """A queue's settings, as the API writes them, and its number of partitions."""
    shown: dict[str, Any] = msgspec.to_builtins(queue_info(record, lambda record, partition: None))
    return {name: value for name, value in shown.items() if name not in _NO_SETTING}


def changes(before: QueueRecord, after: QueueRecord) -> dict[str, Any]:
    """The settings that a change has changed: old and new value by name, as the API writes them."""
    old, new = settings_of(before), settings_of(after)
    return {name: {"from": old[name], "to": new[name]} for name in new if old[name] != new[name]}


def _is_action(action: str, wanted: str) -> bool:
    return wanted in ("", action) or (wanted.endswith(".") and action.startswith(wanted))


def _is_actor(actor: str, wanted: str) -> bool:
    return wanted in ("", actor, actor.partition("/")[0])


def _bounded(detail: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = _cut(msgspec.to_builtins(detail))
    size = len(msgspec.json.encode(plain))
    if size <= MAX_AUDIT_DETAIL_BYTES:
        return plain
    # Whether a change was made is what an entry is for, however large its result.
    ending = {name: plain[name] for name in _ENDING if isinstance(plain.get(name), str)}
    return ending | {"left_out": f"{size} bytes"}


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_AUDIT_TEXT else value[:MAX_AUDIT_TEXT] + "…"
    if isinstance(value, dict):
        return {_cut(name): _cut(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(each) for each in value]
    return value
