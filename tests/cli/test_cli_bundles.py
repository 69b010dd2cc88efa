"""The commands on bundles, against a server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest

from sluiceway.testing import TestServer, server
from tests.cli.cli_shell import Shell


@pytest.fixture(scope="module")
def served() -> Iterator[TestServer]:
    with server() as running:
        for name in ("resize", "albums"):
            running.client.create_queue(name)
        yield running


@pytest.fixture
def shell(served: TestServer, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", served.url)
    return Shell("resize", monkeypatch, capsysbinary)


def fails(shell: Shell, *arguments: str) -> str:
    """What it says of its failure."""
    code, _, said = shell.ends(*arguments)
    assert code != 0
    return said


def test_a_bundle_from_its_creation_to_its_end(served: TestServer, shell: Shell) -> None:
    code, out, said = shell.ends("bundle", "list")
    assert (code, out) == (0, "")
    assert said.startswith("No bundles. Create one")
    (made,) = shell.json("bundle", "create", "resize", "--follow-up", "albums", "--payload", "done", "--header", "a=b")
    id = made["id"]
    assert made["follow_up"]["item"] == {"utf8": "done", "headers": {"a": "b"}}
    shell.says("produce", "resize", "--bundle", id, "a.jpg", "b.jpg")
    assert shell.says("bundle", "close", id) == f"Closed {id}. 2 of 2 items have not ended.\n"
    listed = shell.says("bundle", "list", "--queue", "resize").splitlines()
    assert [line.split()[:8] for line in listed[1:]] == [[id, "resize", "closed", "2", "0", "0", "0", "2"]]
    leased = served.client.lease("resize", batch_size=10)
    served.client.complete("resize", lease_ids=leased.lease_ids)
    (follow_up,) = served.client.lease("albums", request_timeout="50s").items
    assert follow_up.headers is not None
    assert (follow_up.payload, follow_up.headers["bundle_completed"]) == (b"done", "2")
    served.clock.advance("1s")
    shown = shell.says("bundle", "show", id)
    assert [line.split() for line in shown.splitlines() if line.split()[0] in ("state", "completed", "follow-up", "payload")] == [
        ["state", "done"],
        ["completed", "2"],
        ["follow-up", follow_up.id],
        ["payload", "done"],
    ]
    assert [each["state"] for each in shell.json("bundle", "list")] == ["done"]


def test_a_bundle_closes_at_a_number_of_items_or_is_cancelled(served: TestServer, shell: Shell) -> None:
    id = shell.says("bundle", "create", "resize", "--items", "5").strip()
    (shown,) = shell.json("bundle", "show", id)
    assert (shown["items"], shown["follow_up"]) == (5, None)
    assert shell.says("bundle", "cancel", id) == f"Cancelled {id}\n"
    refused = fails(shell, "produce", "resize", "--bundle", id, "late")
    assert "bundle_closed" in refused
    assert "is cancelled" in refused


def test_what_other_queues_call_it_is_understood(shell: Shell) -> None:
    assert "sluiceway bundle create QUEUE" in fails(shell, "batch", "create")
    assert "sluiceway bundle show" in fails(shell, "bundle", "status", "x")
    assert "--payload" in fails(shell, "bundle", "create", "resize", "--follow-up", "albums")


def test_the_client_says_what_a_follow_up_needs(served: TestServer) -> None:
    with pytest.raises(Exception, match="required with follow_up_queue"):
        served.client.create_bundle("resize", follow_up_queue="albums")
    made = served.client.create_bundle("resize", follow_up={"n": 1})
    assert made.follow_up is not None
    assert (made.follow_up.queue_name, json.loads(base64.b64decode(made.follow_up.item["bytes"]))) == ("resize", {"n": 1})
    page = served.client.list_bundles(queue_name="resize", limit=1)
    assert len(page.items) == 1
    assert served.client.get_bundle(made.id) == made
    assert served.client.cancel_bundle(made.id).state == "cancelled"
