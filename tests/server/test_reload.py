"""Reading the configuration again: what is wrong changes nothing and says why, and files that change are noticed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.configuration import Configuration
from sluiceway.server import reload as reload_module
from sluiceway.server.reload import Reloader, Stillness
from sluiceway.server.tls import TlsFiles
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, spec
from tests.server.test_tls import Files

BY = Actor("somebody", "request-1")
SECRET = "hunter2"


class Rig:
    """A service with a file, and what was applied to it."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.file = folder / "sluiceway.toml"
        if not self.file.exists():
            self.file.write_text("")
        self.environment = environment if environment is not None else {}
        loaded = load(self.file, self.environment)
        server = loaded.configuration.server
        self.tls = TlsFiles(Path(server.tls_certificate), Path(server.tls_key)) if server.tls_certificate else None
        self.service = Service(folder / "data", loaded.configuration.backends)
        self.applied: list[Configuration] = []
        self.reloader = Reloader(loaded, self.service, self.applied.append, self.tls)

    async def reload(self, text: str) -> list[str]:
        self.file.write_text(text)
        return await self.reloader.reload(BY)

    async def refused(self, text: str) -> SluicewayError:
        with pytest.raises(SluicewayError) as caught:
            await self.reload(text)
        assert self.reloader.last_error is not None
        assert self.reloader.last_error.detail == caught.value.detail
        return caught.value


@contextlib.asynccontextmanager
async def rig(folder: Path, environment: dict[str, str] | None = None) -> AsyncIterator[Rig]:
    rig = Rig(folder, environment)
    await rig.service.start()
    try:
        yield rig
    finally:
        await rig.service.stop()


@driven
async def test_what_has_changed_is_applied_and_audited(tmp_path: Path) -> None:
    async with rig(tmp_path) as on:
        began = on.reloader.applied_at
        assert await on.reload("[limits]\nrequests_per_second = 3\n[log]\nlevel = 'debug'\n") == ["log.level", "limits.requests_per_second"]
        assert on.applied == [on.reloader.loaded.configuration]
        assert on.applied[0].limits.requests_per_second == 3
        assert on.reloader.applied_at >= began
        (entry,) = await on.service.audit.list(10)
        assert (entry.action, entry.actor, entry.request_id) == ("config.reload", "somebody", "request-1")
        assert entry.detail == {"changed": ["log.level", "limits.requests_per_second"]}
        assert await on.reloader.reload(BY) == []
        assert len(on.applied) == len(await on.service.audit.list(10)) == 1


@driven
async def test_a_file_that_is_wrong_changes_nothing_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(tmp_path, {"ADMIN": SECRET}) as on:
        before = on.reloader.loaded
        good = "[limits]\nrequests_per_second = 3\n[backends.default]\nkind = 'sqlite'\n[backends.b]\nkind = 'sqlite'\n"
        for wrong, code, named in (
            ("[limits", "invalid_request", "sluiceway.toml is not TOML"),
            (good + "paht = 'x'", "invalid_request", "backends.b: unknown key `paht` (sluiceway.toml:7)"),
            (good + "write_timeout = 3", "invalid_request", "backends.b.write_timeout: expected a duration"),
            (good + "[server]\nlisten = ':1'", "restart_required", "server.listen: takes effect at a restart"),
            (good + "[server]\nadmin_key = 'env:ADMIN'", "restart_required", "server.admin_key"),
            (good + f"[server]\nadmin_key = '{SECRET}'", "invalid_request", "server.admin_key: expected env:NAME or file:PATH"),
            (good + "[backends.c]\nkind = 'sqlite'\npath = 'sluiceway.toml'", "invalid_request", "backends.c: it cannot be used"),
        ):
            error = await on.refused(wrong)
            assert (error.code, named in error.detail) == (code, True), error.detail
        assert on.reloader.loaded is before
        assert on.applied == []
        assert [info.name for info in on.service.backends()] == ["default"]
        assert await on.service.audit.list(10) == []
        assert "paht" in caplog.text
        assert SECRET not in caplog.text
        assert await on.reload(good) == ["limits.requests_per_second", "backends.b"]
        assert on.reloader.last_error is None


@driven
async def test_a_file_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as on:
        on.file.unlink()
        await on.reloader.reload_or_log(BY)
        assert on.reloader.last_error is not None
        assert "cannot be read: No such file" in on.reloader.last_error.detail


@driven
async def test_many_reloads_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    async with rig(tmp_path) as on:
        on.file.write_text("[backends.default]\nkind = 'sqlite'\n[backends.b]\nkind = 'sqlite'\n")
        changed = await asyncio.gather(*(on.reloader.reload(BY) for _ in range(5)))
        assert sorted(changed) == [[], [], [], [], ["backends.b"]]
        await on.service.create_queue(spec("q", 2))
        assert on.service.problems() == []


# ---- TLS ----------------------------------------------------------------------------------------------------------


def issue(folder: Path, authority: trustme.CA) -> None:
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))


TLS = "[server]\ntls_certificate = 'cert.pem'\ntls_key = 'key.pem'\n"


