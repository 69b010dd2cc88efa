"""A real server whose configuration changes while it is used."""

from __future__ import annotations

import base64
import os
import re
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.server.server_process import COMMAND, PATIENCE
from tests.server.server_running import eventually

SECRET = "hunter2-hunter2-hunter2-hunter2-hunter2"
ONE = "[backends.default]\nkind = 'sqlite'\n"
TWO = ONE + "[backends.second]\nkind = 'sqlite'\n"


class Child:
    """`sluiceway serve` on a folder with a configuration file."""

    def __init__(self, folder: Path, text: str, *flags: str, **environment: str) -> None:
        self.file, self.log = folder / "sluiceway.toml", folder / "log"
        self.file.write_text(text)
        command = [*COMMAND, "serve", "--data", str(folder / "data"), "--config", str(self.file), "--listen", "127.0.0.1:0", *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("sluiceway listening on "), self.log.read_text()
        self.url = line.split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)

    def post(self, call: str, **fields: object) -> httpx.Response:
        return self.http.post(f"/v1/{call}", json=fields)

    def ask(self, call: str, **fields: object) -> Any:
        answer = self.post(call, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def admin(self, verify: ssl.SSLContext | bool = False) -> httpx.Client:
        """A client of the listener for administrators."""
        found = re.search(r"listening for administrators on (http\S+)", self.log.read_text())
        assert found is not None
        return httpx.Client(base_url=found[1], timeout=PATIENCE, verify=verify)


@contextmanager
def child(folder: Path, text: str = ONE, *flags: str, **environment: str) -> Iterator[Child]:
    server = Child(folder, text, *flags, **environment)
    try:
        yield server
    finally:
        server.http.close()
        server.process.terminate()
        server.process.communicate(timeout=PATIENCE)


class Load:
    """Threads that produce, lease and complete until they are told to stop. Whatever is refused ends them, and the test."""

    def __init__(self, url: str, queue_name: str, producers: int = 2, consumers: int = 2) -> None:
        self.produced: set[str] = set()
        self.completed: list[str] = []
        self._url, self._queue_name = url, queue_name
        self._stop, self._produced_all = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(producers + consumers)
        self._producers = [self._pool.submit(self._produce, number) for number in range(producers)]
        self._consumers = [self._pool.submit(self._consume, number) for number in range(consumers)]

    def _each(self, work: Callable[[Callable[..., Any]], bool]) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as http:

            def ask(call: str, **fields: object) -> Any:
                answer = http.post(f"/v1/queue.{call}", json={"queue_name": self._queue_name, **fields})
                assert answer.status_code == 200, answer.text
                return answer.json()

            while work(ask):
                pass

    def _produce(self, producer: int) -> None:
        count = 0

        def work(ask: Callable[..., Any]) -> bool:
            nonlocal count
            texts = [f"{producer}-{count}-{number}" for number in range(10)]
            assert ask("produce", items=[{"utf8": text} for text in texts])["count"] == 10
            self.produced.update(texts)
            count += 1
            return not self._stop.is_set()

        self._each(work)

    def _consume(self, consumer: int) -> None:
        def work(ask: Callable[..., Any]) -> bool:
            last = self._produced_all.is_set()
            leased = ask("lease", client_id=f"c{consumer}", batch_size=50, max_partitions=10, request_timeout="100ms")
            if leased["leases"]:
                done = ask("complete", lease_ids=[lease["lease_id"] for lease in leased["leases"]])
                assert done["ignored"] == []
                self.completed += [item["bytes"] for item in leased["items"]]
            return bool(leased["leases"]) or not last

        self._each(work)

    def more(self, items: int = 100) -> None:
        """Wait until so many more were completed."""
        until = len(self.completed) + items
        eventually(lambda: len(self.completed) >= until or any(each.done() for each in [*self._producers, *self._consumers]))
        assert not any(each.done() for each in [*self._producers, *self._consumers]), "refused"

    def end(self) -> None:
        """Complete what is left. Raises what any of the threads has met."""
        self._stop.set()
        for producer in self._producers:
            producer.result(PATIENCE)
        self._produced_all.set()
        for consumer in self._consumers:
            consumer.result(PATIENCE)
        self._pool.shutdown()

    def close(self) -> None:
        self._stop.set()
        self._produced_all.set()
        self._pool.shutdown()


def test_backends_come_and_affinities_change_under_load_without_one_error(tmp_path: Path) -> None:
    with child(tmp_path) as server:
        server.ask("queues.create", queue_name="q", requested_partitions=3)
        load = Load(server.url, "q")
        try:
            load.more()
            server.file.write_text(TWO)
            server.ask("config.reload")
            load.more()
            new = server.ask("queues.create", queue_name="new", requested_partitions=2)
            assert [each["backend"] for each in new["partitions"]] == ["default", "second"]
            other = Load(server.url, "new")
            try:
                other.more()
                server.file.write_text(TWO.replace("[backends.second]", "partition_affinity = 0\nwrite_timeout = '9s'\n[backends.second]"))
                server.ask("config.reload")
                last = server.ask("queues.create", queue_name="last", requested_partitions=2)
                assert [each["backend"] for each in last["partitions"]] == ["second", "second"]
                server.file.write_text(ONE)
                refused = server.post("config.reload").json()
                assert (refused["status"], refused["code"], refused["field"]) == (409, "restart_required", "backends.second")
                other.more()
                other.end()
            finally:
                other.close()
            load.more()
            load.end()
        finally:
            load.close()
        for each in (load, other):
            assert sorted(base64.b64decode(item).decode() for item in each.completed) == sorted(each.produced)
        assert [entry["detail"]["changed"] for entry in server.ask("audit.list", action="config.reload")["items"]] == [
            ["backends.default.partition_affinity", "backends.default.write_timeout"],
            ["backends.second"],
        ]
        assert {each["backend"]: each["partitions"] for each in server.ask("backends.list")["items"]} == {"default": 4, "second": 3}
        assert server.http.get("/readyz").json() == {"ready": True, "problems": []}


def test_a_signal_has_it_read_again(tmp_path: Path) -> None:
    secret = tmp_path / "admin.key"
    secret.write_text(SECRET)
    with child(tmp_path, "[server]\nauth = 'none'\nadmin_key = 'file:admin.key'\n") as server:
        # The file watch does not look at this one, so it cannot be quicker.
        secret.write_text(f"other-{SECRET}")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: server.ask("config.show")["last_error"])
        assert "server.admin_key: takes effect at a restart" in server.ask("config.show")["last_error"]["detail"]
        assert SECRET not in server.log.read_text()


