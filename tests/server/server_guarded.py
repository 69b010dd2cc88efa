"""A real server that asks for API keys, as `server_running` has one that does not."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import trustme
import uvloop

from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.server.app import App
from sluiceway.server.listeners import bind, url_of
from sluiceway.server.run import Server
from sluiceway.server.tls import TlsFiles
from sluiceway.server.wiring import Assembly, Door
from tests.server.server_process import PATIENCE
from tests.server.server_running import Running

ADMIN_KEY = "only-for-tests-0123456789abcdef0123456789"


class Guarded(Running):
    """`http` has no key; `with_key` makes clients that have one. `admin` has the configured one. `ca_file` is empty without TLS."""

    app: App

    def with_key(self, text: str) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=PATIENCE, headers={"authorization": f"Bearer {text}"}, verify=self._verify)
        self.clients.append(client)
        return client

    def key(self, *scopes: str, **fields: object) -> str:
        """The text of a new key."""
        answer = self.admin.post("/v1/keys.create", json={"name": "test", "scopes": scopes, **fields})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["key"])

    def client(self, *scopes: str, **fields: object) -> httpx.Client:
        return self.with_key(self.key(*scopes, **fields))

    def __init__(self, service: Service, server: Server, url: str, ca_file: str) -> None:
        self._verify = ssl.create_default_context(cafile=ca_file) if ca_file else True
        super().__init__(service, server, url, self._verify)
        self.ca_file = ca_file
        self.clients: list[httpx.Client] = [self.http]
        self.admin = self.with_key(ADMIN_KEY)


def certified(folder: Path) -> tuple[TlsFiles, str]:
    """A certificate for this machine, and the file of the authority that made it."""
    folder.mkdir()
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    made.private_key_pem.write_to_path(str(folder / "key.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return TlsFiles(folder / "certificate.pem", folder / "key.pem"), str(folder / "ca.pem")


@contextmanager
def guarded(data: Path, *, secure: bool = False, keys: bool = True, new_queues: str = "plain") -> Iterator[Guarded]:
    """All that a server process serves from that data directory, for callers with a key, until the block ends.

    `secure`: over TLS. Not `keys`: for everybody. `new_queues`: as in the server's configuration.
    """
    ready = threading.Event()
    tls, ca_file = certified(data.with_name(f"{data.name}-tls")) if secure else (None, "")
    sock = bind("127.0.0.1", 0)
    service = Service(data)
    loaded = load(environment={"ADMIN": ADMIN_KEY}, flags={"server.admin_key": "env:ADMIN", "server.new_queues": new_queues})
    made: list[Guarded] = []

    async def life() -> None:
        await service.start()
        assembly = Assembly(service, loaded, Door(keys=keys, tls=tls))
        await assembly.start()
        server = Server(assembly.app, ready.set, tls=tls)
        made.append(Guarded(service, server, url_of(sock, secure), ca_file))
        made[0].app = assembly.app
        try:
            await server.serve([sock])
        finally:
            await assembly.stop()
            await service.stop()

    def thread() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(life())

    running = threading.Thread(target=thread, name="server")
    running.start()
    try:
        assert ready.wait(PATIENCE)
        made[0].thread = running
        yield made[0]
    finally:
        for served in made:
            for client in served.clients:
                client.close()
            served.stop()
        running.join(PATIENCE)
        assert not running.is_alive()
