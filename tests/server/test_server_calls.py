"""Every call of the API over real HTTP, against the real service."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.adapters.system import now
from sluiceway.kernel.clock import format_time, parse_time
from tests.server.server_process import PATIENCE
from tests.server.server_running import ARROW, Running, balances, eventually, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as served:
        yield served


def texts(answer: Any) -> list[str]:
    return [base64.b64decode(item["bytes"]).decode() for item in answer["items"]]


def ids(answer: Any) -> list[str]:
    return [item["id"] for item in answer["items"]]


def arrow_body(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def post_arrow(server: Running, call: str, table: pa.Table, **query: str) -> Any:
    answer = server.http.post(f"/v1/{call}", params=query, content=arrow_body(table), headers={"content-type": ARROW})
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_arrow(server: Running, call: str, **fields: object) -> tuple[dict[str, Any], pa.Table]:
    answer = server.http.post(f"/v1/{call}", json=fields, headers={"accept": ARROW})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARROW
    reader = pa.ipc.open_stream(pa.py_buffer(answer.content))
    return json.loads(reader.schema.metadata[b"sluiceway"]), reader.read_all()


# -- queues -------------------------------------------------------------------------------------------------------------------


def test_queue_life(server: Running) -> None:
    made = server.ask("queues.create", queue_name="life", requested_partitions=3, lease_timeout="90s", max_attempts=5, reference="r")
    assert made == server.ask("queues.info", queue_name="life")
    assert (made["lease_timeout"], made["max_attempts"], made["dead_queue"], made["reference"]) == ("1m30s", 5, None, "r")
    assert made["requested_partitions"] == 3
    assert made["partitions"][2] == {
        "partition": 2,
        "backend": "default",
        "state": "available",
        "parents": [],
        "owner": "instance",
        "address": None,
    }
    assert made["rebalance"] is None
    assert parse_time(made["created_at"], "created_at") > 0
    assert server.post("queues.create", queue_name="life").json()["code"] == "queue_exists"
    server.produce("life", "x")
    assert server.post("queues.delete", queue_name="life").json()["code"] == "queue_not_empty"
    assert server.ask("queues.delete", queue_name="life", force=True) == {}
    assert server.post("queues.info", queue_name="life").json()["code"] == "queue_not_found"


def test_queues_are_listed_in_pages(server: Running) -> None:
    for name in ("page-b", "page-a", "page-c"):
        server.ask("queues.create", queue_name=name)
    first = server.ask("queues.list", pivot="page-", limit=2)
    assert [queue["queue_name"] for queue in first["items"]] == ["page-a", "page-b"]
    second = server.ask("queues.list", pivot=first["next"], limit=2)
    assert second["items"][0]["queue_name"] == "page-c"
    everything = server.ask("queues.list", limit=1_000)
    assert everything["next"] is None
    assert [queue["queue_name"] for queue in everything["items"]] == sorted(queue["queue_name"] for queue in everything["items"])


def test_dead_queue_must_exist(server: Running) -> None:
    answer = server.post("queues.create", queue_name="orphan", dead_queue="nowhere")
    assert (answer.status_code, answer.json()["field"]) == (400, "dead_queue")


# -- produce, lease, complete -------------------------------------------------------------------------------------------------


def test_json_items_come_back_as_they_were(server: Running) -> None:
    name = server.queue()
    item = {"bytes": "AP8=", "kind": "k", "encoding": "e", "reference": "r", "headers": {"h": "1"}}
    made = server.ask("queue.produce", queue_name=name, items=[item, {"utf8": "é"}])
    assert (made["count"], made["deduplicated"]) == (2, False)
    got = server.lease(name)
    first, second = got["items"]
    assert {key: first[key] for key in item} == item
    assert base64.b64decode(second["bytes"]).decode() == "é"
    assert first["id"] == first["origin"] == made["first_id"]
    assert (first["attempts"], first["partition"], second["kind"]) == (1, made["partition"], None)
    assert got["leases"] == [
        {"lease_id": first["lease_id"], "partition": made["partition"], "count": 2, "lease_deadline": first["lease_deadline"]}
    ]
    assert server.lease(name) == {"queue_name": name, "partition": None, "leases": [], "items": [], "completed": None}


def test_arrow_in_and_out(server: Running) -> None:
    name = server.queue()
    rows = [f"row {n}".encode() for n in range(5_000)]
    table = pa.table({"payload": pa.array(rows), "reference": pa.array([str(n) for n in range(5_000)])})
    made = post_arrow(server, "queue.produce", table, queue_name=name)
    assert made["count"] == 5_000
    about, got = read_arrow(server, "queue.lease", queue_name=name, client_id="c", batch_size=10_000)
    assert got.column("payload").to_pylist() == rows
    assert got.column("reference").to_pylist() == [str(n) for n in range(5_000)]
    assert f"{about['incarnation']}.{about['partition']}.{got.column('offset')[0]}" == made["first_id"]
    assert about["leases"][0]["count"] == 5_000
    assert server.ask("queue.complete", queue_name=name, lease_ids=[about["leases"][0]["lease_id"]])["completed"] == 5_000
    assert balances(server.totals(name))


def test_complete_is_repeatable(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b", "c")
    server.produce(name, "d")
    got = server.lease(name, batch_size=3)
    two = ids(got)[:2]
    unknown = f"{two[0].rpartition('.')[0]}.999999"
    assert server.ask("queue.complete", queue_name=name, ids=two, partition=0) == {"completed": 2, "ignored": []}
    again = server.ask("queue.complete", queue_name=name, ids=[*two, unknown, "elsewhere.0.1"])
    assert again["completed"] == 0
    assert {entry["id"]: entry["reason"] for entry in again["ignored"]} == {
        two[0]: "completed",
        two[1]: "completed",
        unknown: "unknown",
        "elsewhere.0.1": "unknown",
    }
    lease_id = got["leases"][0]["lease_id"]
    assert server.ask("queue.complete", queue_name=name, lease_ids=[lease_id])["completed"] == 1
    closed = server.ask("queue.complete", queue_name=name, lease_ids=[lease_id])
    assert (closed["completed"], [entry["id"] for entry in closed["ignored"]]) == (0, [lease_id])
    not_leased = f"{two[0].rpartition('.')[0]}.3"
    assert server.ask("queue.complete", queue_name=name, ids=[not_leased])["ignored"] == [{"id": not_leased, "reason": "not_leased"}]
    assert (server.totals(name)["completed"], server.totals(name)["total"]) == (3, 1)


def test_complete_over_partitions(server: Running) -> None:
    name = server.queue(requested_partitions=4)
    for n in range(8):
        server.produce(name, f"item {n}")
    got = server.lease(name, max_partitions=4)
    assert len({lease["partition"] for lease in got["leases"]}) == 4
    assert server.ask("queue.complete", queue_name=name, ids=ids(got))["completed"] == 8


def test_leases_alone(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b")
    got = server.lease(name, payload=False)
    assert (got["leases"][0]["count"], got["items"]) == (2, [])


@pytest.mark.parametrize("arrow", [False, True])
def test_a_lease_completes_what_was_handled(server: Running, arrow: bool) -> None:
    name = server.queue()
    server.produce(name, "a", "b", "c")
    first = server.lease(name, batch_size=2)
    assert first["completed"] is None
    done = {"ids": ids(first)[:1], "handler_times": [{"handler_time": "40ms"}]}
    if arrow:
        about, got = read_arrow(server, "queue.lease", queue_name=name, client_id="c", batch_size=2, complete=done)
        assert (about["completed"], got.column("payload").to_pylist()) == ({"completed": 1, "ignored": []}, [b"c"])
        lease_ids = [first["leases"][0]["lease_id"], about["leases"][0]["lease_id"]]
    else:
        got = server.lease(name, batch_size=2, complete=done)
        assert (got["completed"], texts(got)) == ({"completed": 1, "ignored": []}, ["c"])
        lease_ids = [first["leases"][0]["lease_id"], got["leases"][0]["lease_id"]]
    last = server.lease(name, complete={"lease_ids": lease_ids})
    assert (last["completed"], last["leases"]) == ({"completed": 2, "ignored": []}, [])
    again = server.lease(name, complete={"lease_ids": lease_ids})
    assert (again["completed"]["completed"], {each["reason"] for each in again["completed"]["ignored"]}) == (0, {"completed"})
    assert balances(server.totals(name))
    assert server.totals(name)["completed"] == 3


def test_a_lease_that_waits_confirms_its_completion_when_it_ends(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a")
    first = server.lease(name)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.lease, name, request_timeout="15m", complete={"ids": ids(first)})
        eventually(lambda: server.totals(name)["completed"] == 1)
        assert not waiting.done()
        server.produce(name, "wake")
        answer = waiting.result(PATIENCE)
    assert (answer["completed"]["completed"], texts(answer)) == (1, ["wake"])


def test_lease_key_answers_again_with_the_same_lease(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b", "c")
    first = server.lease(name, batch_size=2, lease_key="k")
    again = server.lease(name, batch_size=2, lease_key="k")
    assert again["leases"][0]["lease_id"] == first["leases"][0]["lease_id"]
    assert texts(again) == texts(first) == ["a", "b"]
    assert texts(server.lease(name, batch_size=2, lease_key="other")) == ["c"]


@pytest.mark.parametrize("arrow", [False, True])
def test_long_poll_is_woken_by_a_produce(server: Running, arrow: bool) -> None:
    name = server.queue()
    with ThreadPoolExecutor(1) as pool:
        headers = {"accept": ARROW} if arrow else {}
        body = {"queue_name": name, "client_id": "c", "batch_size": 10, "request_timeout": "15m"}
        waiting = pool.submit(server.http.post, "/v1/queue.lease", json=body, headers=headers)
        eventually(lambda: server.waiting(name) == 1)
        server.produce(name, "wake")
        answer = waiting.result(PATIENCE)
    if arrow:
        assert pa.ipc.open_stream(pa.py_buffer(answer.content)).read_all().column("payload").to_pylist() == [b"wake"]
    else:
        assert texts(answer.json()) == ["wake"]


def test_a_client_that_goes_away_takes_nothing(server: Running) -> None:
    name = server.queue()
    connection = server.raw_post("queue.lease", queue_name=name, client_id="c", request_timeout="15m")
    eventually(lambda: server.waiting(name) == 1)
    connection.close()
    eventually(lambda: server.waiting(name) == 0)
    server.produce(name, "x")
    assert texts(server.lease(name)) == ["x"]


# -- retry, dead, extend, settle ----------------------------------------------------------------------------------------------


def test_retry_now_and_later(server: Running) -> None:
    name = server.queue()
    server.produce(name, "now", "later")
    got = server.lease(name)
    first, second = ids(got)
    assert server.ask("queue.retry", queue_name=name, items=[{"id": first}, {"id": second, "retry_after": "1h"}]) == {
        "retried": 2,
        "dead": 0,
        "ignored": [],
    }
    again = server.lease(name)
    assert texts(again) == ["now"]
    assert again["items"][0]["attempts"] == 2
    assert again["items"][0]["id"] != first
    assert again["items"][0]["origin"] == got["items"][0]["origin"]
    assert server.totals(name)["scheduled"] == 1
    stale = server.ask("queue.complete", queue_name=name, ids=[first])
    assert stale == {"completed": 0, "ignored": [{"id": first, "reason": "retried"}]}
    assert server.totals(name)["retried"] == 2


def test_a_retry_is_served_when_it_is_due_and_not_before(server: Running) -> None:
    name = server.queue()
    server.produce(name, "x")
    (item,) = ids(server.lease(name))
    asked_at = now()
    server.ask("queue.retry", queue_name=name, items=[{"id": item, "retry_after": "500ms"}])
    assert texts(server.lease(name, request_timeout="1m")) == ["x"]
    assert now() >= asked_at + 500


def test_dead_items_reach_the_dead_queue(server: Running) -> None:
    dead = server.queue()
    name = server.queue(dead_queue=dead, requested_partitions=2)
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "bad", "headers": {"mine": "1"}}, {"utf8": "good"}])
    bad, good = ids(server.lease(name))
    answer = server.ask("queue.retry", queue_name=name, items=[{"id": bad, "dead": True, "reason": "cannot be read"}])
    assert (answer["dead"], answer["retried"]) == (1, 0)
    got = server.lease(dead, request_timeout="1m")
    assert texts(got) == ["bad"]
    headers = got["items"][0]["headers"]
    assert headers["mine"] == "1"
    assert "cannot be read" in headers.values()
    assert server.ask("queue.complete", queue_name=name, ids=[good])["completed"] == 1
    eventually(lambda: server.totals(name)["transferring"] == 0)
    sums = server.totals(name)
    assert balances(sums)
    assert (sums["produced"], sums["completed"], sums["dead"], sums["total"]) == (2, 1, 1, 0)
    assert balances(server.totals(dead))


def test_attempts_run_out(server: Running) -> None:
    name = server.queue(max_attempts=2)
    server.produce(name, "x")
    for expected in ({"retried": 1, "dead": 0}, {"retried": 0, "dead": 1}):
        answer = server.ask("queue.retry", queue_name=name, items=[{"id": ids(server.lease(name))[0]}])
        assert {key: answer[key] for key in expected} == expected
    assert server.lease(name)["items"] == []


def test_an_expired_lease_is_served_again(server: Running) -> None:
    name = server.queue(lease_timeout="100ms")
    server.produce(name, "x")
    first = server.lease(name)
    # With 100 ms, this one too might run out before its answer was made.
    second = server.lease(name, request_timeout="1m", lease_timeout="1m")
    assert texts(second) == ["x"]
    assert second["items"][0]["attempts"] == 2
    assert server.ask("queue.complete", queue_name=name, ids=ids(first))["completed"] == 0


def test_extend_moves_the_deadline(server: Running) -> None:
    name = server.queue()
    server.produce(name, "x")
    lease = server.lease(name)["leases"][0]
    foreign = "elsewhere.0.L1"
    asked_at = now()
    answer = server.ask("queue.extend", queue_name=name, lease_ids=[lease["lease_id"], foreign], lease_timeout="1h")
    moved = answer["leases"][0]
    assert moved["lease_id"] == lease["lease_id"]
    assert asked_at <= parse_time(moved["lease_deadline"], "") - 3_600_000 <= now()
    assert answer["ignored"] == [{"id": foreign, "reason": "unknown"}]


@pytest.mark.parametrize("arrow", [False, True])
def test_staged_outcomes_take_effect_when_the_lease_is_closed(server: Running, arrow: bool) -> None:
    name = server.queue()
    server.produce(name, "done", "again", "drop", "rest")
    got = server.lease(name)
    lease_id = got["leases"][0]["lease_id"]
    done, again, drop, _ = ids(got)
    if arrow:
        table = pa.table(
            {
                "partition": pa.array([0, 0, 0], pa.int32()),
                "offset": pa.array([int(text.rpartition(".")[2]) for text in (done, again, drop)], pa.int64()),
                "outcome": pa.array(["done", "retry", "dead"]),
                "reason": pa.array([None, None, "no good"], pa.utf8()),
            }
        )
        staged = post_arrow(server, "queue.settle", table, queue_name=name, incarnation=done.partition(".")[0])
    else:
        outcomes: list[dict[str, str]] = [{"id": done, "outcome": "done"}, {"id": again, "outcome": "retry"}]
        staged = server.ask("queue.settle", queue_name=name, items=[*outcomes, {"id": drop, "outcome": "dead", "reason": "no good"}])
    assert staged == {"staged": 3, "ignored": []}
    assert texts(server.ask("queue.peek", queue_name=name, lease_id=lease_id)) == ["done", "again", "drop", "rest"]
    assert server.ask("queue.complete", queue_name=name, lease_ids=[lease_id])["ignored"] == []
    assert texts(server.lease(name)) == ["again"]
    sums = server.totals(name)
    assert (sums["completed"], sums["retried"], sums["dead"]) == (2, 1, 1)
    assert balances(sums)


def test_scheduled_items_wait(server: Running) -> None:
    name = server.queue()
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "later", "enqueue_at": format_time(now() + 3_600_000)}, {"utf8": "now"}])
    assert server.totals(name)["scheduled"] == 1
    assert texts(server.lease(name)) == ["now"]
    due = now() + 500
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "soon", "enqueue_at": format_time(due)}])
    assert texts(server.lease(name, request_timeout="1m")) == ["soon"]
    assert now() >= due


# -- peek and stats -----------------------------------------------------------------------------------------------------------


def test_peek(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b", "c", "d")
    lease_id = server.lease(name, batch_size=3)["leases"][0]["lease_id"]
    assert texts(server.ask("queue.peek", queue_name=name)) == ["d"]
    assert texts(server.ask("queue.peek", queue_name=name, partition=0)) == ["d"]
    assert texts(server.ask("queue.peek", queue_name=name, lease_id=lease_id, start=1, limit=1)) == ["b"]
    about, got = read_arrow(server, "queue.peek", queue_name=name, lease_id=lease_id)
    assert got.column("payload").to_pylist() == [b"a", b"b", b"c"]
    assert about["queue_name"] == name
    server.ask("queue.complete", queue_name=name, lease_ids=[lease_id])
    gone = server.post("queue.peek", queue_name=name, lease_id=lease_id)
    assert (gone.status_code, gone.json()["code"]) == (404, "lease_not_found")


def test_ledger_after_mixed_work(server: Running) -> None:
    name = server.queue(requested_partitions=3)
    for n in range(30):
        server.produce(name, *[f"{n}/{i}" for i in range(10)])
    got = server.lease(name, batch_size=150, max_partitions=3)
    assert server.ask("queue.complete", queue_name=name, ids=ids(got)[:100])["completed"] == 100
    server.ask("queue.retry", queue_name=name, items=[{"id": text} for text in ids(got)[100:120]])
    server.ask("queue.retry", queue_name=name, items=[{"id": text, "dead": True} for text in ids(got)[120:130]])
    sums = server.totals(name)
    assert balances(sums)
    assert (sums["produced"], sums["completed"], sums["dead"], sums["retried"], sums["total"]) == (300, 100, 10, 20, 190)
    assert sums["total"] == sums["ready"] + sums["total_leased"] + sums["scheduled"]
    assert sums["total_leased"] == 20


# -- idempotency --------------------------------------------------------------------------------------------------------------


def test_a_repeated_key_adds_nothing(server: Running) -> None:
    name = server.queue(requested_partitions=4)
    first = server.produce(name, "a", "b", idempotency_key="k")
    again = server.produce(name, "a", "b", idempotency_key="k")
    assert again == {**first, "deduplicated": True}
    table = pa.table({"payload": pa.array([b"a", b"b"])})
    assert post_arrow(server, "queue.produce", table, queue_name=name, idempotency_key="k") == again
    other = server.post("queue.produce", queue_name=name, items=[{"utf8": "c"}], idempotency_key="k")
    assert (other.status_code, other.json()["code"]) == (409, "key_conflict")
    assert server.totals(name)["produced"] == 2


def test_a_group_moves_on(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", idempotency_key="k1", idempotency_group="g", idempotency_sequence=1)
    server.produce(name, "b", idempotency_key="k2", idempotency_group="g", idempotency_sequence=2)
    assert server.produce(name, "b", idempotency_key="k2", idempotency_group="g", idempotency_sequence=2)["deduplicated"]
    stale = server.post(
        "queue.produce", queue_name=name, items=[{"utf8": "a"}], idempotency_key="k1", idempotency_group="g", idempotency_sequence=1
    )
    assert (stale.status_code, stale.json()["code"]) == (409, "stale_sequence")
    assert server.totals(name)["produced"] == 2
