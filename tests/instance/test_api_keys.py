from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.instance import api_keys
from sluiceway.instance.api_keys import API_KEY, ApiKeys, keys_of
from sluiceway.kernel.clock import format_time
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor, KeySpec, Scope, encode_key
from sluiceway.ports.meta_store import ConflictError, Entry, MetaStore, MetaUnknownError, View
from sluiceway.ports.partition_store import StoreUnavailableError
from tests.server.server_process import PATIENCE

PATIENCE_MS = int(PATIENCE * 1_000)
BY = Actor("ada", "request-1")
SPEC = KeySpec("etl", ["read:*", "produce:orders-*"])


@contextlib.asynccontextmanager
async def started(meta: MetaStore, *, poll_interval: int = 20, look_interval: int = 5) -> AsyncIterator[ApiKeys]:
    audit = AuditTrail(meta)
    keys = ApiKeys(meta, audit, poll_interval=poll_interval, look_interval=look_interval)
    await keys.start()
    try:
        yield keys
    finally:
        await keys.stop()
        await audit.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.005)


class Counted(MemoryMetaStore):
    """`reads` are counted; while `broken`, they fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.broken = False

    async def read(self, *args: object, **named: object) -> View:
        self.reads += 1
        if self.broken:
            raise StoreUnavailableError("gone")
        return await super().read(*args, **named)  # type: ignore[arg-type]


def test_a_key_is_found_by_its_text_and_by_nothing_else() -> None:
    async def run() -> None:
        async with started(MemoryMetaStore()) as keys:
            key, text = await keys.create(SPEC, BY)
            other = await keys.create(SPEC, BY)
            found = await keys.find(text)
            assert found is not None
            assert found.caller.scopes == (Scope("produce", "orders-*"), Scope("read", "*"))
            assert (found.caller.name, found.caller.key_id) == (f"etl/{key.key_id}", key.key_id)
            secret = text.split("_")[2]
            wrong = [
                *("", "slw", "slw_", "slw__", f"slw_{key.key_id}", f"slw_{key.key_id}_", f"slw_{key.key_id}_{secret[:-1]}"),
                *(f"{text}0", f"slw_{other.key.key_id}_{secret}", f"xyz_{key.key_id}_{secret}", text.upper(), f"slw_{secret}", secret),
                *(f"slw_{key.key_id}_{key.digest.hex()}", f"slw_{key.key_id}_{'0' * 48}", "slw_é_é"),
            ]
            assert [await keys.find(each) for each in wrong] == [None] * len(wrong)

    asyncio.run(run())


def test_a_text_has_its_id_and_at_least_160_random_bits() -> None:
    async def run() -> None:
        async with started(MemoryMetaStore()) as keys:
            texts = [(await keys.create(SPEC, BY)).text.split("_") for _ in range(20)]
        assert all(prefix == "slw" and len(bytes.fromhex(secret)) * 8 >= 160 for prefix, _, secret in texts)
        assert len({secret for _, _, secret in texts}) == len({key_id for _, key_id, _ in texts}) == 20

    asyncio.run(run())


def test_the_secret_is_stored_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> str:
        async with keys_of(tmp_path) as keys:
            made = await keys.create(SPEC, BY)
            key, text = made
            assert text not in repr(made)
            assert text not in repr(await keys.list())
            assert key.digest == hashlib.sha256(text.split("_")[2].encode()).digest()
        return text.split("_")[2]

    with caplog.at_level(logging.DEBUG):
        secret = asyncio.run(run())
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"apikey/" in stored
    assert secret.encode() not in stored
    assert secret not in caplog.text


def test_a_revoked_key_is_nobodys() -> None:
    async def run() -> None:
        async with started(MemoryMetaStore()) as keys:
            key, text = await keys.create(SPEC, BY)
            assert keys.known(key.key_id) is not None
            await keys.revoke(key.key_id, BY)
            # At once, without a look at the store.
            assert keys.known(key.key_id) is None
            assert await keys.find(text) is None
            with pytest.raises(SluicewayError, match="there is no API key") as caught:
                await keys.revoke(key.key_id, BY)
            assert (caught.value.code, caught.value.field) == ("key_not_found", "key_id")

    asyncio.run(run())


def test_a_key_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with started(MemoryMetaStore()) as keys:
            now = system.now()
            key, text = await keys.create(SPEC._replace(expires_at=now + 60_000), BY)
            monkeypatch.setattr(system, "now", lambda: now + 59_999)
            assert await keys.find(text) is not None
            monkeypatch.setattr(system, "now", lambda: now + 60_000)
            assert keys.known(key.key_id) is None
            assert await keys.find(text) is None
            assert [each.key_id for each in await keys.list()] == [key.key_id]

    asyncio.run(run())


def test_the_audit_trail_tells_times_as_times() -> None:
    async def run() -> None:
        meta = MemoryMetaStore()
        async with started(meta) as keys:
            expires_at = system.now() + 60_000
            await keys.create(SPEC._replace(expires_at=expires_at), BY)
            (entry,) = await AuditTrail(meta).list(10)
            assert entry.detail["expires_at"] == format_time(expires_at)

    asyncio.run(run())


def test_changes_are_audited_in_their_own_commit() -> None:
    async def run() -> None:
        meta = MemoryMetaStore()
        async with started(meta) as keys:
            key, text = await keys.create(SPEC, BY)
            created = await meta.read(prefixes=[API_KEY, "audit/"])
            assert len({entry.stamp for entry in created.entries.values()}) == 1
            await keys.revoke(key.key_id, BY)
            entries = await AuditTrail(meta).list(10)
        assert [(entry.action, entry.actor, entry.request_id) for entry in entries] == [
            ("keys.revoke", "ada", "request-1"),
            ("keys.create", "ada", "request-1"),
        ]
        assert all(entry.detail["key_id"] == key.key_id and entry.detail["name"] == "etl" for entry in entries)
        assert text not in repr(entries)
        assert key.digest.hex() not in repr(entries)

    asyncio.run(run())


def test_what_is_refused_is_neither_recorded_nor_audited() -> None:
    async def run() -> None:
        meta = MemoryMetaStore()
        async with started(meta) as keys:
            with pytest.raises(SluicewayError, match="is not a scope"):
                await keys.create(KeySpec("etl", ["everything"]), BY)
            with pytest.raises(SluicewayError, match="there is no API key"):
                await keys.revoke("abcdefgh", BY)
        assert not (await meta.read(prefixes=[""])).entries

    asyncio.run(run())


def test_another_process_sees_a_new_key_at_once_and_a_revoked_one_soon(tmp_path: Path) -> None:
    async def run() -> None:
        here, there = SqliteMetaStore(tmp_path / "meta.sqlite"), SqliteMetaStore(tmp_path / "meta.sqlite")
        # So long an interval that a poll cannot be what finds the new key.
        async with started(here) as ours, started(there, poll_interval=10 * PATIENCE_MS) as theirs:
            key, text = await theirs.create(SPEC, BY)
            assert await ours.find(text) is not None
            another = await ours.create(SPEC, BY)
            assert await theirs.find(another.text) is not None
            await theirs.revoke(key.key_id, BY)

            async def refused() -> bool:
                return await ours.find(text) is None

            await until(refused)
        await here.close()
        await there.close()

    asyncio.run(run())


def test_a_flood_of_wrong_keys_shares_its_reads() -> None:
    async def run() -> None:
        meta = Counted()
        async with started(meta, poll_interval=10 * PATIENCE_MS, look_interval=500) as keys:
            key, _ = await keys.create(SPEC, BY)
            meta.reads = 0
            found = await asyncio.gather(*(keys.find(f"slw_{number:08d}_{'0' * 48}") for number in range(2_000)))
            found += await asyncio.gather(*(keys.find(f"slw_{key.key_id}_{number:048x}") for number in range(2_000)))
            assert found == [None] * 4_000
            # About one for each of the two floods: more only if sending one of them takes longer than the interval.
            assert meta.reads < 20
            assert list(keys._holders) == [key.key_id]

    asyncio.run(run())


def test_what_is_no_key_at_all_costs_no_read() -> None:
    async def run() -> None:
        meta = Counted()
        async with started(meta, poll_interval=10 * PATIENCE_MS) as keys:
            meta.reads = 0
            assert [await keys.find(text) for text in ("", "password", "ghp_abcdefgh_1", "slwabcdefgh")] == [None] * 4
            assert meta.reads == 0

    asyncio.run(run())


def test_without_its_meta_store_the_known_keys_are_good(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        meta = Counted()
        async with started(meta, poll_interval=1) as keys:
            _, text = await keys.create(SPEC, BY)
            meta.broken = True
            before = meta.reads

            async def polled() -> bool:
                return meta.reads > before + 5

            await until(polled)
            assert await keys.find(text) is not None
            # No other secret of it will ever be good.
            assert await keys.find(f"{text}0") is None
            with pytest.raises(SluicewayError) as caught:
                await keys.list()
            assert caught.value.code == "unavailable"
            meta.broken = False
            await keys.list()

    asyncio.run(run())
    assert caplog.text.count("are not seen") == 1


def test_without_its_meta_store_a_server_does_not_say_that_a_new_key_is_none() -> None:
    """A consumer that is told so ends for good, while one that is told to try again works a moment later."""

    async def run() -> None:
        meta = Counted()
        async with started(MemoryMetaStore()) as others, started(meta, poll_interval=10 * PATIENCE_MS) as keys:
            key, text = await others.create(SPEC, BY)
            meta.broken = True
            with pytest.raises(SluicewayError) as caught:
                await keys.find(text)
            assert (caught.value.code, caught.value.retryable) == ("unavailable", True)
            meta.broken = False
            # As the process that has created it stores it.
            await meta.commit(puts={API_KEY + key.key_id: encode_key(key)})
            assert await keys.find(text) is not None
            assert await keys.find("slw_abcdefgh_0") is None

    asyncio.run(run())


def test_an_error_that_nobody_expects_does_not_end_the_polls(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise keys that other processes revoke would be good until a restart."""

    async def run() -> None:
        meta = Counted()
        async with started(meta, poll_interval=1) as keys:
            _, text = await keys.create(SPEC, BY)
            fails = True
            show = keys._show

            def shown(entries: dict[str, Entry]) -> None:
                if fails:
                    raise RuntimeError("a bug")
                show(entries)

            monkeypatch.setattr(keys, "_show", shown)
            before = meta.reads

            async def polled() -> bool:
                return meta.reads > before + 5 or (keys._poll is not None and keys._poll.done())

            await until(polled)
            fails = False
            await meta.commit(deletes=[API_KEY + text.split("_")[1]])

            async def is_refused() -> bool:
                assert keys._poll is not None
                assert not keys._poll.done()
                return keys.known(text.split("_")[1]) is None

            await until(is_refused)

    asyncio.run(run())
    assert caplog.text.count("are not seen") == 1
    assert "RuntimeError: a bug" in caplog.text


