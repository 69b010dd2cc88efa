"""What goes wrong in a first hour is said in words that lead on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pandas as pd
import pyarrow as pa
import pytest
from click.testing import CliRunner

from sluiceway import __version__
from sluiceway.cli.main import cli
from sluiceway.client import Client
from sluiceway.client.arrow import write_stream
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.app import Fittings
from sluiceway.server.listeners import bind
from tests.server.server_running import Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("steps"), lambda _: Fittings(dashboard=True)) as served:
        yield served


def run(*words: str) -> tuple[int, str]:
    """Exit code and all that was said."""
    found = CliRunner().invoke(cli, words, standalone_mode=False)
    if isinstance(found.exception, click.ClickException):
        return found.exception.exit_code, found.exception.format_message()
    code = found.return_value if isinstance(found.return_value, int) else 0
    return code, found.output + ("" if found.exception is None else str(found.exception))


# ---- the header Idempotency-Key -------------------------------------------------------------------------------


def produce(server: Running, name: str, headers: list[tuple[str, str]], **fields: object) -> tuple[int, dict[str, object]]:
    body = {"queue_name": name, "items": [{"utf8": "x"}], **fields}
    answer = server.http.post("/v1/queue.produce", json=body, headers=headers)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("header", ["k-1", '"k-1"'])
def test_the_header_makes_a_produce_repeatable(server: Running, header: str) -> None:
    name = server.queue()
    first = produce(server, name, [("idempotency-key", header)])[1]
    again = produce(server, name, [("Idempotency-Key", header)])[1]
    field = produce(server, name, [], idempotency_key="k-1")[1]
    both = produce(server, name, [("idempotency-key", header)], idempotency_key="k-1")[1]
    assert first["deduplicated"] is False
    assert again["first_id"] == field["first_id"] == both["first_id"] == first["first_id"]
    assert server.totals(name)["produced"] == 1


def test_the_header_makes_an_arrow_produce_and_a_lease_repeatable(server: Running) -> None:
    name = server.queue()
    stream = write_stream(pa.table({"payload": pa.array([b"a", b"b"])}))
    headers = {"content-type": "application/vnd.apache.arrow.stream", "idempotency-key": "k"}
    answers = [server.http.post(f"/v1/queue.produce?queue_name={name}", content=stream, headers=headers).json() for _ in range(2)]
    assert [each["deduplicated"] for each in answers] == [False, True]
    body = {"queue_name": name, "client_id": "c"}
    leases = [server.http.post("/v1/queue.lease", json=body, headers={"idempotency-key": "l"}).json()["leases"] for _ in range(2)]
    assert leases[0][0]["lease_id"] == leases[1][0]["lease_id"]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ([("idempotency-key", "a")], {"idempotency_key": "b"}),
        ([("idempotency-key", "a"), ("idempotency-key", "b")], {}),
        ([("idempotency-key", "")], {}),
        ([("idempotency-key", "x" * 2_049)], {}),
        ([("idempotency-key", "a\tb")], {}),
    ],
)
def test_keys_that_differ_or_are_none_are_refused(server: Running, headers: list[tuple[str, str]], fields: dict[str, object]) -> None:
    name = server.queue()
    status, said = produce(server, name, headers, **fields)
    assert (status, said["code"]) == (400, "invalid_request")
    assert "Idempotency-Key" in str(said["detail"])
    assert server.totals(name)["produced"] == 0


# ---- the bare address -----------------------------------------------------------------------------------------


def test_the_bare_address_leads_on(server: Running, tmp_path: Path) -> None:
    page = server.http.get("/", headers={"accept": "text/html,*/*"})
    assert (page.status_code, page.headers["location"]) == (302, "/ui")
    told = server.http.get("/").json()
    assert (told["version"], told["dashboard"], told["docs"]) == (__version__, "/ui", "/docs")
    assert server.http.head("/").status_code == 200
    with running(tmp_path) as plain:
        answer = plain.http.get("/", headers={"accept": "text/html"})
        assert (answer.status_code, "dashboard" in answer.json()) == (200, False)


# ---- the command line -----------------------------------------------------------------------------------------


def test_a_typo_of_a_command_gets_a_suggestion() -> None:
    for typo, meant in (("quue", "queue"), ("prodcue", "produce"), ("docter", "doctor")):
        code, said = run(typo)
        assert (code, f"No such command '{typo}'. Did you mean" in said, repr(meant) in said) == (2, True, True)
    assert run("zzzzz")[1] == "No such command 'zzzzz'."


def test_a_lease_takes_from_as_many_partitions_as_it_needs(server: Running) -> None:
    name = server.queue(requested_partitions=4)
    for text in "abcd":
        server.produce(name, text)
    assert run("lease", name, "-n", "10", "--url", server.url, "--max-partitions", "1")[1].count("sluiceway complete") == 1
    assert run("lease", name, "-n", "10", "--url", server.url)[1].count("sluiceway complete") == 3


def test_a_paused_queue_says_so(server: Running) -> None:
    name = server.queue()
    server.produce(name, "x")
    server.ask("queue.pause", queue_name=name)
    with pytest.raises(click.ClickException) as refused:
        cli.main(["lease", name, "--url", server.url], standalone_mode=False)
    assert "is paused for leasing" in str(refused.value)
    assert refused.value.error.retryable  # type: ignore[attr-defined]
    assert "Paused: lease and produce" in run("stats", name, "--url", server.url)[1]
    server.ask("queue.resume", queue_name=name)
    assert "paused" not in run("stats", name, "--url", server.url)[1]


def test_a_queue_is_deleted_with_yes_too(server: Running) -> None:
    name = server.queue()
    server.produce(name, "x")
    assert run("queue", "delete", name, "--force", "--yes", "--url", server.url) == (0, f"Deleted {name}\n")


@pytest.mark.parametrize("page", ["/ui", "/ui/", "/v1", "/docs"])
def test_the_address_of_a_page_is_not_that_of_the_server(server: Running, page: str) -> None:
    with pytest.raises(SluicewayError, match="leave out /"):
        Client(server.url + page)


def test_a_server_without_tls_is_told_from_one_that_is_away(server: Running) -> None:
    with pytest.raises(SluicewayError, match=r"does not use TLS; use http:// in place of https://"):
        Client(server.url.replace("http:", "https:"), retry_for="0s").list_queues()


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"server\.listen: 127\.0\.0\.1:{port}: Address already in use"):
            bind("127.0.0.1", port)


# ---- the Python client ----------------------------------------------------------------------------------------


def test_what_is_no_item_is_named(server: Running) -> None:
    with (
        Client(server.url) as client,
        pytest.raises(SluicewayError, match="expected bytes, text, or a value that JSON can hold"),
    ):
        client.produce("q", [{1j}])


class Frame:
    """Exports Arrow as Polars does: text is a view."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_data_frames_are_taken(server: Running) -> None:
    name = server.queue()
    views = pa.table({"payload": pa.array(["a", "b"], pa.string_view()), "kind": pa.array(["k", None], pa.large_string())})
    with Client(server.url) as client:
        assert client.produce_arrow(name, Frame(views)).count == 2
        assert client.produce_arrow(name, pd.DataFrame({"payload": [b"c", b"d"], "reference": ["r", "s"]})).count == 2
        leased = client.lease_arrow(name, batch_size=10)
        assert leased.table.column("payload").to_pylist() == [b"a", b"b", b"c", b"d"]
        for wrong in ({"payload": [b"x"]}, [b"x"], 1):
            with pytest.raises(SluicewayError, match="expected a pyarrow Table or RecordBatch, or a data frame that exports Arrow"):
                client.produce_arrow(name, wrong)


def test_the_depth_of_a_queue_is_one_small_object(server: Running) -> None:
    queue_name = server.queue(requested_partitions=2)
    server.produce(queue_name, *"abc")
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    server.ask("queue.produce", queue_name=queue_name, items=[{"utf8": "later", "enqueue_at": tomorrow}])
    server.lease(queue_name, 1)
    assert server.http.get("/v1/queue.depth", params={"queue_name": queue_name}).json() == {
        "queue_name": queue_name,
        "ready": 2,
        "servable": 2,
        "leased": 1,
        "scheduled": 1,
        "active": 3,
        "skipped": [],
    }
    refusals = {"": "queue_name", "queue_name=none": "queue_not_found", f"queue_name={queue_name}&more=1": "more"}
    for query, named in refusals.items():
        answer = server.http.get(f"/v1/queue.depth?{query}")
        assert answer.status_code in (400, 404)
        assert named in answer.text
