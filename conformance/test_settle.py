"""C18–C25: what becomes of leased items."""

from __future__ import annotations

from typing import Any

from conformance.api import POLL, Api, Queue, ids, millis, nth, reasons, texts, until


def test_C18_a_complete_may_name_items_of_several_partitions(api: Api) -> None:
    """Success means that all of them are completed, wherever they lie. (B)"""
    queue = api.queue(requested_partitions=3)
    for _ in range(3):
        queue.fill(4)
    items = queue.lease(12, max_partitions=3)["items"]
    assert {item["partition"] for item in items} == {0, 1, 2}
    shuffled = [item["id"] for place in range(4) for item in items[place::4]]
    assert queue.complete(shuffled) == {"completed": 12, "ignored": []}
    assert queue.total("total") == 0
    assert queue.balances()


def test_C19_completing_is_safe_to_repeat_and_ignores_what_cannot_be_completed(api: Api) -> None:
    """A success although some ids are gone, foreign or never were: these are listed, the rest is completed and stays so. (B)"""
    other = api.queue()
    other.produce("other")
    queue = api.queue(requested_partitions=1)
    first_id = queue.fill(8)["first_id"]
    dispositions = {"completed": queue.one(), "expired": queue.one(), "retried": queue.one(), "released": queue.one(), "dead": queue.one()}
    good = [queue.one()["id"], queue.one()["id"]]
    assert queue.complete([dispositions["completed"]["id"]]) == {"completed": 1, "ignored": []}
    queue.expire(dispositions["expired"]["lease_id"])
    queue.retry(dispositions["retried"]["id"])
    queue.ask("queue.release", ids=[dispositions["released"]["id"]])
    queue.retry(dispositions["dead"]["id"], dead=True)
    expected = {item["id"]: reason for reason, item in dispositions.items()}
    expected[nth(first_id, 7)] = "not_leased"
    expected[nth(first_id, 1_000_000)] = "unknown"
    expected[other.one()["id"]] = "unknown"
    expected[first_id.replace(".0.", ".77.")] = "unknown"

    answer = queue.complete([*list(expected)[:4], *good, *list(expected)[4:]])
    assert (answer["completed"], reasons(answer)) == (2, expected)
    for _ in range(2):
        answer = queue.complete([*good, *expected])
        assert (answer["completed"], reasons(answer)) == (0, {**expected, good[0]: "completed", good[1]: "completed"})
    assert queue.api.post("queue.complete", queue_name=queue.name, ids=["no id at all"]).status_code == 400
    back = [texts({"items": [dispositions[disposition]]})[0] for disposition in ("expired", "retried", "released")]
    assert queue.drained() == ["7", *back]
    assert other.total("total_leased") == 1


def test_C20_strict_names_stale_ids_and_a_client_id_keeps_others_items_safe(api: Api) -> None:
    """With `strict` anything ignored is a 409 that names it, the rest is settled; with a `client_id` only its items are touched. (API)"""
    queue = api.queue()
    queue.fill(4)
    stale, mine = queue.one(client_id="a")["id"], queue.one(client_id="a")["id"]
    theirs = queue.lease(2, client_id="b")
    lease_id = theirs["leases"][0]["lease_id"]
    queue.complete([stale])
    for call in ("queue.complete", "queue.release"):
        problem = queue.refused(call, 409, "stale_ids", ids=[stale], strict=True)
        assert stale in problem["detail"]
    queue.refused("queue.retry", 409, "stale_ids", items=[{"id": stale}], strict=True)
    queue.refused("queue.extend", 409, "stale_ids", ids=[stale], strict=True)
    queue.refused("queue.complete", 409, "stale_ids", ids=[mine, stale], strict=True)
    assert reasons(queue.complete([mine])) == {mine: "completed"}

    for call, done in (("queue.complete", "completed"), ("queue.release", "released")):
        answer = queue.ask(call, ids=ids(theirs), client_id="a")
        assert (answer[done], reasons(answer)) == (0, dict.fromkeys(ids(theirs), "not_yours"))
        answer = queue.ask(call, lease_ids=[lease_id], client_id="a")
        assert (answer[done], reasons(answer)) == (0, {lease_id: "not_yours"})
    assert reasons(queue.ask("queue.retry", items=[{"id": ids(theirs)[0]}], client_id="a")) == {ids(theirs)[0]: "not_yours"}
    assert queue.ask("queue.extend", ids=ids(theirs), client_id="a")["leases"] == []
    queue.refused("queue.complete", 409, "stale_ids", ids=ids(theirs), client_id="a", strict=True)
    assert queue.complete(ids(theirs), client_id="b", strict=True)["completed"] == 2