def test_a_changed_file_is_read_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    with child(tmp_path, ONE, SLUICEWAY_LIMITS__BYTES_PER_SECOND="7") as server:

        def shown() -> Any:
            return server.ask("config.show")

        def rate() -> object:
            return shown()["configuration"]["limits"]["requests_per_second"]

        server.file.write_text("[limits]\nrequests_per_second = 2\n" + ONE)
        eventually(lambda: rate() == {"value": 2, "origin": "sluiceway.toml:2", "restart": False})
        server.file.write_text("[limits]\nrequests_per_second = -1\n" + ONE)
        eventually(lambda: shown()["last_error"])
        assert "limits.requests_per_second: expected an integer, at least 0 (sluiceway.toml:2)" in shown()["last_error"]["detail"]
        assert rate() == {"value": 2, "origin": "sluiceway.toml:2", "restart": False}
        assert shown()["configuration"]["limits"]["bytes_per_second"]["origin"] == "SLUICEWAY_LIMITS__BYTES_PER_SECOND"
        assert shown()["configuration"]["server"]["listen"]["origin"] == "--listen"
        refused = server.post("config.reload")
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
        assert shown()["file"] == str(server.file)
        server.file.write_text(ONE)
        server.ask("config.reload")
        assert shown()["last_error"] is None
        assert rate() == {"value": 0, "origin": "default", "restart": False}


def test_what_is_for_administrators_is_on_their_listener_only(tmp_path: Path) -> None:
    with (
        child(tmp_path, ONE, "--admin-listen", "127.0.0.1:0") as server,
        server.admin() as admin,
    ):
        paths = server.http.get("/openapi.json").json()["paths"]
        for_admins = {path for path, item in paths.items() if item.get("post", {}).get("x-required-action") == "admin"}
        assert {"/v1/config.reload", "/v1/config.show", "/v1/backends.list", "/v1/keys.create", "/v1/audit.list"} <= for_admins
        for path in for_admins:
            refused = server.http.post(path, json={})
            assert (refused.status_code, refused.json()["code"]) == (404, "not_found"), path
            assert admin.post(path, json={}).status_code != 404, path
        assert server.http.get("/metrics").status_code == 404
        assert admin.get("/metrics").status_code == 200
        for client in (server.http, admin):
            assert client.get("/readyz").status_code == client.get("/livez").status_code == 200
            assert client.post("/v1/queues.list", json={}).status_code == 200


def test_keys_are_asked_for_when_that_is_said_and_secrets_stay_in(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text(SECRET)
    with child(tmp_path, "[server]\nauth = 'keys'\nadmin_key = 'file:admin.key'\n[log]\nlevel = 'debug'\n") as server:
        assert server.post("queues.list").status_code == 401
        server.http.headers["authorization"] = f"Bearer {SECRET}"
        key = server.ask("keys.create", name="reader", scopes=["read:*"], requests_per_second=0)["key"]
        as_reader = {"authorization": f"Bearer {key}"}
        assert server.http.post("/v1/queues.list", json={}, headers=as_reader).status_code == 200
        assert server.http.post("/v1/config.show", json={}, headers=as_reader).status_code == 403
        shown = server.post("config.show")
        assert shown.json()["configuration"]["server"]["admin_key"] == {"value": "***", "origin": "sluiceway.toml:3", "restart": True}
        (tmp_path / "admin.key").write_text(f"other-{SECRET}")
        refused = server.post("config.reload")
        assert (refused.status_code, refused.json()["code"], refused.json()["field"]) == (409, "restart_required", "server.admin_key")
        said = shown.text + refused.text + server.post("config.show").text + server.post("audit.list").text
    assert SECRET not in said + server.log.read_text()


@pytest.mark.parametrize("flags", [(), ("--admin-listen", "127.0.0.1:0")])
def test_tls_and_a_certificate_that_is_renewed(tmp_path: Path, flags: tuple[str, ...]) -> None:
    authority = trustme.CA()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)

    def issue() -> None:
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
        (tmp_path / "cert.pem").write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))

    def serial() -> str:
        address = httpx.URL(server.url)
        return ssl.get_server_certificate((address.host, address.port or 0))

    issue()
    with child(tmp_path, "[server]\ntls_certificate = 'cert.pem'\ntls_key = 'key.pem'\n", *flags) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=trust, timeout=PATIENCE) as http:
            assert http.get("/livez").json() == {"alive": True}
            before = serial()
            issue()
            # Nobody says so.
            eventually(lambda: serial() != before)
            assert http.get("/livez").json() == {"alive": True}
        if flags:
            with server.admin(trust) as admin:
                assert admin.post("/v1/config.show", json={}).json()["last_error"] is None
