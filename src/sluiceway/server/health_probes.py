"""Liveness and readiness probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol

import msgspec

from sluiceway import __version__
from sluiceway.contract.problem_answers import ProblemInfo
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Caller
from sluiceway.server.endpoints import Page, Reply
from sluiceway.server.guard import OpenDoor
from sluiceway.server.http import Request
from sluiceway.wire import json_problems, shapes

HEALTH_JSON: Final = b"application/health+json"


class Door(Protocol):
    """The part of a guard that probes need."""

    async def admit(self, request: Request) -> Caller: ...


class ReadyQuery(msgspec.Struct):
    """`verbose`, with any value: include every check, for callers that may read all queues and for administrators."""

    verbose: str = ""


class Health:
    """`/livez`, `/readyz` and Querator's `/health`. Any caller learns whether the server is ready; the causes need a key."""

    def __init__(self, service: Service, guard: Door, is_stopping: Callable[[], bool]) -> None:
        self._service = service
        self._guard = guard
        self._is_stopping = is_stopping

    def pages(self) -> list[Page]:
        return [
            Page("/livez", None, self._livez, "Liveness: whether the process is running", answer=shapes.Alive),
            Page("/healthz", None, self._livez, "The same as /livez, under the name that many probes have", answer=shapes.Alive),
            Page(
                "/readyz",
                None,
                self._readyz,
                "Readiness: whether every partition is served, and if not, why",
                answer=shapes.Ready,
                query=ReadyQuery,
                statuses=(200, 503),
                errors=("unauthenticated", "forbidden", "rate_limited"),
            ),
            Page(
                "/health",
                None,
                self._health,
                "Readiness in the format of Querator's /health",
                content_types=(HEALTH_JSON.decode(),),
                answer=shapes.Health,
                statuses=(200, 503),
            ),
        ]

    async def _livez(self, request: Request) -> Reply:
        return Reply(b'{"alive":true}')

    async def _readyz(self, request: Request) -> Reply:
        checks: list[shapes.CheckInfo] | msgspec.UnsetType = msgspec.UNSET
        attention: list[ProblemInfo] | msgspec.UnsetType = msgspec.UNSET
        verbose = request.flag("verbose")
        if verbose:
            _check_right(await self._guard.admit(request))
            checks = [shapes.CheckInfo(each.name, each.ok, each.detail, each.took) for each in await self._service.checks()]
            attention = json_problems.infos(self._service.watch.here().found)
        problems = await self._problems(request, verbose)
        answer = shapes.Ready(not problems, problems, checks, attention)
        return Reply(msgspec.json.encode(answer), status=503 if problems else 200)

    async def _health(self, request: Request) -> Reply:
        problems = await self._problems(request, False)
        status: Literal["pass", "fail"] = "fail" if problems else "pass"
        check = shapes.HealthCheck("datastore", status, "; ".join(problems))
        answer = shapes.Health(status, __version__, {"queues:storage": [check]})
        return Reply(msgspec.json.encode(answer), HEALTH_JSON, 503 if problems else 200)

    async def _problems(self, request: Request, may_see: bool) -> list[str]:
        """List the problems; their number in place of the causes for a caller without the right to see them."""
        problems = self._service.problems()
        if problems and not may_see and not await self._is_open(request):
            problems = [f"{len(problems)} problems: request /readyz?verbose with a key that has the scope read:* or admin"]
        return [*problems, "the server is stopping"] if self._is_stopping() else problems

    async def _is_open(self, request: Request) -> bool:
        """Whether the caller may see the causes without a key. A guard that requires keys would count a probe as a refusal."""
        if not isinstance(self._guard, OpenDoor):
            return False
        try:
            return sees_all(await self._guard.admit(request))
        except SluicewayError:
            return False


def sees_all(caller: Caller) -> bool:
    """Whether the caller may see the server's state, including all queue names."""
    return caller.may_all("read") or caller.may("admin")


def _check_right(caller: Caller) -> None:
    if not sees_all(caller):
        raise SluicewayError("forbidden", "the checks name queues, so they need a key with the scope read:* or admin")
