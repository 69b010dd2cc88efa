"""The frame of the dashboard: who is let in, what is sent with each page, what a page may do, and that it goes on by itself."""

from __future__ import annotations

import base64
import gzip
import html
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest

from sluiceway.server.ui import counts, live
from sluiceway.server.ui.counts import Counts
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import Running, eventually

ORIGIN = "sec-fetch-site"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with guarded(tmp_path_factory.mktemp("open") / "data", keys=False) as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("keyed") / "data") as found:
        yield found


def browser(server: Running) -> httpx.Client:
    """Keeps cookies, as browsers do, and says that its own pages send its forms."""
    return httpx.Client(base_url=server.url, headers={ORIGIN: "same-origin"}, timeout=30)


@contextmanager
def signed(server: Guarded, *scopes: str) -> Iterator[httpx.Client]:
    with browser(server) as page:
        answer = page.post("/ui/sign-in", data={"key": server.key(*scopes), "next": "/ui"})
        assert answer.status_code == 303
        yield page


def blocks(answer: httpx.Response) -> Iterator[str]:
    """What a stream sends, one after the other."""
    text = ""
    for part in answer.iter_text():
        text += part
        while "\n\n" in text:
            block, text = text.split("\n\n", 1)
            if not block.startswith(":"):
                yield "\n".join(line.removeprefix("data: ") for line in block.split("\n"))


def test_a_page_may_load_and_run_nothing_but_what_the_server_has(server: Running) -> None:
    answer = server.http.get("/ui")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert not re.search(r"\son\w+=|\sstyle=|<script>|<style|https?://", answer.text)
    sources = re.findall(r'(?:src|href)="(/ui/assets/[^"]+)"', answer.text)
    assert len(sources) >= 5
    for source in set(sources):
        assert server.http.get(source).status_code == 200


def test_assets_are_kept_for_good_and_packed_for_who_can_unpack(server: Running) -> None:
    (path,) = re.findall(r'href="(/ui/assets/ui-[^"]+\.css)"', server.http.get("/ui").text)
    plain = server.http.get(path, headers={"accept-encoding": "identity"})
    with server.http.stream("GET", path, headers={"accept-encoding": "gzip"}) as packed:
        assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content
    assert "immutable" in plain.headers["cache-control"]
    assert server.http.get(path.replace(".css", "0.css")).status_code == 404


def test_the_overview_has_what_the_api_has(server: Running) -> None:
    queue_name = server.queue()
    server.produce(queue_name, "a", "b", "c")

    def shown() -> list[str]:
        row = re.search(rf'<tr id="q-{queue_name}">(.*?)</tr>', server.http.get("/ui").text, re.DOTALL)
        assert row is not None
        return re.findall(r'class="n">([^<]*)<', row[1])[:2]

    # Who has looked a moment ago is told of a new queue by the next look.
    eventually(lambda: shown() == ["3", "0"])


def test_a_page_goes_on_by_itself(server: Running) -> None:
    queue_name = server.queue()
    server.produce(queue_name, *"abcdefg")

    def ready(text: str) -> str | None:
        found = re.search(rf'<tr id="q-{queue_name}">.*?class="n">([^<]*)<', text, re.DOTALL)
        return found[1] if found else None

    with server.http.stream("GET", "/ui/live") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        shown = blocks(answer)
        assert next(text for text in shown if ready(text) == "7")
        server.produce(queue_name, *"hij")
        assert next(text for text in shown if ready(text) == "10")


def test_a_stream_does_not_repeat_what_the_page_said(server: Running) -> None:
    queue_name = server.queue()
    page = server.http.get(f"/ui/queues/{queue_name}/settings").text
    (address,) = re.findall(r'hx-sse:connect="([^"]+)"', page)
    with server.http.stream("GET", html.unescape(address)) as answer:
        shown = blocks(answer)
        server.ask("queues.update", queue_name=queue_name, reference="a note")
        assert "a note" in next(shown)


