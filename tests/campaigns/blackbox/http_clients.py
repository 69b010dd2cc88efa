"""Calls over plain HTTP. Each is noted in the history with its outcome, and none raises an error of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import httpx

from tests.campaigns.blackbox.operation_log import Operation, Outcome, RoundLog

MARGIN = 10.0
"""Seconds past its `request_timeout` after which a call has not ended as it was promised."""

NOT_REACHED = "not reached"


class Answer(NamedTuple):
    outcome: Outcome
    body: Any = None
    problem: str = ""


class Door(Protocol):
    """Where clients reach a member of the target, whether or not it runs."""

    name: str

    @property
    def url(self) -> str: ...


async def ask(
    http: httpx.AsyncClient, url: str, call: str, fields: Mapping[str, Any], patience: float, expected: Collection[str] = ()
) -> Answer:
    """One call. `patience`: seconds; `expected`: codes of errors that are an answer here and did nothing."""
    try:
        answer = await http.post(f"{url}/v1/{call}", json=fields, timeout=patience)
        body = answer.json()
    except httpx.ConnectError:
        return Answer("refused", problem=NOT_REACHED)
    except httpx.TimeoutException:
        return Answer("unknown", problem="no answer")
    except httpx.TransportError:
        return Answer("unknown", problem="broken")
    except ValueError:
        return Answer("unknown", problem=f"unexpected: {answer.status_code} {answer.text[:200]}")
    if answer.status_code == 200:
        return Answer("done", body)
    code = str(body.get("code"))
    if body.get("retryable"):
        return Answer("unknown" if code == "outcome_unknown" else "refused", problem=code)
    if code in expected:
        return Answer("refused", problem=code)
    return Answer("unknown", problem=f"unexpected: {answer.status_code} {code}: {body.get('detail')}")


class Caller:
    """One client. It calls one member, and the next one after a call that was not done."""

    def __init__(self, name: str, http: httpx.AsyncClient, doors: Sequence[Door], log: RoundLog, home: int = 0) -> None:
        self.name = name
        self._log = log
        self._http = http
        self._doors = doors
        self._home = home

    async def call(
        self,
        kind: str,
        path: str,
        queue: str,
        fields: Mapping[str, Any],
        *,
        given: dict[str, Any],
        timeout: float,
        read: Callable[[Any], dict[str, Any]] = lambda _: {},
        expected: Collection[str] = (),
        in_parts: bool = False,
    ) -> Operation:
        """Send `fields` to the call at `path`, and put the operation into the history as of that kind, with what was `given`.

        `read` makes of the answer what the history keeps of it. `timeout`: the call's `request_timeout`, in seconds. `in_parts`: a call
        that the server has refused may have been done in part, so its outcome is unknown. A call that is cancelled is in the history
        without an end.
        """
        door = self._doors[self._home % len(self._doors)]
        began, ended, answer = time.time(), None, Answer("unknown", problem="cancelled")
        got: dict[str, Any] = {}
        try:
            asked = {"queue_name": queue, "request_timeout": f"{round(timeout * 1000)}ms", **fields}
            asked = {name: value for name, value in asked.items() if value is not None}
            answer = await ask(self._http, door.url, path, asked, timeout + MARGIN, expected)
            ended = time.time()
            if in_parts and answer.outcome == "refused" and answer.problem != NOT_REACHED:
                answer = answer._replace(outcome="unknown")
            if answer.outcome == "done":
                got = read(answer.body)
        finally:
            operation = Operation(self.name, kind, queue, began, ended, answer.outcome, given, got, answer.problem, door.name)
            self._log.operation(operation)
        if answer.outcome != "done" and answer.problem not in expected:
            self._home += 1
        return operation