def test_C21_an_extended_lease_outlives_its_first_deadline(api: Api) -> None:
    """The new deadline counts, for a lease named by itself or by one of its items; a lease that is closed is listed. (API)"""
    queue = api.queue()
    queue.fill(4)
    by_lease, by_item = (queue.lease(lease_timeout="5s") for _ in range(2))
    clock = queue.one(lease_timeout="5s")
    answer = queue.ask("queue.extend", lease_ids=[by_lease["leases"][0]["lease_id"]], ids=ids(by_item), lease_timeout="10m")
    assert len(answer["leases"]) == 2
    assert all(millis(lease["lease_deadline"]) > millis(clock["lease_deadline"]) for lease in answer["leases"])
    until(lambda: queue.total("expired") == 1, "the deadline that was not extended")
    assert queue.complete([*ids(by_lease), *ids(by_item)])["completed"] == 2
    answer = queue.ask("queue.extend", lease_ids=[clock["lease_id"]], ids=ids(by_item))
    assert answer["leases"] == []
    assert reasons(answer) == {clock["lease_id"]: "expired", ids(by_item)[0]: "completed"}


def test_C22_a_release_counts_no_attempt(api: Api) -> None:
    """Items that are given back come again with the attempts they had; what was staged for their lease is dropped. (API)"""
    queue = api.queue(max_attempts=1)
    queue.fill(3)
    answer = queue.lease(3)
    lease_id = answer["leases"][0]["lease_id"]
    queue.ask("queue.settle", items=[{"id": ids(answer)[0], "outcome": "done"}])
    assert queue.ask("queue.release", lease_ids=[lease_id])["released"] == 3
    again = queue.lease(3)
    assert [item["attempts"] for item in again["items"]] == [1, 1, 1]
    assert texts(again) == texts(answer)
    assert queue.ask("queue.release", ids=ids(again)[:1])["released"] == 1
    assert reasons(queue.ask("queue.release", lease_ids=[lease_id], ids=ids(answer)[:1])) == {
        lease_id: "released",
        ids(answer)[0]: "released",
    }
    assert (queue.total("released"), queue.total("ready"), queue.total("total_leased"), queue.total("dead")) == (4, 1, 2, 0)


def test_C23_an_item_that_has_used_up_its_attempts_dies_when_its_lease_runs_out(api: Api) -> None:
    """After max_attempts leases that ran out it is in the dead queue and nowhere else; without a dead queue it is dropped. (ADR 22)"""
    dead = api.queue()
    queue = api.queue(max_attempts=2, dead_queue=dead.name)
    dropping = api.queue(max_attempts=2)
    for source in (queue, dropping):
        source.produce("doomed")
        for attempt in (1, 2):
            item = source.one()
            assert item["attempts"] == attempt
            source.expire(item["lease_id"])
    buried = dead.one()
    assert (buried["origin"], buried["attempts"], texts({"items": [buried]})) == (f"{queue_origin(queue)}", 1, ["doomed"])
    for source in (queue, dropping):
        until(source.balances, "the end of the burial")
        assert (source.total("dead"), source.total("total"), source.total("expired")) == (1, 0, 1)


def queue_origin(queue: Queue) -> str:
    """The first id of a queue with one partition."""
    return f"{queue.api.ask('queues.info', queue_name=queue.name)['incarnation']}.0.0"


def test_C24_an_item_that_kills_its_consumers_ends_alone(api: Api) -> None:
    """Items of a lease that ran out come in leases of half the size, so that of eight only the culprit uses up four attempts. (API)"""
    dead = api.queue()
    queue = api.queue(max_attempts=4, dead_queue=dead.name)
    queue.produce(*"abcPdefg")
    with_culprit = []
    while queue.total("total"):
        answer = queue.lease(8)
        if "P" in texts(answer):
            with_culprit.append(len(answer["items"]))
            queue.expire(answer["leases"][0]["lease_id"])
        else:
            queue.complete(ids(answer))
    assert with_culprit == [8, 4, 2, 1]
    assert texts({"items": [dead.one()]}) == ["P"]
    assert (queue.total("completed"), queue.total("dead")) == (7, 1)


def test_C25_an_item_that_waits_too_long_dies(api: Api) -> None:
    """What was not completed within expire_timeout goes to the dead queue with the reason `expired`, also one that was retried. (ADR 22)"""
    dead = api.queue()
    queue = api.queue(expire_timeout="2s", dead_queue=dead.name)
    poll = dead.park(client_id="undertaker")
    queue.produce("never leased")
    assert died_of(poll()) == [("never leased", "expired")]
    queue.produce("retried")
    queue.retry(queue.one()["id"], retry_after="3s")
    assert died_of(dead.lease(request_timeout=POLL)) == [("retried", "expired")]
    until(queue.balances, "the end of the burials")
    assert (queue.total("dead"), queue.total("total")) == (2, 0)


def died_of(answer: Any) -> list[tuple[str, str]]:
    return [(text, item["headers"]["sluiceway-reason"]) for text, item in zip(texts(answer), answer["items"], strict=True)]
