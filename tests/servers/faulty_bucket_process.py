"""The process of `faulty_bucket.FaultyBucket`: the bucket of the benchmarks, with faults, and a record of the cycles that it took.

GET /-/faults/NAME?SHARE strikes that share of the requests that NAME is about, until the next such call, and answers how many were struck
since the last one; /-/faults ends it, and /-/struck answers how many were by now. GET /-/cycles/FIRST answers the openings and cycles of
partitions taken from that index on, as [object, head, key id, fence, txn]: a campaign gives each process a key id of its own.
GET /-/requests/TIME answers the requests that began then or later, as [began, ended, key id, method, object or prefix, status], in the
order of their ends. Times are of the machine's monotonic clock, in seconds.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import deque
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

import msgspec

from bench.bucket_server import Connection, Latency, Objects, head, run
from sluiceway.core.bucket.journal_entry import decode
from sluiceway.core.bucket.partition_head import Head

SLOW = 5.0
"""Seconds."""
_KEY_ID = re.compile("Credential=([^/]+)/")
_ENTRY = re.compile("(.*journals/([^/]+)/log/)([^/]+)")
_HEAD = re.compile(".*partitions/[^/]+/head")
READ, WRITE = ("GET",), ("PUT",)
ANY = (*READ, *WRITE, "POST", "DELETE")


class Fault(NamedTuple):
    """What befalls requests of these methods: an error as S3 reports it, and whether the request takes effect nevertheless. No status: the
    connection breaks before the answer, or in the midst of it."""

    methods: tuple[str, ...]
    status: int | None = None
    code: str = ""
    takes_effect: bool = False


FAULTS = {
    "slow-down": Fault(ANY, 503, "SlowDown"),
    "internal-error": Fault(ANY, 500, "InternalError"),
    "conflict": Fault(WRITE, 409, "ConditionalRequestConflict"),
    "expired-token": Fault(ANY, 400, "ExpiredToken"),
    "access-denied": Fault(ANY, 403, "AccessDenied"),
    "no-bucket": Fault(ANY, 404, "NoSuchBucket"),
    "reset": Fault(ANY),
    "lost-answer": Fault(WRITE, takes_effect=True),
    "late-error": Fault(WRITE, 500, "InternalError", takes_effect=True),
    "truncated": Fault(READ, takes_effect=True),
    "slow-read": Fault(READ, takes_effect=True),
    # No fault of a real store: what a campaign that finds nothing has to find.
    "forgotten": Fault(WRITE, 200),
}


class Faults:
    """The fault of the moment, and how many requests it has struck."""

    def __init__(self) -> None:
        self.name = ""
        self.struck = 0
        self._share = 0.0

    def switch(self, name: str, share: float) -> int:
        """Begin another one; how many requests the last one has struck."""
        assert not name or name in FAULTS, name
        struck, self.struck = self.struck, 0
        self.name, self._share = name, share
        return struck

    def strike(self, method: str) -> str:
        """The name of what befalls this request, if anything does."""
        if not self.name or method not in FAULTS[self.name].methods or random.random() >= self._share:
            return ""
        self.struck += 1
        return self.name


class Cycles:
    """The openings and cycles of partitions that were taken, in order. The fence of a cycle is that under which its partition was attached
    to the journal."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str, str, tuple[int, ...], int]] = []
        self._newest: dict[str, str] = {}
        self._heads: dict[str, str] = {}
        """By the partition's life."""
        self._attached: dict[tuple[str, str], tuple[int, ...]] = {}
        self._opened: dict[str, tuple[int, ...]] = {}
        self._txns: dict[str, int] = {}

    def note(self, name: str, key_id: str, body: bytes, was_there: bool) -> None:
        """Note what the object says."""
        if _HEAD.fullmatch(name):
            self._note_head(name, key_id, msgspec.msgpack.decode(body, type=Head))
        elif found := _ENTRY.fullmatch(name):
            log, journal, number = found.groups()
            # A number that was collected is in no log: it was created by a request that came late.
            if number > self._newest.get(log, "") or was_there:
                self._newest[log] = max(number, self._newest.get(log, ""))
                for life, (cycle, _) in decode(body).parts.items():
                    self._take(name, self._heads[life], key_id, self._attached[life, journal], cycle.txn)

    def _note_head(self, name: str, key_id: str, head: Head) -> None:
        self._heads[head.life] = name
        if head.fence is None:
            return
        if head.attached is not None:
            self._attached[head.life, head.attached.journal] = tuple(head.fence)
        if self._opened.get(name) != tuple(head.fence):
            self._opened[name] = tuple(head.fence)
            self._take(name, name, key_id, tuple(head.fence), self._txns.get(name, 0))

    def _take(self, name: str, head: str, key_id: str, fence: tuple[int, ...], txn: int) -> None:
        self._txns[head] = txn
        self.taken.append((name, head, key_id, fence, txn))