@pytest.mark.parametrize("record", [b"{}", b'{"key_id":"abcd\xe6fgh"}'], ids=["no key", "no UTF-8"])
def test_a_record_that_cannot_be_read_shuts_nobody_out(caplog: pytest.LogCaptureFixture, record: bytes) -> None:
    async def run() -> None:
        meta = MemoryMetaStore()
        await meta.commit(puts={API_KEY + "abcdefgh": record})
        async with started(meta) as keys:
            key, text = await keys.create(SPEC, BY)
            assert await keys.find(text) is not None
            assert await keys.find("slw_abcdefgh_0") is None
            assert [each.key_id for each in await keys.list()] == [key.key_id]
            await keys.revoke("abcdefgh", BY)
            assert list((await meta.read(prefixes=[API_KEY])).entries) == [API_KEY + key.key_id]

    asyncio.run(run())
    assert "apikey/abcdefgh is not an API key" in caplog.text


async def _is(found: bool) -> bool:
    return found


def test_there_are_never_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "MAX_API_KEYS", 5)

    async def run() -> None:
        # A store that takes its time, so that all of them have read before one has committed.
        meta = SqliteMetaStore(tmp_path / "meta.sqlite")
        async with started(meta) as keys:
            made = await asyncio.gather(*(keys.create(SPEC, BY) for _ in range(9)), return_exceptions=True)
            refused = [each for each in made if isinstance(each, SluicewayError)]
            assert len(await keys.list()) == 5
            assert len(refused) == 4
            assert "5 API keys, which is the maximum; revoke some first" in refused[0].detail
        await meta.close()

    asyncio.run(run())


