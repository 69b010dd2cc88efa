"""PyTorch reads a queue as an iterable dataset, also in processes of a loader, and settles when results are stored."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sluiceway import testing
from sluiceway.client import DeadItem, RetryItem, SluicewayError
from tests.client.test_consumer import total
from tests.engines.engine_imports import engine
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually

torch: Any = engine("torch")

from sluiceway.client.torch_dataset import QueueDataset  # noqa: E402 - not without torch


def number_of(item: dict[str, Any]) -> dict[str, Any]:
    """A sample with a tensor. Runs in the loader's processes."""
    text = item["payload"].decode()
    if text == "broken":
        raise DeadItem("not a number")
    if text == "later":
        raise RetryItem(after="1h")
    return {"id": item["id"], "number": torch.tensor(float(text)), "process": os.getpid()}


@pytest.fixture
def dataset(served: testing.TestServer, queue: str) -> Iterator[QueueDataset]:
    made = QueueDataset(queue, url=served.url, transform=number_of, batch_size=50, lease_timeout="6s")
    yield made
    made.close()


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loader_reads_and_settles_in_batches(served: testing.TestServer, queue: str, dataset: QueueDataset, processes: int) -> None:
    client = served.client
    client.produce(queue, [str(number) for number in range(400)])
    client.produce(queue, ["broken", "later"])
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, num_workers=processes, persistent_workers=processes > 0)
    numbers: list[float] = []
    seen = set()
    for batch in loader:
        assert total(client, queue, "completed") == len(numbers)
        numbers += batch["number"].tolist()
        seen |= {*batch["process"].tolist()}
        dataset.settle({"id": batch["id"], "outcome": ["done"] * len(batch["id"])})
    assert sorted(numbers) == [float(number) for number in range(400)]
    assert (os.getpid() in seen) == (processes == 0)
    names = ("completed", "dead", "scheduled", "total_leased")
    eventually(lambda: [total(client, queue, name) for name in names] == [400, 1, 1, 0])
    client.produce(queue, ["7"])
    assert [batch["number"].tolist() for batch in loader] == [[7.0]]


def test_a_process_keeps_the_leases_of_what_it_read(served: testing.TestServer, queue: str, dataset: QueueDataset) -> None:
    client = served.client
    client.produce(queue, ["1", "2", "3"])
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=1, persistent_workers=True)
    (batch,) = list(loader)
    first = client.explain(queue, batch["id"][0]).lease_deadline
    assert first is not None
    eventually(lambda: (client.explain(queue, batch["id"][0]).lease_deadline or first) > first)
    outcomes = {"id": batch["id"], "outcome": ["done", "retry", "dead"], "reason": [None, None, "no good"]}
    dataset.settle(outcomes | {"retry_after_ms": [None, 3_600_000, None]})
    eventually(lambda: [total(client, queue, name) for name in ("completed", "scheduled", "dead")] == [1, 1, 1])


def test_what_a_killed_process_read_is_offered_again(served: testing.TestServer, queue: str, dataset: QueueDataset) -> None:
    client = served.client
    client.produce(queue, [str(number) for number in range(40)])
    loader = torch.utils.data.DataLoader(dataset, batch_size=10, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    batch = next(batches)
    dataset.settle({"id": batch["id"], "outcome": ["done"] * 10})

    def kill() -> None:
        # PyTorch raises as soon as it hears of the death, wherever the program is.
        os.kill(int(batch["process"][0]), signal.SIGKILL)
        threading.Event().wait(PATIENCE)

    with pytest.raises(RuntimeError, match="is killed by signal"):
        kill()
    served.clock.advance("6s")
    assert [total(client, queue, name) for name in ("completed", "ready")] == [10, 30]


def test_a_wrong_column_is_refused() -> None:
    with pytest.raises(SluicewayError, match="'body' is not one of id, origin"):
        QueueDataset("q", columns=["body"])
