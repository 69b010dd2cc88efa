"""The call on what is wrong."""

from __future__ import annotations

from sluiceway.contract.problem_answers import ProblemList
from sluiceway.instance.service import Service
from sluiceway.model.access import Caller
from sluiceway.model.problems import Problem
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_problems


class ProblemCalls:
    """List what is wrong with the queues, backends and instances, as far as the key may see them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/problems.list",
                "read",
                self._list,
                json_problems.ProblemsListCall,
                ProblemList,
                "List the current problems, most severe first: of one queue, or of everything that the key may read",
                ("queue_not_found",),
            )
        ]

    async def _list(self, request: Request) -> Body:
        call = json_problems.decode_list(request.body)
        queue_name = request.permit(call.queue_name) if call.queue_name is not None else ""
        if queue_name:
            await self._service.look_up(queue_name)
            queues = 1
        else:
            queues = sum(request.caller.may("read", record.queue_name) for record in self._service.queues())
        seen = await self._service.watch.everywhere(queue_name)
        shown = [each for each in seen.found if may_see(request.caller, each)]
        return json_problems.listed(shown, queues, seen.watched, seen.silent if _sees_all(request.caller) else ())


def may_see(caller: Caller, problem: Problem) -> bool:
    """Whether the caller may know of the problem: those of a queue need the right to read it, all others that to read all queues."""
    return caller.may("read", problem.queue_name) if problem.queue_name else _sees_all(caller)


def _sees_all(caller: Caller) -> bool:
    return caller.may_all("read") or caller.may("admin")
