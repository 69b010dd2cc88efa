"""B01–B08: writes that fail, times that are forgotten, leases that are broken."""

from __future__ import annotations

from concurrent.futures import Future

import httpx

from conformance.api import Api, ids, now, reasons, texts, until
from conformance.tested_server import Server


def test_B01_a_failed_write_is_not_acknowledged(api: Api, storage: Server) -> None:
    """While the storage is away every produce ends as refused or unknown; what was acknowledged is there, nothing is there twice."""
    queue = api.queue(requested_partitions=3)
    answers: dict[str, Future[httpx.Response]] = {}

    def produce(text: str) -> None:
        answers[text] = api.later("queue.produce", queue_name=queue.name, items=[{"utf8": text}], request_timeout="1s")

    for number in range(10):
        produce(f"before-{number}")
    answers["before-0"].result()
    storage.stop_storage()
    for number in range(10):
        produce(f"after-{number}")
    status = {text: answer.result().status_code for text, answer in answers.items()}
    storage.continue_storage()
    assert set(status.values()) <= {200, 503, 504}
    assert {status[text] for text in status if text.startswith("after")} <= {503, 504}
    # More of them than there are partitions: each has a commit behind those that the stop held up.
    for number in range(12):
        queue.produce(f"since-{number}")
        status[f"since-{number}"] = 200
    acknowledged = {text for text in status if status[text] == 200}
    stored: list[str] = []

    def all_served() -> bool:
        stored.extend(queue.drained())
        return acknowledged <= set(stored)

    until(all_served, "the service of all that was acknowledged")
    assert len(stored) == len(set(stored))
    assert not {text for text in status if status[text] == 503} & set(stored)


def test_B02_a_produce_that_nothing_can_take_is_answered_at_its_timeout(api: Api, storage: Server) -> None:
    """It ends at its request_timeout, retryable, though the queue is idle and the storage still away."""
    queue = api.queue(requested_partitions=2)
    storage.stop_storage()
    answer = api.post("queue.produce", queue_name=queue.name, items=[{"utf8": "x"}], request_timeout="1s")
    assert answer.status_code in (503, 504)
    assert answer.json()["retryable"] is True
    again = api.post("queue.produce", queue_name=queue.name, items=[{"utf8": "x"}], request_timeout="4s")
    assert again.status_code in (503, 504)


def test_B03_each_scheduled_item_is_remembered(api: Api) -> None:
    """Items scheduled for several times are all served, each when it is due, on a queue on which nothing else happens."""
    queue = api.queue()
    start = now()
    dues = {"first": start + 400, "second": start + 800, "third": start + 1_200}
    for text, due in dues.items():
        queue.schedule(due, text)
    for text, due in dues.items():
        item = queue.one()
        assert now() >= due
        assert texts({"items": [item]}) == [text]


def test_B04_scheduled_items_survive_a_restart(api: Api, restartable: Server) -> None:
    """What is scheduled before the server dies is served when it is due, by an idle server that was started since."""
    queue = api.queue()
    due = now() + 6_000
    queue.schedule(due, "scheduled")
    queue.produce("retried")
    queue.retry(queue.one()["id"], retry_after="6s")
    restartable.restart()
    assert sorted(texts({"items": [queue.one(), queue.one()]})) == ["retried", "scheduled"]
    assert now() >= due


def test_B05_a_waiting_consumer_is_woken_whichever_partition_an_item_comes_back_in(api: Api) -> None:
    """Each of four partitions in turn is the only one that has anything, after it had nothing."""
    queue = api.queue(requested_partitions=4)
    for _ in range(4):
        queue.produce("x")
    held = queue.lease(4, client_id="first", max_partitions=4)["items"]
    for item in held:
        poll = queue.park()
        queue.retry(item["id"])
        (served,) = poll()["items"]
        assert (served["partition"], served["origin"]) == (item["partition"], item["origin"])
    assert queue.lease(4, max_partitions=4)["leases"] == []


def test_B06_what_was_put_back_is_counted(api: Api) -> None:
    """Retried, expired, released and due items count as waiting items when a produce or a lease is given a partition."""
    queue = api.queue(requested_partitions=2)
    queue.fill(12)
    answer = queue.lease(12)
    full = answer["partition"]
    lease_id = answer["leases"][0]["lease_id"]
    for item in answer["items"][:4]:
        queue.retry(item["id"])
    queue.ask("queue.release", ids=ids(answer)[4:8])
    queue.expire(lease_id)
    assert queue.ready()[full] == 12
    assert [queue.fill(3)["partition"] for _ in range(4)] == [1 - full] * 4
    assert queue.ready() == [12, 12]
    assert len(queue.drained()) == 24


def test_B07_a_live_lease_is_not_broken_by_max_attempts(api: Api) -> None:
    """An item in its last permitted attempt stays its consumer's while other leases run out."""
    dead = api.queue()
    queue = api.queue(max_attempts=1, dead_queue=dead.name)
    queue.produce("held", "dies")
    held, dies = queue.one(), queue.one()
    queue.expire(dies["lease_id"])
    assert texts({"items": [dead.one()]}) == ["dies"]
    assert queue.complete([held["id"]]) == {"completed": 1, "ignored": []}
    assert dead.total("produced") == 1


def test_B08_a_live_lease_is_not_broken_by_expire_timeout(api: Api) -> None:
    """A leased item whose expire_timeout passes can be completed; one that comes back after that dies."""
    dead = api.queue()
    queue = api.queue(expire_timeout="3s", dead_queue=dead.name)
    queue.produce("held", "given back", "waits")
    held, back = queue.one(), queue.one()
    assert texts({"items": [dead.one()]}) == ["waits"]
    assert queue.complete([held["id"]]) == {"completed": 1, "ignored": []}
    assert reasons(queue.ask("queue.release", ids=[back["id"]])) == {}
    assert texts({"items": [dead.one()]}) == ["given back"]
    until(queue.balances, "the end of the burials")
