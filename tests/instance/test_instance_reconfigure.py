"""What of a new configuration can change while the server runs, and that the backends then change whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.instance.config_changes import plan
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.backend import Backend
from sluiceway.model.access import Actor
from sluiceway.model.backends import BackendSettings, MemoryBackend, PostgresBackend, SqliteBackend
from sluiceway.model.configuration import SECTIONS, Configuration
from sluiceway.model.meta import View
from sluiceway.model.requests import Produced
from sluiceway.model.settings import keys
from sluiceway.ports.meta_store import MetaUnknownError
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import lease, payloads, produce, spec
from tests.server.server_process import closed_port
from tests.servers.postgres_server import PostgresServer, server_or_skip

BY = Actor("somebody", "request-1")
OTHER: dict[str, object] = {
    "server.auth": "keys",
    "server.shutdown_timeout": 1,
    "server.workers": 2,
    "server.audit_entries": 500,
    "cluster.strategy": "claims",
    "log.format": "json",
    "log.level": "debug",
    "limits.requests_per_second": 1,
    "limits.bytes_per_second": 1,
    "partition_affinity": 0.5,
    "write_timeout": 1,
}
"""Another value than the default, where any text will not do."""


def of(**backends: BackendSettings) -> Configuration:
    return Configuration(backends=backends)


# ---- the decision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{section}.{key.name}" for section, table in SECTIONS.items() for key in keys(table)])
def test_every_key_of_a_section_is_live_or_takes_a_restart_as_it_says(name: str) -> None:
    section, _, key_name = name.partition(".")
    old = Configuration()
    table = msgspec.structs.replace(getattr(old, section), **{key_name: OTHER.get(name, "other")})
    planned = plan(old, msgspec.structs.replace(old, **{section: table}), {})
    restart = next(key.restart for key in keys(SECTIONS[section]) if key.name == key_name)
    assert planned.changed == [name]
    assert list(planned.restart) == ([name] if restart else [])


@pytest.mark.parametrize(
    ("settings", "key_name", "restart"),
    [
        (SqliteBackend(), "path", True),
        (SqliteBackend(), "partition_affinity", False),
        (SqliteBackend(), "write_timeout", False),
        (PostgresBackend(url="a"), "url", True),
        (PostgresBackend(url="a"), "schema", True),
        (PostgresBackend(url="a"), "partition_affinity", False),
        (PostgresBackend(url="a"), "write_timeout", False),
        (MemoryBackend(), "partition_affinity", False),
    ],
)
def test_which_keys_of_a_backend_take_a_restart(settings: BackendSettings, key_name: str, restart: bool) -> None:
    changed: Any = msgspec.structs.replace(settings, **{key_name: OTHER.get(key_name, "other")})
    planned = plan(of(b=settings), of(b=changed), {"b": 3})
    assert planned.changed == [f"backends.b.{key_name}"]
    assert list(planned.restart) == (planned.changed if restart else [])


def test_backends_come_and_go_unless_they_hold_partitions() -> None:
    one, two = of(a=SqliteBackend()), of(a=SqliteBackend(), b=SqliteBackend())
    assert plan(one, two, {"b": 3}).changed == ["backends.b"]
    assert plan(one, two, {"b": 3}).restart == {}
    assert plan(two, one, {"a": 3}).restart == {}
    assert "holds 3 partitions" in plan(two, one, {"b": 3}).restart["backends.b"]


def test_another_kind_takes_a_restart() -> None:
    assert list(plan(of(a=SqliteBackend()), of(a=PostgresBackend(url="x")), {}).restart) == ["backends.a.kind"]
    assert list(plan(of(a=SqliteBackend()), of(b=MemoryBackend()), {}).restart) == ["backends"]
    assert list(plan(of(a=MemoryBackend()), of(b=SqliteBackend()), {}).restart) == ["backends"]


def test_every_key_that_takes_a_restart_is_named_and_no_value() -> None:
    old = of(a=PostgresBackend(url="hunter1"), b=SqliteBackend())
    new = msgspec.structs.replace(
        of(a=PostgresBackend(url="hunter2")), server=msgspec.structs.replace(old.server, listen=":1", admin_key="hunter3")
    )
    with pytest.raises(SluicewayError) as refused:
        plan(old, new, {"b": 1}).check()
    assert refused.value.code == "restart_required"
    assert all(name in refused.value.detail for name in ("server.listen", "server.admin_key", "backends.a.url", "backends.b"))
    assert "hunter" not in refused.value.detail
    plan(old, old, {"b": 1}).check()


# ---- carried out --------------------------------------------------------------------------------------------------

A = of(a=SqliteBackend())
BOTH = of(a=SqliteBackend(), b=SqliteBackend())


@contextlib.asynccontextmanager
async def serving(data: Path, backends: Mapping[str, BackendSettings] = A.backends) -> AsyncIterator[Service]:
    service = Service(data, backends)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def placed(service: Service, name: str, partitions: int = 4) -> list[str]:
    return [each.backend for each in (await service.create_queue(spec(name, partitions))).partitions]


async def reloads(service: Service) -> list[dict[str, Any]]:
    return [entry.detail for entry in await service.audit.list(100, action="config.reload")]


@driven
async def test_a_backend_is_added_and_affinities_change_for_new_queues(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        assert await placed(service, "before") == ["a"] * 4
        assert await service.reconfigure(A, BOTH, by=BY) == ["backends.b"]
        assert await placed(service, "after") == ["a", "b"] * 2
        less = of(a=SqliteBackend(partition_affinity=0), b=SqliteBackend())
        assert await service.reconfigure(BOTH, less, by=BY) == ["backends.a.partition_affinity"]
        assert await placed(service, "later") == ["b"] * 4
        assert [info.partitions for info in service.backends()] == [6, 6]
        assert [entry["changed"] for entry in await reloads(service)] == [["backends.a.partition_affinity"], ["backends.b"]]
        assert (await service.audit.list(1, action="config.reload"))[0].actor == BY.name
    async with serving(tmp_path, less.backends) as service:
        assert service.problems() == []


@driven
async def test_nothing_to_change_is_no_entry(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        assert await service.reconfigure(A, A) == []
        assert await reloads(service) == []
        assert await service.reconfigure(A, A, ["server.tls_certificate"]) == ["server.tls_certificate"]
        assert await reloads(service) == [{"changed": ["server.tls_certificate"]}]


@driven
async def test_an_empty_backend_goes_and_its_name_may_come_back_elsewhere(tmp_path: Path) -> None:
    async with serving(tmp_path, BOTH.backends) as service:
        assert await service.reconfigure(BOTH, A) == ["backends.b"]
        assert [info.name for info in service.backends()] == ["a"]
        elsewhere = of(a=SqliteBackend(), b=SqliteBackend(path=str(tmp_path / "elsewhere")))
        assert await service.reconfigure(A, elsewhere) == ["backends.b"]
        assert await placed(service, "q") == ["a", "b"] * 2
        assert len([*(tmp_path / "elsewhere").glob("*.sqlite")]) == 2


@driven
async def test_a_backend_that_holds_partitions_stays_until_their_queue_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, BOTH.backends) as service:
        await service.create_queue(spec("q", 2))
        with pytest.raises(SluicewayError, match=r"backends\.b: it holds 1 partitions") as refused:
            await service.reconfigure(BOTH, A)
        assert refused.value.code == "restart_required"
        assert isinstance(await produce(service, "q", "x"), Produced)
        await service.delete_queue("q", force=True)
        assert await service.reconfigure(BOTH, A) == ["backends.b"]


@driven
async def test_what_cannot_be_used_leaves_everything_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    async with serving(tmp_path / "data") as service:
        with closed_port() as port:
            gone: BackendSettings = PostgresBackend(url=f"postgresql://u:hunter2@127.0.0.1:{port}/x")
            wrong: BackendSettings = SqliteBackend(path=str(folder))
            taken: BackendSettings = SqliteBackend(path=str(tmp_path / "data" / "backends" / "a"))
            for settings, code in ((gone, "unavailable"), (wrong, "invalid_request"), (taken, "invalid_request")):
                # The first is opened, and must be let go when the second cannot be.
                with pytest.raises(SluicewayError, match=r"backends\.bad: ") as refused:
                    await service.reconfigure(A, of(a=SqliteBackend(partition_affinity=0), b=SqliteBackend(), bad=settings), by=BY)
                assert refused.value.code == code
                assert "hunter2" not in refused.value.detail
        assert await placed(service, "q") == ["a"] * 4
        assert await reloads(service) == []
        # Not even the folder's identity was recorded, so another one may be used under the name.
        assert await service.reconfigure(A, of(a=SqliteBackend(), b=SqliteBackend(path=str(tmp_path / "b"))))


@driven
async def test_a_folder_that_is_not_the_one_it_was_is_not_taken(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", BOTH.backends) as service:
        await service.create_queue(spec("q", 2))
    (tmp_path / "data" / "backends" / "b" / "identity").write_text("another")
    async with serving(tmp_path / "data") as service:
        with pytest.raises(SluicewayError, match="is not the directory that held its partitions"):
            await service.reconfigure(A, BOTH)


@driven
async def test_a_backend_that_is_put_back_serves_what_lies_there(tmp_path: Path) -> None:
    async with serving(tmp_path, BOTH.backends) as service:
        await service.create_queue(spec("q", 2))
        for _ in range(2):
            await produce(service, "q", "x")
    async with serving(tmp_path) as service:
        assert ["backend b" in problem for problem in service.problems()] == [True]
        assert [info.kind for info in service.backends()] == ["sqlite", None]
        assert await service.reconfigure(A, BOTH) == ["backends.b"]
        found: list[str] = []
        while len(found) < 2:
            found += payloads((await lease(service, "q", 10)).batches)
        assert service.problems() == []


def test_what_waits_for_a_backend_is_opened_as_soon_as_it_serves() -> None:
    backend, asked = Backend("b", None, 0), list[int]()

    def retry(partition: int) -> bool:
        asked.append(partition)
        return True

    for number in range(3):
        backend.attach(PartitionRef("x", number), retry)
    first = MemoryPartitionStore()
    assert backend.serve(first) is None
    assert asked == [0, 1, 2]
    assert backend.serve(MemoryPartitionStore()) is first


@driven
async def test_if_the_change_cannot_be_recorded_it_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as service:

        async def unknown(*_: object, **__: object) -> int:
            raise MetaUnknownError("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(service.meta, "commit", unknown)
            with pytest.raises(SluicewayError) as refused:
                await service.reconfigure(A, BOTH)
        assert refused.value.code == "outcome_unknown"
        assert await placed(service, "q") == ["a"] * 4
        assert await service.reconfigure(A, BOTH) == ["backends.b"]


@driven
async def test_a_change_that_was_recorded_without_an_answer_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as service:
        commit = service.meta.commit

        async def unheard(*args: Any, **writes: Any) -> int:
            await commit(*args, **writes)
            raise MetaUnknownError("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(service.meta, "commit", unheard)
            assert await service.reconfigure(A, BOTH, by=BY) == ["backends.b"]
        assert set(await placed(service, "r")) == {"a", "b"}
        assert [entry.actor for entry in await service.audit.list(10, action="config.reload")] == [BY.name]


@driven
async def test_a_change_that_was_recorded_is_made_though_the_meta_store_cannot_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for not recorded, and this instance went on without a backend that the others place partitions on."""
    async with serving(tmp_path) as service:
        commit, read = service.meta.commit, service.meta.read
        fails = 0

        async def unheard(*args: Any, **writes: Any) -> int:
            nonlocal fails
            await commit(*args, **writes)
            fails = 3
            raise MetaUnknownError("cut off")

        async def fails_at_first(*args: Any, **wanted: Any) -> View:
            nonlocal fails
            if fails:
                fails -= 1
                raise StoreUnavailableError("still cut off")
            return await read(*args, **wanted)

        monkeypatch.setattr("sluiceway.instance.backend_changes.LOOK", 1)
        with monkeypatch.context() as patch:
            patch.setattr(service.meta, "commit", unheard)
            patch.setattr(service.meta, "read", fails_at_first)
            assert await service.reconfigure(A, BOTH) == ["backends.b"]
        assert fails == 0
        assert set(await placed(service, "r")) == {"a", "b"}


