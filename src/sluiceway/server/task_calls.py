"""The calls on captures, whose tasks divide a change stream: those registered in this server's own meta store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from sluiceway.adapters.system import now, stopwatch
from sluiceway.contract.capture_answers import TaskGroup, TaskList, TaskSummary, UnseenTasks
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.health_probes import sees_all
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_tasks
from sluiceway.wire.json_config import NoFields, decode_no_fields

if TYPE_CHECKING:
    from sluiceway.capture import Begun, Look

T = TypeVar("T")

PATIENCE: Final[Millis] = 5_000
"""Maximum wait for a log, which may be in a Kafka that does not answer."""
FRESH: Final = 1.0
"""Seconds for which a view is reused, so that many viewers cost as much as one. A view that took longer is reused that long."""
AT_ONCE: Final = 4
"""Maximum number of captures viewed concurrently: of those with logs in the meta store, and as many of the others."""


class TaskCalls:
    """List and show captures. `store` is called each time: the service has a store once it is started.

    Call `break_off` when the server begins to stop, to end all waits, and `stop` before the store is closed.
    """

    def __init__(self, store: Callable[[], MetaStore], patience: Millis = PATIENCE) -> None:
        self._store = store
        self._patience = patience
        self._sights = Sights(store)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/tasks.list",
                "read",
                self._list,
                NoFields,
                TaskList,
                "List the captures with their leaders and progress",
            ),
            Endpoint(
                "/v1/tasks.get",
                "read",
                self._get,
                json_tasks.TasksGetCall,
                TaskGroup,
                "Show a capture: its members, and the readers, positions and dependencies of its partitions",
                ("capture_not_found",),
            ),
        ]

    def break_off(self) -> None:
        self._sights.break_off()

    async def stop(self) -> None:
        await self._sights.stop()

    async def _list(self, request: Request) -> Body:
        _check_right(request)
        decode_no_fields(request.body)
        await _load()
        from sluiceway.capture.presenter import unseen
        from sluiceway.capture.registration import all_begun

        begun = await self._asked(all_begun(self._store()))
        looks = {name: self._sights.of(name, each) for name, each in sorted(begun.items())}
        if looks:
            await asyncio.wait(looks.values(), timeout=self._patience / 1000)
        return json_tasks.task_list(
            unseen(name, begun[name], self._why_not(look)) if (seen := _result(look)) is None else seen.listed
            for name, look in looks.items()
        )

    async def _get(self, request: Request) -> Body:
        _check_right(request)
        name = json_tasks.decode_get(request.body).name
        await _load()
        from sluiceway.capture.registration import find_begun

        begun, _ = await self._asked(find_begun(self._store(), name))
        if begun is None:
            raise SluicewayError("capture_not_found", f"there is no capture {name} in the meta store of this server", "name")
        look = self._sights.of(name, begun)
        await asyncio.wait([look], timeout=self._patience / 1000)
        seen = _result(look)
        if seen is None:
            problem = self._why_not(look)
        elif isinstance(seen.listed, UnseenTasks):
            problem = seen.listed.problem
        else:
            return seen.whole
        raise SluicewayError("unavailable", f"the log of {name} cannot be read: {problem}")

    def _why_not(self, look: asyncio.Task[_Sight]) -> str:
        return "the server is stopping" if look.cancelled() else f"no answer within {format_duration(self._patience)}"

    async def _asked(self, reading: Awaitable[T]) -> T:
        """Await a read of the meta store. Raises `invalid_request`, `unavailable`."""
        try:
            async with asyncio.timeout(self._patience / 1000):
                return await reading
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", str(error)) from error
        except TimeoutError:
            detail = f"the meta store did not answer within {format_duration(self._patience)}"
            raise SluicewayError("unavailable", detail) from None


class _Sight(NamedTuple):
    """View of a capture. `whole`: JSON with each of its partitions; empty if the capture could not be viewed."""

    listed: TaskSummary | UnseenTasks
    whole: bytes = b""


class Sights:
    """Views of captures: one look at a time for each, shared by all callers meanwhile and for a moment after. Read-only.

    A caller that stops waiting cancels no look: the logs have timeouts of their own.
    """

    def __init__(self, store: Callable[[], MetaStore]) -> None:
        self._store = store
        self._looks: dict[str, asyncio.Task[_Sight]] = {}
        # Separate slots, so that looks at an unresponsive Kafka do not delay the others.
        self._slots = {in_meta: asyncio.Semaphore(AT_ONCE) for in_meta in (True, False)}

    def of(self, name: str, begun: Begun) -> asyncio.Task[_Sight]:
        look = self._looks.get(name)
        if look is None:
            look = self._looks[name] = asyncio.create_task(self._look(name, begun))
        return look

    async def _look(self, name: str, begun: Begun) -> _Sight:
        from sluiceway.capture.capture_view import look_in
        from sluiceway.capture.presenter import unseen

        async with self._slots[begun.log == "meta"]:
            began = stopwatch()
            try:
                seen = await look_in(self._store(), name, begun)
                # With thousands of partitions this takes a while, during which other calls must be served.
                return await asyncio.to_thread(_shown, seen, now())
            except SluicewayError as error:
                return _Sight(unseen(name, begun, error.detail))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _Sight(unseen(name, begun, f"the log has records that this version does not know: {error}"))
            finally:
                asyncio.get_running_loop().call_later(max(FRESH, stopwatch() - began), self._looks.pop, name, None)

    def break_off(self) -> None:
        for look in self._looks.values():
            look.cancel()

    async def stop(self) -> None:
        self.break_off()
        if self._looks:
            await asyncio.wait(self._looks.values())


async def _load() -> None:
    """Import the capture reader, off the loop and only on demand: it imports the client, which no other call needs."""
    await asyncio.to_thread(import_module, "sluiceway.capture.presenter")


def _shown(seen: Look, at: Millis) -> _Sight:
    from sluiceway.capture.presenter import group_of

    group = group_of(seen, at)
    return _Sight(json_tasks.summary(group), msgspec.json.encode(group))


def _result(look: asyncio.Task[_Sight]) -> _Sight | None:
    """Return the view; None if the look has not ended, or was cancelled."""
    return look.result() if look.done() and not look.cancelled() else None


def _check_right(request: Request) -> None:
    if not sees_all(request.caller):
        raise SluicewayError("forbidden", "captures do not belong to a queue, so they need a key with the scope read:* or admin")
