"""Instances that reach one another over TLS, with certificates of an authority of their own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from sluiceway.adapters.storage.bucket_requests import BucketRequests
from sluiceway.client import Client
from sluiceway.instance.configuration import check, load
from sluiceway.kernel.compatibility import NEWEST
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.configuration import ClusterSettings
from sluiceway.server.run import _membership
from tests.server.server_process import COMMAND, PATIENCE
from tests.server.server_running import eventually
from tests.server.test_tls import Files

FILE = """
[server]
listen = "127.0.0.1:0"
auth = "keys"
tls_certificate = "{certificate}"
tls_key = "{key}"
[cluster]
meta = "sqlite:meta.sqlite"
ca = "{ca}"
[backends.shared]
kind = "sqlite"
path = "shared"
"""


class Instance:
    """`sluiceway serve` with that file; the URL is told once it serves."""

    def __init__(self, folder: Path, name: str) -> None:
        self._log = folder / f"{name}.log"
        command = [*COMMAND, "serve", "--data", str(folder / name), "--config", str(folder / "sluiceway.toml")]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[-1] if self.line else ""

    @property
    def log(self) -> str:
        return self._log.read_text()


@contextlib.contextmanager
def instance(folder: Path, name: str) -> Iterator[Instance]:
    made = Instance(folder, name)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def states(client: Client) -> list[str]:
    return [each.state for each in client.stats("q").partitions]


def configured(folder: Path, ca: Path) -> Files:
    files = Files(folder)
    (folder / "sluiceway.toml").write_text(FILE.format(certificate=files.certificate, key=files.key, ca=ca))
    return files


def first_key(folder: Path) -> str:
    command = [*COMMAND, "key", "create", "root", "--scope", "admin", "--scope", "manage:*", "--scope", "read:*", "--scope", "produce:*"]
    more = ["--data", str(folder / "a"), "--config", str(folder / "sluiceway.toml")]
    return subprocess.run([*command, *more], capture_output=True, text=True, check=True, timeout=PATIENCE).stdout.strip()


def test_two_instances_trust_the_authority_that_they_are_told(tmp_path: Path) -> None:
    files = configured(tmp_path, tmp_path / "ca.pem")
    with instance(tmp_path, "a") as a, instance(tmp_path, "b") as b:
        assert "sluiceway key create NAME --scope admin --data DIR and the --config or --cluster-meta of this server" in a.log
        key = first_key(tmp_path)
        ways = [Client(each.url, api_key=key, ca_file=files.ca_file) for each in (a, b)]
        with contextlib.ExitStack() as stack:
            for client in ways:
                stack.enter_context(client)
            ways[0].create_queue("q", requested_partitions=4)
            # Each has two of them, and asks the other for the rest.
            for client in ways:
                eventually(lambda client=client: states(client) == ["available"] * 4)  # type: ignore[misc]
        assert a.url.startswith("https://")


@pytest.mark.slow
def test_one_that_does_not_know_the_authority_is_told_by_nobody(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    files = configured(tmp_path, stranger)
    with instance(tmp_path, "a") as a, instance(tmp_path, "b"), Client(a.url, api_key=first_key(tmp_path), ca_file=files.ca_file) as client:
        client.create_queue("q", requested_partitions=4)
        eventually(lambda: sorted(states(client)) == ["available"] * 2 + ["unavailable"] * 2)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "ca.pem"
    wrong.write_text("no certificate")
    for path in (wrong, tmp_path / "missing.pem"):
        with pytest.raises(SluicewayError, match=f"cluster.ca: {path} cannot be used") as refused:
            _membership(ClusterSettings(meta="memory:", ca=str(path)), BucketRequests()).open_transport("secret", lambda: NEWEST)
        assert refused.value.field == "cluster.ca"
    file = tmp_path / "sluiceway.toml"
    file.write_text('[cluster]\nca = "missing.pem"\n')
    assert check(load(file)) == [f"cluster.ca: {tmp_path / 'missing.pem'} cannot be read; is it there, and may this user read it?"]
