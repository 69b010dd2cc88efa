from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
import trustme
import uvicorn

from sluiceway.client import AsyncClient, CallError, Client
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.app import create_app
from sluiceway.server.connections import Connection
from sluiceway.server.listeners import bind
from sluiceway.server.tls import TlsFiles
from tests.server.fake_service import FakeService
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually


class Files:
    """A certificate for localhost and its key, as files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.certificate, self.key, self.ca_file = folder / "certificate.pem", folder / "key.pem", folder / "ca.pem"
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(str(self.ca_file))
        self.renew()

    def renew(self) -> bytes:
        """Write another certificate; what it is on the wire."""
        made = self.authority.issue_cert("localhost", "127.0.0.1")
        self.key.write_bytes(made.private_key_pem.bytes())
        self.certificate.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        return ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode())

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))

    def tls(self) -> TlsFiles:
        return TlsFiles(self.certificate, self.key)

    def connect(self, port: int) -> ssl.SSLSocket:
        return self.context().wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE), server_hostname="localhost")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@contextmanager
def serving(tls: TlsFiles) -> Iterator[int]:
    """The port of a server with that context, until the block ends."""
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(cast(Service, FakeService())),
        http=Connection,
        lifespan="off",
        log_config=None,
        ssl_context_factory=lambda *_: tls.context,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), name="server")
    thread.start()
    try:
        eventually(lambda: server.started)
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def livez(connection: ssl.SSLSocket) -> bytes:
    connection.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b'{"alive":true}'):
        part = connection.recv(65_536)
        assert part, answer
        answer += part
    return answer


def test_new_connections_get_a_new_certificate_and_old_ones_go_on(files: Files) -> None:
    tls = files.tls()
    with serving(tls) as port, files.connect(port) as before:
        first = before.getpeercert(binary_form=True)
        livez(before)
        second = files.renew()
        livez(before)
        with files.connect(port) as still:
            assert still.getpeercert(binary_form=True) == first
        tls.reload()
        with files.connect(port) as after:
            assert after.getpeercert(binary_form=True) == second != first
            assert livez(after).startswith(b"HTTP/1.1 200 ")
        assert livez(before).startswith(b"HTTP/1.1 200 ")


def test_a_wrong_pair_changes_nothing(files: Files, tmp_path: Path) -> None:
    tls = files.tls()
    other = Files(tmp_path / "other")
    with serving(tls) as port:
        with files.connect(port) as connection:
            served = connection.getpeercert(binary_form=True)
        kept, good = files.key.read_bytes(), files.certificate.read_bytes()
        for certificate, key in ((good, other.key.read_bytes()), (other.certificate.read_bytes(), kept), (good, b""), (b"", kept)):
            files.certificate.write_bytes(certificate)
            files.key.write_bytes(key)
            with pytest.raises(SluicewayError):
                tls.reload()
            with files.connect(port) as connection:
                assert connection.getpeercert(binary_form=True) == served
                livez(connection)


def test_the_client_trusts_the_file_that_it_is_given(files: Files, tmp_path: Path) -> None:
    with serving(files.tls()) as port:
        with Client(f"https://localhost:{port}", ca_file=files.ca_file) as client:
            assert [queue.queue_name for queue in client.list_queues().items] == ["q"]
        with httpx.Client(verify=Files(tmp_path / "other").context()) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            stranger.get(f"https://localhost:{port}/livez")


def test_a_client_that_does_not_trust_the_certificate_says_so_at_once(files: Files, tmp_path: Path) -> None:
    other = Files(tmp_path / "other").ca_file
    with serving(files.tls()) as port:
        url = f"https://localhost:{port}"

        async def list_queues() -> None:
            async with AsyncClient(url, ca_file=other, retry_for="5s") as client:
                await client.list_queues()

        with Client(url, ca_file=other, retry_for="5s") as client:
            for use in (client.list_queues, lambda: asyncio.run(list_queues()), lambda: client.consumer("q").run(print)):
                with pytest.raises(CallError, match=f"the certificate of {url} is not trusted: .* private CA with ca_file") as raised:
                    use()
                assert (raised.value.code, raised.value.retryable) == ("unavailable", False)


def test_versions_before_1_2_are_not_spoken(files: Files) -> None:
    assert files.tls().context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_missing_file_is_named(files: Files) -> None:
    files.key.unlink()
    with pytest.raises(SluicewayError, match=r"server\.tls_key: .*key\.pem cannot be read: No such file") as caught:
        files.tls()
    assert caught.value.field == "server.tls_key"
    files.certificate.unlink()
    with pytest.raises(SluicewayError, match=r"certificate\.pem cannot be read") as caught:
        files.tls()
    assert caught.value.field == "server.tls_certificate"


def test_a_key_of_another_certificate(files: Files, tmp_path: Path) -> None:
    files.key.write_bytes(Files(tmp_path / "other").key.read_bytes())
    with pytest.raises(SluicewayError, match=r"key\.pem is not the private key of the certificate in .*certificate\.pem") as caught:
        files.tls()
    assert caught.value.field == "server.tls_key"


def test_files_that_were_taken_for_each_other(files: Files) -> None:
    with pytest.raises(SluicewayError, match=r"key\.pem has no certificate in PEM form"):
        TlsFiles(files.key, files.certificate)


@pytest.mark.parametrize("name", ["certificate", "key"])
def test_a_damaged_file_is_named_and_not_shown(files: Files, name: str) -> None:
    path: Path = getattr(files, name)
    lines = path.read_text().splitlines()
    lines[1] = "AAAA" + lines[1][4:]
    path.write_text("\n".join(lines))
    with pytest.raises(SluicewayError, match=rf"{name}\.pem is damaged or not supported by OpenSSL") as caught:
        files.tls()
    assert caught.value.field == f"server.tls_{name}"
    assert lines[1] not in str(caught.value)


def test_an_encrypted_key_is_refused_rather_than_asked_for(files: Files) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    form, secret = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"hunter2")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    with pytest.raises(SluicewayError, match=r"key\.pem is encrypted; use a key without a password"):
        files.tls()