@pytest.mark.parametrize("lost", [True, False])
def test_a_commit_of_which_nothing_is_known(lost: bool) -> None:
    class Unsure(MemoryMetaStore):
        async def commit(self, *args: object, **named: object) -> int:
            if not lost:
                await super().commit(*args, **named)  # type: ignore[arg-type]
            raise MetaUnknownError("no answer")

    async def run() -> None:
        async with started(Unsure()) as keys:
            with pytest.raises(SluicewayError, match=r"keys\.list shows it") as caught:
                await keys.create(SPEC, BY)
            assert caught.value.code == "outcome_unknown"
            assert len(await keys.list()) == (0 if lost else 1)

    asyncio.run(run())


def test_a_conflict_is_decided_anew() -> None:
    class Contended(MemoryMetaStore):
        conflicts = 3

        async def commit(self, *args: object, **named: object) -> int:
            self.conflicts -= 1
            if self.conflicts >= 0:
                raise ConflictError("another one was first")
            return await super().commit(*args, **named)  # type: ignore[arg-type]

    async def run() -> None:
        async with started(Contended()) as keys:
            _, text = await keys.create(SPEC, BY)
            assert await keys.find(text) is not None

    asyncio.run(run())


def test_keys_of_a_folder_before_and_while_a_server_has_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with keys_of(tmp_path / "data") as keys:
            before = await keys.create(SPEC, BY)
        server = SqliteMetaStore(tmp_path / "data" / "meta.sqlite")
        async with started(server) as served, keys_of(tmp_path / "data") as keys:
            assert await served.find(before.text) is not None
            meanwhile = await keys.create(SPEC, BY)
            assert await served.find(meanwhile.text) is not None
        await server.close()

    asyncio.run(run())
