"""The first page, and what it shares with others: what is wrong is said, and so is what is not known or not for this reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.server.ui.counts import Counts
from tests.dashboard.test_ui import ORIGIN, browser, signed
from tests.dashboard.test_ui_dead import words
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import eventually


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("overview-keyed") / "data") as found:
        found.client("manage:*").post("/v1/queues.create", json={"queue_name": "mine"})
        yield found


def figures(page: str) -> list[str]:
    return re.findall(r'class="figure">([^<]*)<', page)


def test_a_partition_that_is_damaged_needs_attention(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with guarded(data, keys=False) as server:
        whole = server.queue(requested_partitions=2)
        damaged = server.queue(requested_partitions=2)
        incarnation = server.ask("queues.info", queue_name=damaged)["incarnation"]
        for name in (whole, damaged):
            server.ask("storage/items.import", queue_name=name, partition=1, items=[{"payload": "eA=="}])
    (file,) = [each for each in data.rglob("*.sqlite") if incarnation in str(each) and each.stem.endswith("1")]
    file.write_bytes(b"garbage" * 1_000)
    with guarded(data, keys=False) as server:
        eventually(lambda: "Needs attention" in server.http.get("/ui").text)
        shown = words(server.http.get("/ui").text)
        assert f"critical {damaged} : 1 of 2 partitions are not served" in shown
        assert f"critical {whole}" not in shown
        for path in ("/ui/queues", f"/ui/queues/{damaged}"):
            assert "✖ partly unavailable" in words(server.http.get(path).text)
        assert "✖ error" in words(server.http.get(f"/ui/queues/{damaged}/partitions").text)


def test_what_is_not_known_yet_is_no_number(keyed: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    with signed(keyed, "read:*") as page:
        with monkeypatch.context() as patch:
            # As in the first second.
            patch.setattr(Counts, "rates", lambda *_: {})
            assert figures(page.get("/ui").text)[3:] == ["–", "–", "–"]
        eventually(lambda: figures(page.get("/ui").text) == ["0", "0", "0", "0/s", "0/s", "0/s"])


def test_the_overview_begins_with_what_is_wrong_and_the_queue_in_trouble_comes_first(tmp_path: Path) -> None:
    with guarded(tmp_path / "data", keys=False) as server:
        well, ill = server.queue(), server.queue()
        shown = words(server.http.get("/ui").text)
        assert "no problems with 2 queues" in shown or "The server has just started" in shown
        server.ask("queue.produce", queue_name=ill, items=[{"utf8": "x"}])
        for _ in range(1_000):
            server.ask("queue.produce", queue_name=well, items=[{"utf8": "x"}])
        # On a busy disk a commit can take longer than the second that a lease without a time-out has.
        server.ask("queue.lease", queue_name=well, client_id="c", batch_size=900, request_timeout="30s")
        eventually(lambda: "Needs attention" in server.http.get("/ui").text)
        page = server.http.get("/ui").text
        shown = words(page)
        assert shown.index("Overview") < shown.index("Needs attention") < shown.index("ready")
        assert f"warning {ill} : 1 item ready, and no consumer has requested any for" in shown
        assert f"sluiceway consumer list {ill}" in shown
        assert page.index(f'id="q-{ill}"') < page.index(f'id="q-{well}"'), "trouble first, then size"
        for path in ("", "/items", "/partitions", "/map", "/consumers", "/dead", "/settings", "/audit", "/redrive"):
            assert "Needs attention" in server.http.get(f"/ui/queues/{ill}{path}").text
            assert "Needs attention" not in server.http.get(f"/ui/queues/{well}{path}").text


def test_what_the_key_may_not_see_is_said(keyed: Guarded) -> None:
    with signed(keyed, "read:mine") as page:
        shown = words(page.get("/ui").text)
        assert "Instances need a key with the scope read:*" in shown
        assert "Backends need a key with the scope admin" in shown
    with signed(keyed, "read:*", "admin") as page:
        assert "need a key with" not in words(page.get("/ui").text)
    for scope in ("admin", "produce:mine"):
        with signed(keyed, scope) as page:
            for path in ("/ui", "/ui/queues"):
                shown = words(page.get(path).text)
                assert "This key cannot read queues" in shown
                assert "sluiceway queue create" not in shown


def test_where_there_is_nothing_for_administrators_the_pages_have_the_rest(keyed: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the first of two listeners: the calls for administrators are not there, whatever the key."""
    with signed(keyed, "read:*", "admin") as page:
        monkeypatch.setattr(keyed.app, "_admin_port", 1)
        shown = page.get("/ui")
        assert shown.status_code == 200
        assert "Backends need a key with the scope admin" in words(shown.text)
        assert page.get("/ui/map?queue=mine").status_code == 200


def test_who_is_not_asked_for_a_key_is_not_signed_in(tmp_path: Path) -> None:
    with guarded(tmp_path / "data", keys=False) as server, browser(server) as page:
        page.post("/ui/sign-in", data={"key": "any text"}, headers={ORIGIN: "same-origin"})
        assert page.cookies
        shown = page.get("/ui").text
        assert "Authentication off" in shown
        assert "Sign out" not in shown
        assert "Authentication is off" in page.get("/ui/settings/keys").text
