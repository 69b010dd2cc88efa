"""EtcdMetaStore when etcd dies, hangs, cuts the line at the worst moment, or wants to know who is there; and several endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme

from sluiceway.adapters.meta.etcd import EtcdMetaStore
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import driven
from sluiceway.testing.meta_store_suite import next_hint
from tests.instance.instance_rig import eventually
from tests.server.server_process import closed_port
from tests.servers.etcd_server import EtcdServer, etcd_or_skip
from tests.storage.test_etcd_meta_store import Heard
from tests.storage.test_postgres_faults import Proxy

SECRET = "hunter2/@#"
URL_SECRET = "hunter2%2F%40%23"
numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with etcd_or_skip() as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"faults-{next(numbers)}"


@pytest.mark.parametrize("landed", [True, False])
@driven
async def test_a_commit_whose_line_is_cut_is_unknown(server: EtcdServer, name: str, landed: bool) -> None:
    proxy = Proxy()
    async with proxy.to(server.port) as port:
        store = EtcdMetaStore(server.url(name, port))
        first = await store.commit(puts={"a": b"1"})

        def treat(data: bytes) -> bytes:
            if landed:
                proxy.answers = False
                return data
            proxy.cut()
            return b""

        proxy.treat = treat
        with pytest.raises(MetaUnknownError):
            await store.commit(puts={"a": b"2"})
        proxy.treat, proxy.answers = bytes, True
        view = await store.read(["a"])
        assert view.entries["a"].value == (b"2" if landed else b"1")
        assert (view.stamp > first) == landed
        await store.close()


@driven
async def test_a_server_that_is_gone_and_comes_back(server: EtcdServer, name: str) -> None:
    store = EtcdMetaStore(server.url(name), poll_interval=50)
    watching = store.watch("a")
    first = await store.commit(puts={"a": b"1"})
    await next_hint(watching, first)
    waiting = asyncio.create_task(next_hint(watching, first + 1))
    await asyncio.to_thread(server.kill)
    with pytest.raises(StoreUnavailableError, match="does not answer"):
        await store.read(["a"])
    with pytest.raises(MetaUnknownError, match="does not answer"):
        await store.commit(puts={"a": b"2"})
    await asyncio.to_thread(server.start)
    # What was acknowledged is there, and what was not is not, as nothing was sent.
    assert (await store.read(["a"])).entries["a"] == (b"1", first)
    stamp = await store.commit({"a": first}, puts={"a": b"3"})
    assert await waiting >= stamp
    await store.close()


@driven
async def test_a_hung_server_is_given_up_on(server: EtcdServer, name: str) -> None:
    patient = EtcdMetaStore(server.url(name))
    store = EtcdMetaStore(server.url(name), request_timeout=500, poll_interval=200)
    first = await patient.commit(puts={"a": b"1"})
    watching = store.watch("a")
    await next_hint(watching, first)
    waiting = asyncio.create_task(next_hint(watching, first + 1))
    await asyncio.to_thread(server.pause)
    try:
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            await store.read(["a"])
        with pytest.raises(MetaUnknownError):
            await store.commit(puts={"a": b"2"})
    finally:
        await asyncio.to_thread(server.resume)
    assert (await patient.read(["a"])).entries["a"].value in (b"1", b"2")
    stamp = await patient.commit(puts={"a": b"3"})
    # The commit that nobody knew of may have landed, and be what it wakes for.
    if (hint := await waiting) < stamp:
        await next_hint(watching, stamp)
    assert hint > first
    await patient.close()
    await store.close()


class Muffled(Proxy):
    """One whose lines can be made to carry no answers any more, but stay open."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0

    def muffle(self) -> None:
        """Those that there are now."""
        self._age += 1

    async def _responses(self, answers: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        age = self._age
        with contextlib.closing(to_client):
            while data := await answers.read(1 << 20):
                if self._age == age:
                    to_client.write(data)


@driven
async def test_a_watch_whose_line_dies_silently_takes_another(server: EtcdServer, name: str) -> None:
    proxy = Muffled()
    other = EtcdMetaStore(server.url(name))
    async with proxy.to(server.port) as port:
        store = EtcdMetaStore(server.url(name, port), poll_interval=500)
        stamp = await other.commit(puts={"a": b"1"})
        watching = store.watch("a")
        await next_hint(watching, stamp)
        waiting = asyncio.create_task(next_hint(watching, stamp + 1))
        stamp = await other.commit(puts={"a": b"2"})
        assert await waiting >= stamp
        waiting = asyncio.create_task(next_hint(watching, stamp + 1))
        proxy.muffle()
        stamp = await other.commit(puts={"a": b"3"})
        assert await waiting >= stamp
        await store.close()
    await other.close()


@driven
async def test_whoever_waits_for_the_stream_only_is_woken_by_it(server: EtcdServer, name: str) -> None:
    one, two = (EtcdMetaStore(server.url(name), poll_interval=86_400_000) for _ in range(2))
    stamp = await two.commit(puts={"a": b"1"})
    watching = one.watch("a")
    await next_hint(watching, stamp)
    for number in range(5):
        waiting = asyncio.create_task(next_hint(watching, stamp + 1))
        stamp = await two.commit(puts={"a": b"%d" % number} if number % 2 else {}, deletes=[] if number % 2 else ["a"])
        assert await waiting >= stamp
    await one.close()
    await two.close()


@driven
async def test_a_watch_that_takes_a_new_stream_shows_nothing_twice(server: EtcdServer, name: str) -> None:
    store = EtcdMetaStore(server.url(name), poll_interval=100)
    watching, heard = store.watch("a"), Heard(store)
    first = await store.commit(puts={"a": b"1"})
    await next_hint(watching, first)
    waiting = asyncio.ensure_future(anext(watching))
    await eventually(lambda: heard.streams > 1)
    second = await store.commit(puts={"a": b"2"})
    assert await waiting == second
    waiting = asyncio.ensure_future(anext(watching))
    seen = heard.streams
    await eventually(lambda: heard.streams > seen + 3)
    assert not waiting.done()
    assert await store.commit(puts={"a": b"3"}) == await waiting
    await store.close()


@driven
async def test_a_watch_whose_beginning_is_compacted_goes_on(server: EtcdServer, name: str) -> None:
    store = EtcdMetaStore(server.url(name), poll_interval=100)
    watching, heard = store.watch("a"), Heard(store)
    first = await store.commit(puts={"a": b"1"})
    await next_hint(watching, first)
    waiting = asyncio.ensure_future(anext(watching))
    await eventually(lambda: heard.anything.is_set())
    server.put("others", b"")
    await asyncio.to_thread(server.compact)
    await eventually(lambda: heard.canceled > 0)
    stamp = await store.commit(puts={"a": b"2"})
    assert await waiting == stamp
    await store.close()


# ---- several endpoints ------------------------------------------------------------------------------------------------


@driven
async def test_an_endpoint_that_refuses_is_passed_over(server: EtcdServer, name: str) -> None:
    with closed_port() as port:
        url = f"etcd://127.0.0.1:{port},127.0.0.1:{server.port}/{name}"
        store = EtcdMetaStore(url)
        first = await store.commit(puts={"a": b"1"})
        # Also where what is refused is the commit itself: nothing has been sent.
        store._etcd._endpoints.reverse()
        first = await store.commit({"a": first}, puts={"a": b"2"})
        assert (await store.read(["a"])).stamp == first
        await store.close()
        reader = EtcdMetaStore(url)
        assert (await reader.read(["a"])).stamp == first
        await reader.close()


@driven
async def test_a_read_goes_on_to_the_next_endpoint_and_a_commit_that_was_sent_does_not(server: EtcdServer, name: str) -> None:
    proxy = Proxy()
    async with proxy.to(server.port) as port:
        store = EtcdMetaStore(f"etcd://127.0.0.1:{port},127.0.0.1:{server.port}/{name}")
        first = await store.commit(puts={"a": b"1"})

        def cut(data: bytes) -> bytes:
            proxy.cut()
            return b""

        proxy.treat = cut
        with pytest.raises(MetaUnknownError):
            await store.commit(puts={"a": b"2"})
        # From now on the other one is asked first.
        assert (await store.commit({"a": first}, puts={"a": b"3"})) > first
        await store.close()
        reader = EtcdMetaStore(f"etcd://127.0.0.1:{port},127.0.0.1:{server.port}/{name}")
        assert (await reader.read(["a"])).entries["a"].value == b"3"
        await reader.close()


@driven
async def test_a_watch_leaves_an_endpoint_that_hangs(server: EtcdServer, name: str) -> None:
    reached = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            reached.set()
            while await reader.read(1 << 16):
                pass

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with hanging:
        port = hanging.sockets[0].getsockname()[1]
        url = f"etcd://127.0.0.1:{server.port},127.0.0.1:{port}/{name}"
        store, other = EtcdMetaStore(url, request_timeout=1_000, poll_interval=100), EtcdMetaStore(server.url(name))
        watching = store.watch("a")
        stamp = await other.commit(puts={"a": b"1"})
        await next_hint(watching, stamp)
        waiting = asyncio.create_task(next_hint(watching, stamp + 1))
        store._etcd._endpoints.reverse()
        await reached.wait()
        stamp = await other.commit(puts={"a": b"2"})
        assert await waiting >= stamp
        await store.close()
        await other.close()


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """A server that gives that answer to everything; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read(1 << 16)
            writer.write(answer)
            await writer.drain()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope", "is not etcd 3.4"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnope", "did not answer like an etcd server"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "did not answer like an etcd server"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"token":"\xe4"}', "did not answer like an etcd server"),
        (b'HTTP/1.1 502 Bad\r\nContent-Length: 16\r\n\r\n{"message":"\xe4 "}', "is not etcd 3.4"),
        (b"SSH-2.0-something\r\n", "does not answer"),
    ],
)
@driven
async def test_who_is_no_etcd_is_told_from_one(answer: bytes, says: str) -> None:
    async with answering(answer) as port:
        store = EtcdMetaStore(f"etcd://user:{URL_SECRET}@127.0.0.1:{port}")
        with pytest.raises(StoreUnavailableError, match=says) as read:
            await store.read(["a"])
        with pytest.raises(MetaUnknownError, match=says) as commit:
            await store.commit(puts={"a": b"1"})
        assert "hunter2" not in f"{read.value!r}{commit.value!r}"
        await store.close()


def test_what_etcd_says_comes_with_what_to_do() -> None:
    async def story(server: EtcdServer) -> None:
        store = EtcdMetaStore(server.url("small"))
        await store.commit(puts={"a": b"1"})
        with pytest.raises(MetaUnknownError, match=r"too many operations.*--max-txn-ops \(128\)"):
            await store.commit(dict.fromkeys(map(str, range(20))))
        with pytest.raises(MetaUnknownError, match=r"too large.*--max-request-bytes \(1572864\)"):
            await store.commit(puts={"a": bytes(20_000)})
        assert (await store.read(["a"])).entries["a"].value == b"1"
        await store.close()

    with etcd_or_skip("--max-txn-ops", "10", "--max-request-bytes", "10000") as server:
        asyncio.run(asyncio.wait_for(story(server), 120))


# ---- who is there -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdServer, Path]]:
    """An etcd with TLS and passwords, and the certificate of its authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    with etcd_or_skip(certificate={"--cert-file": folder / "cert.pem", "--key-file": folder / "key.pem"}) as server:
        server.demand_passwords("us er", SECRET)
        yield server, folder / "ca.pem"


@driven
async def test_tls_and_a_password(secured: tuple[EtcdServer, Path]) -> None:
    server, authority = secured
    store = EtcdMetaStore(f"etcds://us%20er:{URL_SECRET}@127.0.0.1:{server.port}/tls?ca_file={authority}")
    watching = store.watch("a")
    first = await store.commit(puts={"a": b"1"})
    assert await next_hint(watching, first) >= first
    assert (await store.read(["a"])).entries == {"a": (b"1", first)}
    await store.close()


@pytest.mark.parametrize("needed_for", ["read", "commit", "watch"])
@driven
async def test_whose_token_has_run_out_logs_in_again(secured: tuple[EtcdServer, Path], needed_for: str) -> None:
    server, authority = secured
    url = f"etcds://us%20er:{URL_SECRET}@127.0.0.1:{server.port}/{needed_for}?ca_file={authority}"
    store, other = EtcdMetaStore(url, poll_interval=50), EtcdMetaStore(url)
    first = await store.commit(puts={"a": b"1"})
    watching = store.watch("a")
    waiting = asyncio.create_task(next_hint(watching, first + 1))
    await asyncio.sleep(0)
    store._etcd._token = "expired.1"
    if needed_for == "read":
        assert (await store.read(["a"])).stamp == first
    if needed_for == "commit":
        assert await store.commit({"a": first}, puts={"a": b"2"}) > first
    last = await other.commit(puts={"a": b"3"})
    if (hint := await waiting) < last:
        await next_hint(watching, last)
    assert hint > first
    assert store._etcd._token != "expired.1"
    await store.close()
    await other.close()


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ("us%20er:hunter2", "authentication failed"),
        (f"nobody:{URL_SECRET}", "authentication failed"),
        ("", "put the user and the password into the URL"),
    ],
)
@driven
async def test_who_is_not_let_in_learns_why(secured: tuple[EtcdServer, Path], user: str, says: str) -> None:
    server, authority = secured
    store = EtcdMetaStore(f"etcds://{user}{'@' if user else ''}127.0.0.1:{server.port}/tls?ca_file={authority}")
    with pytest.raises(StoreUnavailableError, match=says) as read:
        await store.read(["a"])
    with pytest.raises(MetaUnknownError, match=says) as commit:
        await store.commit(puts={"a": b"1"})
    assert "hunter2" not in f"{read.value!r}{commit.value!r}{store!r}{vars(store)!r}"
    await store.close()


@driven
async def test_a_certificate_of_an_unknown_authority_is_not_trusted(secured: tuple[EtcdServer, Path]) -> None:
    store = EtcdMetaStore(f"etcds://us%20er:{URL_SECRET}@127.0.0.1:{secured[0].port}/tls")
    with pytest.raises(StoreUnavailableError, match="certificate verify failed"):
        await store.read(["a"])
    await store.close()


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(SluicewayError, match="cannot be read as PEM"):
        EtcdMetaStore(f"etcds://host?ca_file={tmp_path / 'text'}")


@driven
async def test_a_password_where_none_is_asked_for(server: EtcdServer, name: str) -> None:
    store = EtcdMetaStore(f"etcd://user:{URL_SECRET}@127.0.0.1:{server.port}/{name}")
    with pytest.raises(StoreUnavailableError, match="authentication is not enabled"):
        await store.read()
    await store.close()