def test_who_comes_back_is_told_what_is_so_and_not_what_the_page_was_loaded_with(server: Running) -> None:
    queue_name = server.queue(reference="first")
    (address,) = re.findall(r'hx-sse:connect="([^"]+)"', server.http.get(f"/ui/queues/{queue_name}/settings").text)
    address = html.unescape(address)
    server.ask("queues.update", queue_name=queue_name, reference="second")
    with server.http.stream("GET", address) as answer:
        text = next(each for each in blocks(answer) if "second" in each)
        (last,) = re.findall(r"^id: (\w+)$", text, re.MULTILINE)
    server.ask("queues.update", queue_name=queue_name, reference="first")
    with server.http.stream("GET", address, headers={"last-event-id": last}) as answer:
        assert "first" in next(blocks(answer))


def test_a_stream_takes_get_alone(server: Running) -> None:
    assert server.http.head("/ui/live").status_code == 405
    assert server.http.head("/ui").status_code == 200


def test_a_page_that_cannot_be_made_says_so_and_goes_on(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()
    broken.set()
    real = Counts.rates
    server.queue()

    def fails(counts: Counts, queue_name: str) -> Mapping[str, float]:
        if broken.is_set():
            raise RuntimeError("a fault")
        return real(counts, queue_name)

    monkeypatch.setattr(Counts, "rates", fails)
    page = server.http.get("/ui")
    assert page.status_code == 500
    assert "text/html" in page.headers["content-type"]
    assert "unexpected" in page.text
    caplog.clear()
    with server.http.stream("GET", "/ui/live") as answer:
        shown = blocks(answer)
        assert "unexpected" in next(shown)
        broken.clear()
        assert "unexpected" not in next(shown)
    assert sum("could not be made" in record.message for record in caplog.records) <= 1


def test_a_stream_that_there_is_no_room_for_leaves_the_page_as_it_is(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_STREAMS", 0)
    answer = server.http.get("/ui/live")
    assert answer.status_code == 429
    assert answer.headers["hx-reswap"] == "none"


def test_who_sees_the_same_is_sent_what_was_made_once(server: Running) -> None:
    with server.http.stream("GET", "/ui/live") as one, server.http.stream("GET", "/ui/live") as other:
        assert next(blocks(one)) == next(blocks(other))


@pytest.mark.parametrize("path", ["/ui/nothing", "/ui/<script>alert(1)</script>", "/ui/ask/none", "/ui/live/nothing"])
def test_what_is_not_there_is_said_without_repeating_it_as_html(server: Running, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 404
    assert "<script>alert" not in answer.text


@pytest.mark.parametrize(
    "headers", [{}, {ORIGIN: "cross-site"}, {ORIGIN: "same-site"}, {"origin": "http://elsewhere.example"}, {"origin": "null"}]
)
def test_nothing_is_done_that_another_site_asks_for(server: Running, headers: dict[str, str]) -> None:
    queue_name = server.queue()
    answer = server.http.post("/ui/do/queue.pause", data={"queue_name": queue_name}, headers=headers)
    assert answer.status_code == 403
    assert server.ask("queues.info", queue_name=queue_name)["paused"] == []


@pytest.mark.parametrize("say", ["sec-fetch-site", "origin"])
def test_a_command_does_what_its_form_says(server: Running, say: str) -> None:
    queue_name = server.queue()
    asked = server.http.get("/ui/ask/queue.pause", params={"queue_name": queue_name})
    assert f"sluiceway queue pause {queue_name}" in asked.text
    headers = {"sec-fetch-site": "same-origin"} if say == ORIGIN else {"origin": server.url}
    done = server.http.post("/ui/do/queue.pause", data={"queue_name": queue_name}, headers=headers)
    assert done.status_code == 200
    assert ": done" in done.text
    assert server.ask("queues.info", queue_name=queue_name)["paused"] == ["lease", "produce"]


def test_a_form_that_is_wrong_says_so_at_the_field(server: Running) -> None:
    answer = server.http.post("/ui/do/queue.pause", data={"queue_name": 'no"><script>alert(1)</script>'}, headers={ORIGIN: "same-origin"})
    assert 'role="alert"' in answer.text
    assert 'aria-invalid="true"' in answer.text
    assert "<script>alert" not in answer.text


def test_who_has_no_key_is_asked_for_one(keyed: Guarded) -> None:
    with browser(keyed) as page:
        answer = page.get("/ui/queues?sort=ready")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/ui/sign-in?next=%2Fui%2Fqueues%3Fsort%3Dready"
        assert 'value="/ui/queues?sort=ready"' in page.get(answer.headers["location"]).text
        assert page.get("/ui/live").status_code == 401
        assert page.post("/ui/do/queue.pause", data={"queue_name": "x"}).headers["location"] == "/ui/sign-in?next=%2Fui"
        assert page.post("/ui/do/queue.pause", data={"queue_name": "x"}, headers={"hx-request": "true"}).status_code == 401
        wrong = page.post("/ui/sign-in", data={"key": "slw_aaaaaaaa_nothing", "next": "/ui"})
        assert wrong.status_code == 401
        assert 'role="alert"' in wrong.text
        assert "set-cookie" not in wrong.headers


def test_a_key_signs_in_and_out(keyed: Guarded) -> None:
    with browser(keyed) as page:
        answer = page.post("/ui/sign-in", data={"key": keyed.key("read:*"), "next": "/ui/queues"})
        assert answer.headers["location"] == "/ui/queues"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie
        assert "Path=/ui" in cookie
        assert "Secure" not in cookie
        assert "Signed in as <strong>test</strong>" in " ".join(page.get("/ui").text.split()).replace(
            "as <strong>test/", "as <strong>test</strong>", 1
        )
        page.post("/ui/sign-out")
        assert page.get("/ui").status_code == 303


def test_over_tls_the_cookie_stays_on_tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    with guarded(tmp_path_factory.mktemp("tls") / "data", secure=True) as server:
        data = {"key": server.key("read:*"), "next": "/ui"}
        assert "; Secure" in server.http.post("/ui/sign-in", data=data, headers={ORIGIN: "same-origin"}).headers["set-cookie"]


@pytest.mark.parametrize(
    "target",
    ["//elsewhere.example/ui", "https://elsewhere.example/ui", "/\\elsewhere.example", "/v1/queues.list", "/uix", "", "//[", "http://[::1"],
)
def test_signing_in_leads_nowhere_else(keyed: Guarded, target: str) -> None:
    with browser(keyed) as page:
        assert page.post("/ui/sign-in", data={"key": keyed.key("read:*"), "next": target}).headers["location"] == "/ui"


def test_a_path_that_is_none_is_no_fault_of_the_server(keyed: Guarded) -> None:
    """It was an error with a trace in the log, for everybody who can reach the server."""
    answer = keyed.http.get("/ui/sign-in", params={"next": "//["})
    assert answer.status_code == 200
    assert 'value="/ui"' in answer.text


def test_a_stranger_leaves_nothing_behind(keyed: Guarded) -> None:
    site = keyed.app._site
    assert site is not None
    before = set(site._counts)
    for number in range(20):
        key = base64.urlsafe_b64encode(b"slw_%d" % number * 1_000).decode()
        cookie = f"sluiceway-{httpx.URL(keyed.url).port}={key}"
        assert keyed.http.get("/ui", headers={"cookie": cookie}).status_code == 303
        assert keyed.http.post("/ui/do/queue.pause", headers={"cookie": cookie, ORIGIN: "same-origin"}).status_code == 303
    assert set(site._counts) <= before


def test_one_key_does_not_take_all_live_pages_by_calling_the_server_names(keyed: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_KEY_STREAMS", 1)
    one, other = ({"cookie": f"sluiceway={base64.urlsafe_b64encode(keyed.key('read:*').encode()).decode()}"} for _ in range(2))
    with keyed.http.stream("GET", "/ui/live", headers=one | {"host": "a"}) as first:
        shown = blocks(first)
        assert next(shown)
        with keyed.http.stream("GET", "/ui/live", headers=one | {"host": "b"}) as another:
            assert another.status_code == 429
        with keyed.http.stream("GET", "/ui/live", headers=other | {"host": "a"}) as second:
            assert second.status_code == 200


def test_counts_that_no_page_follows_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(counts, "stopwatch", lambda: now)
    unused = Counts()
    assert not unused.is_over, "its page is about to"
    now = 5.0
    assert unused.is_over


def test_the_form_of_a_stranger_is_not_read(keyed: Guarded) -> None:
    head = "POST /ui/do/queue.pause HTTP/1.1\r\nhost: x\r\nsec-fetch-site: same-origin\r\ncontent-length: 60000\r\n\r\n"
    with keyed.raw(head.encode()) as connection:
        # It is answered, although the form never came.
        assert connection.recv(65_536).startswith(b"HTTP/1.1 303 ")
    answer = keyed.http.post("/ui/sign-in", data={"key": "x" * 5_000}, headers={ORIGIN: "same-origin"})
    assert answer.status_code == 413


def test_a_reader_sees_and_does_what_their_key_may(keyed: Guarded) -> None:
    for name in ("mine", "theirs"):
        keyed.client("manage:*").post("/v1/queues.create", json={"queue_name": name})
    with signed(keyed, "read:mine") as page:
        shown = page.get("/ui").text
        assert "/ui/queues/mine" in shown
        assert "theirs" not in shown
        answer = page.post("/ui/do/queue.pause", data={"queue_name": "mine"})
        assert "manage" in answer.text
        assert 'role="alert"' in answer.text
    assert keyed.client("read:*").post("/v1/queues.info", json={"queue_name": "mine"}).json()["paused"] == []


def test_what_is_done_is_in_the_audit_trail_under_the_readers_name(keyed: Guarded) -> None:
    keyed.client("manage:*").post("/v1/queues.create", json={"queue_name": "audited"})
    with signed(keyed, "manage:audited") as page:
        assert ": done" in page.post("/ui/do/queue.pause", data={"queue_name": "audited"}).text
    entries = keyed.admin.post("/v1/audit.list", json={"queue_name": "audited", "action": "queue.pause"}).json()["items"]
    assert [entry["actor"].split("/")[0] for entry in entries] == ["test"]


def test_a_page_ends_when_the_key_is_revoked(keyed: Guarded) -> None:
    text = keyed.key("read:*")
    with browser(keyed) as page:
        page.post("/ui/sign-in", data={"key": text, "next": "/ui"})
        with page.stream("GET", "/ui/live") as answer:
            shown = blocks(answer)
            next(shown)
            assert keyed.admin.post("/v1/keys.revoke", json={"key_id": text.split("_")[1]}).status_code == 200
            for _ in shown:
                pass
        assert page.get("/ui/live").status_code == 401


def test_pages_end_when_the_server_stops(tmp_path_factory: pytest.TempPathFactory) -> None:
    with guarded(tmp_path_factory.mktemp("stopped") / "data", keys=False) as server, server.http.stream("GET", "/ui/live") as answer:
        shown = blocks(answer)
        next(shown)
        server.stop()
        for _ in shown:
            pass


def test_pages_are_counted_as_what_they_are_whatever_is_in_their_names(server: Running) -> None:
    with server.http.stream("GET", "/ui/live"):
        pass
    server.http.get("/ui/queues/nobody-has-made-it")

    def counted() -> set[str]:
        return set(re.findall(r'sluiceway_http_requests_total\{endpoint="(/ui[^"]*)"', server.http.get("/metrics").text))

    eventually(lambda: counted() == {"/ui", "/ui/live"})
