"""The command line against a server with TLS, API keys and a listener for administrators."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from sluiceway.adapters.lock import DirectoryLock
from sluiceway.instance.api_keys import keys_of
from tests.cli.cli_shell import Shell
from tests.server.server_process import COMMAND, PATIENCE

ADMIN = "an-admin-key-of-the-configuration-0123456789"


@dataclass
class Secure:
    url: str
    admin_url: str
    data: Path
    ca_file: str
    log: Path


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    (folder / "admin").write_text(ADMIN)
    (folder / "sluiceway.toml").write_text('[server]\nadmin_key = "file:admin"\nauth = "none"\n')
    command = [
        *(*COMMAND, "serve", "--data", str(folder / "data"), "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--auth", "keys"),
        *("--config", str(folder / "sluiceway.toml"), "--log-format", "json"),
        *("--tls-certificate", str(folder / "certificate.pem"), "--tls-key", str(folder / "key.pem")),
    ]
    log = folder / "log"
    with log.open("wb") as stream, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("sluiceway listening on https://"), log.read_text()
        (admin,) = [
            entry["event"].split()[-1]
            for entry in map(json.loads, log.read_text().splitlines())
            if "for administrators on" in entry["event"]
        ]
        yield Secure(line.split()[-1], admin, folder / "data", str(folder / "ca.pem"), log)
        server.terminate()
        assert server.wait(PATIENCE) == 0


@pytest.fixture
def shell(secure: Secure, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Shell:
    monkeypatch.setenv("SLUICEWAY_URL", secure.url)
    monkeypatch.setenv("SLUICEWAY_CA_FILE", secure.ca_file)
    return Shell("", monkeypatch, capsysbinary)


def test_without_a_key_it_says_how_to_get_one(shell: Shell) -> None:
    code, _, err = shell.ends("queue", "list")
    assert code == 3
    assert "unauthenticated" in err
    assert "sluiceway key create NAME --scope admin --data DIR" in err


def test_an_unknown_authority_is_3_and_it_says_what_to_do(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICEWAY_CA_FILE")
    code, _, err = shell.ends("queue", "list")
    assert code == 3
    assert "is not trusted" in err
    assert "--ca-file" in err
    assert "fix server: pass the certificate authority" in shell.ends("doctor")[1]


def test_a_call_that_is_only_at_the_other_listener_is_3_and_says_so(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEWAY_API_KEY", ADMIN)
    code, _, err = shell.ends("key", "list")
    assert (code, "(not_found)" in err) == (3, True)
    assert "hint: the server may be older, or serve administration calls only at its admin_listen address" in err


def test_an_empty_list_may_be_the_key_s_doing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICEWAY_API_KEY", ADMIN)
    assert "No queues that this key may read" in shell.ends("queue", "list")[2]


def test_http_to_a_server_with_tls_says_https(shell: Shell, secure: Secure) -> None:
    code, out, _ = shell.ends("doctor", "--url", secure.url.replace("https:", "http:"))
    assert code == 3
    assert "use an https URL" in out


def test_the_first_key_is_made_in_the_data_folder_while_the_server_runs(
    shell: Shell, secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, key, note = shell.ends("key", "create", "root", "--scope", "admin", "--data", str(secure.data))
    assert code == 0, note
    monkeypatch.setenv("SLUICEWAY_API_KEY", key.strip())
    (made,) = shell.json("key", "create", "orders", "--scope", "read:orders-*", "--scope", "manage:orders-*", "--url", secure.admin_url)
    assert made["scopes"] == ["manage:orders-*", "read:orders-*"]
    monkeypatch.setenv("SLUICEWAY_API_KEY", made["key"])
    shell.says("queue", "create", "orders-1")
    code, _, err = shell.ends("queue", "create", "others", "--json")
    assert (code, json.loads(err)["code"]) == (3, "forbidden")
    assert [each["queue_name"] for each in shell.json("queue", "list")] == ["orders-1"]
    assert shell.json("key", "create", "x", "--scope", "read:*", "--data", str(secure.data))[0]["expires_at"] is None
    assert made["key"].rpartition("_")[2] not in secure.log.read_text()


def test_a_context_has_all_that_is_needed(shell: Shell, secure: Secure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLUICEWAY_URL", "SLUICEWAY_CA_FILE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("ADMIN", ADMIN)
    shell.says("context", "add", "secure", "--url", secure.admin_url, "--api-key-env", "ADMIN", "--ca-file", secure.ca_file)
    assert shell.json("key", "list")
    assert ADMIN not in shell.says("context", "list") + shell.says("context", "show", "--json")


def test_doctor_tells_the_scopes_of_a_key(shell: Shell, secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    key = shell.says("key", "create", "doctors", "--scope", "produce:q", "--scope", "read:*", "--data", str(secure.data)).strip()
    for text, said in ((key, "accepted: produce:q, read:*"), (ADMIN, "accepted: admin"), ("slw_aaaaaaaa_bbbb", "rejects this")):
        monkeypatch.setenv("SLUICEWAY_API_KEY", text)
        code, out, _ = shell.ends("doctor", "--json", "--url", secure.admin_url)
        by_name = {each["name"]: each for each in json.loads(out)["checks"]}
        assert said in by_name["key"]["detail"]
        assert text not in out
        assert (code == 0) == (text != "slw_aaaaaaaa_bbbb")
        assert "trusted, until " in by_name["tls"]["detail"]


async def names(data: Path, meta: str) -> list[str]:
    async with keys_of(data, meta) as keys:
        return [each.name for each in await keys.list()]


@pytest.mark.parametrize("said", ["flag", "file", "environment"])
def test_the_first_key_of_a_cluster_is_made_in_its_meta_store(
    said: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    data, meta = tmp_path / "data", f"sqlite:{tmp_path / 'shared.sqlite'}"
    data.mkdir()
    ways: list[str] = []
    if said == "flag":
        ways = ["--cluster-meta", meta]
    elif said == "file":
        (tmp_path / "sluiceway.toml").write_text('[cluster]\nmeta = "sqlite:shared.sqlite"\n')
        ways = ["--config", str(tmp_path / "sluiceway.toml")]
    else:
        monkeypatch.setenv("SLUICEWAY_CLUSTER__META", meta)
    shell = Shell("", monkeypatch, capsysbinary)
    code, key, err = shell.ends("key", "create", "root", "--scope", "admin", "--data", str(data), *ways)
    assert (code, key.startswith("slw_")) == (0, True), err
    assert asyncio.run(names(data, meta)) == ["root"]
    assert not list(data.iterdir())


def test_no_key_is_made_where_no_server_looks(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    shell = Shell("", monkeypatch, capsysbinary)
    DirectoryLock(tmp_path, shared=True).release()
    code, _, err = shell.ends("key", "create", "root", "--scope", "admin", "--data", str(tmp_path))
    assert (code, "--cluster-meta" in err, "server.admin_key" in err) == (3, True, True)
    assert [each.name for each in tmp_path.iterdir()] == ["lock"]
    code, _, err = shell.ends("key", "create", "root", "--scope", "admin", "--cluster-meta", "sqlite:x")
    assert (code, "need --data" in err) == (2, True)
