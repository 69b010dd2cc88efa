"""Requests that are generated from the OpenAPI document a server serves, and a check that its answers are those of the document.

`make fuzz` sends 30,000 of them to a server process of its own.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks as known

from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import parse_item_id, parse_lease_id
from sluiceway.kernel.names import check_queue_name
from tests.server.server_process import PATIENCE, ServerProcess

ARROW = "application/vnd.apache.arrow.stream"
QUEUES = ["fuzz-0", "fuzz-1", "fuzz-dead"]
LONGEST_WAIT = 50
"""Milliseconds that a generated call may wait."""
KEPT = 200
"""Ids of each sort that are remembered, to be used again."""
_PARSERS: dict[str, Callable[[object, str], object]] = {"id": parse_item_id, "lease_id": parse_lease_id}
CHECKS: list[CheckFunction] = [
    known.status_code_conformance,
    known.content_type_conformance,
    known.response_headers_conformance,
    known.response_schema_conformance,
    known.negative_data_rejection,
]


def stream(**columns: pa.Array) -> bytes:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    """Sound Arrow bodies of the calls that take one, and such with a byte changed or their end cut off."""
    rows = draw(st.integers(1, 5))
    produce = stream(payload=pa.array([b"x"] * rows), kind=pa.array(["k"] * rows))
    settled = {"partition": pa.array(range(rows), pa.int32()), "offset": pa.array(range(rows), pa.int64())}
    whole = draw(st.sampled_from([produce, stream(**settled, outcome=pa.array(["retry"] * rows))]))
    if draw(st.booleans()):
        return whole
    at, byte = draw(st.integers(0, len(whole) - 1)), draw(st.integers(0, 255))
    return draw(st.sampled_from([whole[:at], whole[:at] + bytes([byte]) + whole[at + 1 :]]))


schemathesis.openapi.media_type(ARROW, _streams())


class Campaign:
    """Generated requests to one server, which is open to everybody. What is wrong with an answer is raised by `run`.

    `document` is the one that the server serves, unless another is given. `answers` counts them by path and status. The same `first_seed`
    sends the same requests, as far as the server gives the same ids.
    """

    def __init__(self, url: str, first_seed: int = 0, document: dict[str, Any] | None = None) -> None:
        self.url = url
        self.answers: Counter[tuple[str, int]] = Counter()
        self._seed = first_seed
        self._ids: dict[str, list[str]] = {"id": [], "lease_id": []}
        self._session = requests.Session()
        self._session.trust_env = False
        document = document or self._session.get(f"{url}/openapi.json", timeout=PATIENCE).json()
        assert document is not None
        # A stream of events has no end that could be waited for.
        document["paths"] = {path: each for path, each in document["paths"].items() if "text/event-stream" not in str(each)}
        # Nor does an open server mind a request without a key.
        del document["security"]
        self.document: dict[str, Any] = document
        self.schema = schemathesis.openapi.from_dict(document)
        self._restore()

    def run(self, each: int, progress: Callable[[str], None] = lambda _: None) -> None:
        """So many requests to each operation: three in four as the document wants them, the others not."""
        for result in self.schema.get_all_operations():
            assert isinstance(result, Ok), result
            operation = result.ok()
            for mode, count in ((GenerationMode.POSITIVE, each - each // 4), (GenerationMode.NEGATIVE, each // 4)):
                self._run(operation, mode, count)
            progress(operation.label)

    def _run(self, operation: Any, mode: GenerationMode, count: int) -> None:
        self._seed += 1
        sent, chance = 0, Random(self._seed)

        @seed(self._seed)
        @settings(max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Case[Any]) -> None:
            nonlocal sent
            sent += 1
            self._send(case, mode, chance)

        try:
            send()
        except Exception as error:
            # A page without a query string cannot be asked for wrongly.
            if sent or type(error).__name__ != "Unsatisfiable":
                raise

    def _send(self, case: Case[Any], mode: GenerationMode, chance: Random) -> None:
        as_wanted = mode is GenerationMode.POSITIVE
        if as_wanted:
            case.body, case.query = _in_range(case.body), _in_range(case.query)
            if case.media_type == ARROW:
                case.query |= {"queue_name": chance.choice(QUEUES)} | ({"incarnation": "k7f3q2ma"} if "settle" in case.path else {})
            elif case.method == "POST" and chance.random() < 0.9:
                case.query = {}
        for fields in (case.body, case.query):
            if isinstance(fields, dict) and not case.path.endswith("queues.create"):
                self._make_plausible(fields, as_wanted, chance)
        answer = case.call(base_url=self.url, session=self._session, timeout=PATIENCE)
        self.answers[case.path, answer.status_code] += 1
        assert answer.status_code != 500, f"{case.as_curl_command()}\n{answer.text}"
        # Of bytes the generator cannot tell the wrong ones from the right ones.
        case.validate_response(answer, checks=CHECKS, excluded_checks=[known.negative_data_rejection] if case.media_type == ARROW else [])
        if answer.status_code == 200 and case.path.startswith("/v1/"):
            self._learn(case, answer)

    def _make_plausible(self, fields: dict[str, Any], as_wanted: bool, chance: Random) -> None:
        """Put what exists in the place of what is made up, where that was well formed; so a wrong request stays as wrong as it was."""
        for name, value in fields.items():
            if name in ("queue_name", "target", "source", "dead_queue") and _is(check_queue_name, value) and chance.random() < 0.9:
                fields[name] = chance.choice(QUEUES)
            elif name == "request_timeout" and _is(parse_duration, value):
                # The document allows a quarter of an hour.
                fields[name] = f"{chance.randrange(LONGEST_WAIT)}ms"
            elif name in _PARSERS:
                fields[name] = self._known(name, value, chance)
            elif name in ("ids", "lease_ids") and not value and as_wanted and self._ids[name[:-1]]:
                fields[name] = [chance.choice(self._ids[name[:-1]])]
            elif name in ("ids", "lease_ids") and isinstance(value, list):
                fields[name] = [self._known(name[:-1], each, chance) for each in value]
            elif isinstance(value, list):
                for each in value:
                    if isinstance(each, dict):
                        self._make_plausible(each, as_wanted, chance)
        if as_wanted and {"ids", "lease_ids", "id", "lease_id"} & fields.keys():
            fields.pop("partition", None)

    def _known(self, sort: str, value: Any, chance: Random) -> Any:
        known_ids = self._ids[sort]
        return chance.choice(known_ids) if known_ids and _is(_PARSERS[sort], value) and chance.random() < 0.8 else value

    def _learn(self, case: Case[Any], answer: Any) -> None:
        if case.path.endswith(("queues.create", "queues.delete", "queues.update", "queue.pause")):
            self._restore()
        elif case.path.endswith((".rebalance", "rebalances.cancel", "partition.pause")):
            # Their partitions are others now, or take nothing.
            for name in QUEUES:
                self._ask("queues.delete", queue_name=name, force=True)
            self._restore()
        elif answer.headers["content-type"] == "application/json":
            body = answer.json()
            for item in [*body.get("items", ()), *body.get("leases", ())]:
                for sort, ids in self._ids.items():
                    if isinstance(item, dict) and isinstance(item.get(sort), str):
                        ids.append(item[sort])
                        del ids[:-KEPT]

    def _restore(self) -> None:
        """The queues as they should be: a campaign whose queue is paused or gone would prove little."""
        there = {info["queue_name"] for info in self._ask("queues.list", limit=1_000)["items"]}
        for name in there - set(QUEUES):
            self._ask("queues.delete", queue_name=name, force=True)
        for name in QUEUES:
            if name not in there:
                self._ask("queues.create", queue_name=name, requested_partitions=2)
            self._ask("queue.resume", queue_name=name)
            self._ask("queues.update", queue_name=name, write_timeout=None)

    def _ask(self, call: str, **fields: object) -> Any:
        answer = self._session.post(f"{self.url}/v1/{call}", json=dict[str, Any](fields), timeout=PATIENCE)
        return answer.json()


def _in_range(value: Any, name: str = "") -> Any:
    """What the document cannot say to the generator: whole numbers are without a point, payloads are base64, and limits of times."""
    if isinstance(value, dict):
        return {key: _in_range(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_in_range(each, name) for each in value]
    if name in ("bytes", "payload") and isinstance(value, str):
        return base64.b64encode(value.encode()).decode()
    if name.endswith(("_timeout", "_after", "_window")) or name in ("first", "most"):
        return "10m" if isinstance(value, str) else value
    if name in ("enqueue_at", "retry_at", "since", "until"):
        return "2020-01-01T00:00:00Z" if isinstance(value, str) else value
    if name in ("partition", "requested_partitions") and isinstance(value, int | float):
        return 1
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is(parse: Callable[[object, str], object], value: object) -> bool:
    try:
        parse(value, "")
    except SluicewayError:
        return False
    return True


@contextlib.contextmanager
def server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sluiceway-fuzz-") as name, ServerProcess(Path(name) / "data") as served:
        yield served.url
        assert served.process.poll() is None, "the server is gone"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("requests", type=int)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    asked = parser.parse_args()
    began = time.monotonic()
    with server() as url:
        campaign = Campaign(url, asked.seed)
        operations = len(campaign.document["paths"])
        print(f"seed {asked.seed}, {operations} operations", flush=True)
        # More than once, because a page that takes nothing cannot be asked wrongly, and so is asked less often.
        while (left := asked.requests - campaign.answers.total()) > 0:
            campaign.run(max(4, -(-left // operations)), lambda label: print(f"{campaign.answers.total()} {label}", flush=True))
    by_status = Counter[int]()
    for (_, status), count in campaign.answers.items():
        by_status[status] += count
    shown = ", ".join(f"{count} × {status}" for status, count in sorted(by_status.items()))
    print(f"ok: {by_status.total()} requests in {time.monotonic() - began:.0f} s: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