@driven
async def test_certificates_are_renewed_with_the_rest_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    issue(tmp_path, authority)
    (tmp_path / "sluiceway.toml").write_text(TLS)
    async with rig(tmp_path) as on:
        assert on.tls is not None
        loads: list[TlsFiles] = []
        monkeypatch.setattr(on.tls, "reload", lambda: loads.append(on.tls))
        assert await on.reloader.reload(BY) == []
        issue(tmp_path, authority)
        assert (await on.refused(TLS + "listn = 3")).code == "invalid_request"
        assert loads == []
        (tmp_path / "key.pem").write_text("no key")
        assert "key.pem has no private key" in (await on.refused(TLS + "[limits]\nrequests_per_second = 3")).detail
        assert (loads, on.applied) == ([], [])
        issue(tmp_path, authority)
        assert await on.reloader.reload(BY) == ["limits.requests_per_second", "server.tls_certificate"]
        assert await on.reloader.reload(BY) == []
        assert (len(loads), len(on.applied)) == (1, 1)


@driven
async def test_a_key_that_is_replaced_again_while_a_reload_is_applied_leaves_the_rest_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was an error that said that nothing had changed, when all but the certificate had."""
    files = Files(tmp_path / "tls")
    config = tmp_path / "sluiceway.toml"
    text = f"[server]\ntls_certificate = '{files.certificate}'\ntls_key = '{files.key}'\n"
    config.write_text(text)

    async def reconfigure(old: Configuration, new: Configuration, also: Sequence[str], by: Actor) -> list[str]:
        files.key.write_text("half of a")
        return ["log.level", *also]

    applied: list[Configuration] = []
    service: Any = SimpleNamespace(reconfigure=reconfigure)
    reloader = Reloader(load(config, environment={}), service, applied.append, files.tls())
    files.renew()
    config.write_text(text + "[log]\nlevel = 'error'\n")
    with caplog.at_level(logging.WARNING):
        assert await reloader.reload(SYSTEM) == ["log.level", "server.tls_certificate"]
    assert [each.log.level for each in applied] == ["error"]
    assert "keeping the current certificate" in caplog.text
    with pytest.raises(SluicewayError, match="no private key"):
        await reloader.reload(SYSTEM)


# ---- watching -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3)))
def test_a_change_is_told_once_and_only_when_it_has_come_to_rest(looks: list[int]) -> None:
    stillness, known, last = Stillness(0), 0, 0
    for look in looks:
        told = stillness.look(look)
        assert told == (look == last != known)
        known, last = look if told else known, look


@driven
async def test_files_that_change_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with rig(tmp_path) as on:
        watching = asyncio.create_task(on.reloader.watch(watch_interval=5))
        on.file.write_text("[limits]\nrequests_per_second = 1\n")
        await eventually(lambda: len(on.applied) == 1)
        on.file.write_text("[limits")
        await eventually(lambda: on.reloader.last_error is not None)
        failure = on.reloader.last_error
        # Another file in its place, as an editor or a mounted configuration does it.
        other = tmp_path / "other.toml"
        other.write_text("[limits]\nrequests_per_second = 2\n")
        other.replace(on.file)
        await eventually(lambda: len(on.applied) == 2)
        assert on.reloader.last_error is None
        assert failure is not None
        # What was wrong was tried once, however often it was looked at.
        assert caplog.text.count("is not TOML") == 1
        assert [entry.actor for entry in await on.service.audit.list(10)] == ["file watch"] * 2
        watching.cancel()


@driven
async def test_what_the_meta_store_kept_from_being_applied_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that was renewed while the meta store was away was not loaded until the next change: the old one expired."""
    async with rig(tmp_path) as on:
        real, tries = on.service.reconfigure, 0

        async def reconfigure(*given: Any) -> list[str]:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise SluicewayError("unavailable", "the meta store cannot be read")
            return await real(*given)

        monkeypatch.setattr(on.service, "reconfigure", reconfigure)
        monkeypatch.setattr(reload_module, "AGAIN", 3)
        on.file.write_text("[limits]\nrequests_per_second = 1\n")
        watching = asyncio.create_task(on.reloader.watch(watch_interval=5))
        await eventually(lambda: len(on.applied) == 1)
        assert (tries, on.reloader.last_error) == (3, None)
        watching.cancel()


@driven
async def test_what_changed_while_the_server_started_is_read(tmp_path: Path) -> None:
    async with rig(tmp_path) as on:
        on.file.write_text("[limits]\nrequests_per_second = 1\n")
        watching = asyncio.create_task(on.reloader.watch(watch_interval=5))
        await eventually(lambda: len(on.applied) == 1)
        watching.cancel()


@driven
async def test_a_touch_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as on:
        reads: list[Actor] = []
        looks = 0
        real = reload_module._looks

        def counted(files: Sequence[Path]) -> object:
            nonlocal looks
            looks += 1
            return real(files)

        async def noted(by: Actor) -> None:
            reads.append(by)

        monkeypatch.setattr(reload_module, "_looks", counted)
        monkeypatch.setattr(on.reloader, "reload_or_log", noted)
        watching = asyncio.create_task(on.reloader.watch(watch_interval=5))
        await eventually(lambda: len(reads) == 1)
        (tmp_path / "same").write_text(on.file.read_text())
        (tmp_path / "same").replace(on.file)
        since = looks
        await eventually(lambda: looks > since + 3)
        assert len(reads) == 1
        on.file.write_text("# changed")
        await eventually(lambda: len(reads) == 2)
        watching.cancel()