@driven
async def test_a_meta_store_that_is_away_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as service:

        async def away(*_: object, **__: object) -> int:
            raise StoreUnavailableError("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(service.meta, "commit", away)
            with pytest.raises(SluicewayError, match="the meta store cannot be reached: cut off") as refused:
                await service.reconfigure(A, BOTH)
        assert refused.value.code == "unavailable"
        assert await service.reconfigure(A, BOTH) == ["backends.b"]


@driven
async def test_changes_of_queues_and_of_backends_do_not_cross(tmp_path: Path) -> None:
    async with serving(tmp_path, BOTH.backends) as service:
        created = asyncio.create_task(service.create_queue(spec("q", 2)))
        # Asked for while the queue is being created, decided once it is there.
        with pytest.raises(SluicewayError, match="holds 1 partitions"):
            await asyncio.gather(created, service.reconfigure(BOTH, A))


# ---- PostgreSQL ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server


@driven
async def test_a_postgres_backend_is_added_and_gets_other_time_outs_while_it_works(tmp_path: Path, postgres: PostgresServer) -> None:
    def with_postgres(write_timeout: int) -> Configuration:
        return of(
            a=SqliteBackend(partition_affinity=0), p=PostgresBackend(url=postgres.dsn(), schema="reload", write_timeout=write_timeout)
        )

    async with serving(tmp_path) as service:
        assert await service.reconfigure(A, with_postgres(5_000)) == ["backends.a.partition_affinity", "backends.p"]
        await service.create_queue(spec("q", 2))
        going = True

        async def produces() -> int:
            number = 0
            while going:
                assert isinstance(await produce(service, "q", "x"), Produced)
                number += 1
            return number

        working = [asyncio.create_task(produces()) for _ in range(4)]
        for before, after in ((5_000, 7_000), (7_000, 3_000), (3_000, 9_000)):
            produced = sum(each.produced for each in service.stats("q").partitions)
            while sum(each.produced for each in service.stats("q").partitions) < produced + 20:
                await produce(service, "q", "x")
            assert await service.reconfigure(with_postgres(before), with_postgres(after)) == ["backends.p.write_timeout"]
        going = False
        assert all([await each for each in working])
        assert {info.name: info.write_timeout for info in service.backends()}["p"] == 9_000
        assert service.problems() == []