Request = tuple[float, float, str, str, str, int]
REQUESTS_KEPT = 50_000


class FaultyConnection(Connection):
    """A request at a time, as HTTP/1.1 has it."""

    def __init__(self, objects: Objects, latency: Latency, faults: Faults, cycles: Cycles, requests: deque[Request]) -> None:
        super().__init__(objects, latency)
        self._faults, self._cycles, self._requests = faults, cycles, requests
        self._fault = ""
        self._began = 0.0
        self._asked = "", "", ""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began = time.monotonic()

    def _control(self, call: str) -> Any:
        what, _, more = call.partition("/")
        if what == "requests":
            return [each for each in self._requests if each[0] >= float(more)]
        if what == "cycles":
            return self._cycles.taken[int(more) :]
        if what == "faults":
            name, _, share = more.partition("?")
            return self._faults.switch(name, float(share or 0))
        return self._faults.struck if what == "struck" else super()._control(call)

    def _act(self, method: str, url: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        path, _, query = url.partition("?")
        name, key = path.lstrip("/").partition("/")[2], _KEY_ID.search(headers.get("authorization", ""))
        prefix = parse_qs(query).get("prefix")
        self._asked = key[1] if key else "", "LIST" if prefix else method, prefix[0] if prefix else unquote(name)
        self._fault = self._faults.strike(method)
        fault = FAULTS.get(self._fault)
        if fault and not fault.takes_effect:
            return _failed(fault)
        was_there = name in self._objects.data
        status, said, answer = super()._act(method, url, headers, body)
        if method == "PUT" and status == 200 and key:
            self._cycles.note(name, key[1], body, was_there)
        return _failed(fault) if fault and fault.status else (status, said, answer)

    def _say(self, status: int, headers: dict[str, str], body: bytes) -> None:
        fault, self._fault = self._fault, ""
        if self._asked[1]:
            self._requests.append((self._began, time.monotonic(), *self._asked, status))
            self._asked = "", "", ""
        if fault == "slow-read":
            asyncio.get_running_loop().call_later(SLOW, super()._say, status, headers, body)
        elif fault and FAULTS[fault].status is None:
            if fault == "truncated" and not self._transport.is_closing():
                self._transport.write(head(status, headers, len(body)) + body[: len(body) // 2])
            self._transport.close()
        else:
            super()._say(status, headers, body)


def _failed(fault: Fault) -> tuple[int, dict[str, str], bytes]:
    body = f"<Error><Code>{fault.code}</Code></Error>".encode()
    return fault.status or 500, {"content-type": "application/xml", "etag": '"none"'}, body


if __name__ == "__main__":
    faults, cycles = Faults(), Cycles()
    requests: deque[Request] = deque(maxlen=REQUESTS_KEPT)
    run(__doc__, lambda objects, latency: FaultyConnection(objects, latency, faults, cycles, requests))
