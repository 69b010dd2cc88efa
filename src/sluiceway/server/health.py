"""Whether the server lives, and whether it is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Caller
from sluiceway.server.endpoints import Page, Reply
from sluiceway.server.guard import OpenDoor
from sluiceway.server.http import Request
from sluiceway.server.service import QueueService
from sluiceway.wire import shapes


class Door(Protocol):
    """A guard, as far as it matters here."""

    async def admit(self, request: Request) -> Caller: ...


class ReadyQuery(msgspec.Struct):
    """`verbose`, whatever its value: with every check, to callers that may read all queues or are administrators."""

    verbose: str = ""


class Health:
    """`/livez` and `/readyz`. Whoever asks is told whether; what is wrong has names of queues in it, so not everybody is told what."""

    def __init__(self, service: QueueService, guard: Door, is_stopping: Callable[[], bool]) -> None:
        self._service = service
        self._guard = guard
        self._is_stopping = is_stopping

    def pages(self) -> list[Page]:
        return [
            Page("/livez", None, self._livez, "Whether the process answers", answer=shapes.Alive),
            Page(
                "/readyz",
                None,
                self._readyz,
                "Whether every partition serves, and if not, why",
                answer=shapes.Ready,
                query=ReadyQuery,
                statuses=(200, 503),
                errors=("unauthenticated", "forbidden", "rate_limited"),
            ),
        ]

    async def _livez(self, request: Request) -> Reply:
        return Reply(b'{"alive":true}')

    async def _readyz(self, request: Request) -> Reply:
        problems = self._service.problems()
        checks: list[shapes.CheckInfo] | msgspec.UnsetType = msgspec.UNSET
        if request.flag("verbose"):
            _check_right(await self._guard.admit(request))
            checks = [shapes.CheckInfo(each.name, each.ok, each.detail, each.took) for each in await self._service.checks()]
        elif problems and not await self._is_open(request):
            problems = [f"{len(problems)} problems: ask for /readyz?verbose with a key that has the scope read:* or admin"]
        if self._is_stopping():
            problems = [*problems, "the server is stopping"]
        answer = shapes.Ready(not problems, problems, checks)
        return Reply(msgspec.json.encode(answer), status=503 if problems else 200)

    async def _is_open(self, request: Request) -> bool:
        """Whether it tells this one everything without asking who it is. A guard that wants keys would count a probe as a refusal."""
        if not isinstance(self._guard, OpenDoor):
            return False
        try:
            return sees_all(await self._guard.admit(request))
        except SluicewayError:
            return False


def sees_all(caller: Caller) -> bool:
    """Whether it may be told how the server is, whatever names that has in it."""
    return caller.may_all("read") or caller.may("admin")


def _check_right(caller: Caller) -> None:
    if not sees_all(caller):
        raise SluicewayError("forbidden", "the checks name queues: they need a key with the scope read:* or admin")
