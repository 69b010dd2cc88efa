"""The configuration file: what it may say, what is refused, and that no password gets out."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings, MemoryBackend, PostgresBackend, SqliteBackend
from sluiceway.node.configuration import open_store, read_configuration
from sluiceway.testing.drive import driven

SECRET = "hunter2"
URL = f"postgresql://u:{SECRET}@db.example/q"


def read(folder: Path, text: str, **environment: str) -> dict[str, BackendSettings]:
    path = folder / "sluiceway.toml"
    path.write_text(text)
    return read_configuration(path, environment)


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    text = f"""
[backends.default]
kind = "sqlite"
path = "fast/disk"
partition_affinity = 0.5

[backends.shared]
kind = "postgres"
url = "{URL}"
schema = "queues"
write_timeout = "2s500ms"

[backends.other]
kind = "postgres"
url_env = "OTHER_URL"
partition_affinity = 0
"""
    assert read(tmp_path, text, OTHER_URL=URL) == {
        "default": SqliteBackend(path=str(tmp_path / "fast" / "disk"), partition_affinity=0.5),
        "shared": PostgresBackend(url=URL, schema="queues", write_timeout=2_500),
        "other": PostgresBackend(url=URL, partition_affinity=0),
    }
    assert read(tmp_path, '[backends.m]\nkind = "memory"') == {"m": MemoryBackend()}
    assert read(tmp_path, '[backends.d]\nkind = "sqlite"\npath = "/srv/queue"') == {"d": SqliteBackend(path="/srv/queue")}


@pytest.mark.parametrize("text", ["", "# nothing yet", "[backends]"])
def test_a_file_that_names_no_backend_means_the_default(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == DEFAULT_BACKENDS


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[backends", "not TOML"),
        ("[backend.default]", "backend: unknown key"),
        ("backends = 3", "backends: expected tables"),
        ("[backends]\ndefault = 3", "backends: expected tables"),
        ("[backends.d]", "backends.d.kind: expected one of sqlite, postgres, memory"),
        ('[backends.d]\nkind = "oracle"', "backends.d.kind"),
        ("[backends.d]\nkind = []", "backends.d.kind"),
        ('[backends.d]\nkind = "sqlite"\npaht = "x"', "backends.d: unknown key `paht`"),
        ('[backends.d]\nkind = "memory"\npath = "x"', "backends.d: unknown key `path`"),
        ('[backends.d]\nkind = "sqlite"\npath = 3', "backends.d: Expected `str"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = 1.1', "partition_affinity"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = nan', "partition_affinity"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = -0.1', "partition_affinity"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = 0', "partition_affinity above 0"),
        ('[backends.d]\nkind = "sqlite"\nwrite_timeout = 10', "backends.d.write_timeout: expected a duration"),
        ('[backends.d]\nkind = "sqlite"\nwrite_timeout = "0s"', "backends.d.write_timeout: expected more than 0s"),
        ('[backends.d]\nkind = "sqlite"\nwrite_timeout = "16m"', "backends.d.write_timeout: expected more than 0s and at most 15m"),
        ('[backends."../etc"]\nkind = "sqlite"', "backends.../etc: a backend's name is"),
        ('[backends.""]\nkind = "sqlite"', "a backend's name is"),
        ('[backends.d]\nkind = "postgres"', "backends.d.url: give either url, or url_env"),
        (f'[backends.d]\nkind = "postgres"\nurl = "{URL}"\nurl_env = "X"', "backends.d.url: give either"),
        ('[backends.d]\nkind = "postgres"\nurl_env = "NOT_SET"', "backends.d.url_env: the environment variable 'NOT_SET' is not set"),
        ('[backends.d]\nkind = "postgres"\nurl_env = 3', "backends.d.url_env"),
        (f'[backends.d]\nkind = "postgres"\nurl = "{URL}"\nschema = "a b"', "backends.d: Expected `str` matching"),
        ('[backends.d]\nkind = "sqlite"\n[backends.m]\nkind = "memory"', "cannot stand beside others"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        read(tmp_path, text)
    assert refused.value.code == "invalid_request"
    assert named in refused.value.detail
    assert SECRET not in refused.value.detail


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    assert SECRET not in repr(read(tmp_path, f'[backends.d]\nkind = "postgres"\nurl = "{URL}"'))


@pytest.mark.parametrize("url", [f"{URL}?bad=1", f"host=h password:{SECRET}"])
@driven
async def test_a_url_that_cannot_be_used_is_refused_without_showing_it(tmp_path: Path, url: str) -> None:
    with pytest.raises(SluicewayError, match=r"backends\.d\.url") as refused:
        open_store("d", PostgresBackend(url=url), tmp_path)
    assert SECRET not in refused.value.detail
    assert refused.value.__suppress_context__, "a traceback would show what the driver said"


@driven
async def test_where_the_files_lie(tmp_path: Path) -> None:
    places = {"default": tmp_path / "partitions", "cold": tmp_path / "backends" / "cold"}
    for name, place in places.items():
        store = open_store(name, SqliteBackend(), tmp_path)
        assert place.is_dir()
        await store.close()
    store = open_store("default", SqliteBackend(path=str(tmp_path / "elsewhere")), tmp_path)
    assert (tmp_path / "elsewhere").is_dir()
    await store.close()
    assert isinstance(open_store("default", MemoryBackend(), tmp_path), MemoryPartitionStore)
