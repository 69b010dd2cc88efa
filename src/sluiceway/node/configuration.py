"""The server's configuration file, and the stores that it asks for."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.core.placement import place
from sluiceway.kernel.clock import Millis, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_REQUEST_TIMEOUT
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings, MemoryBackend, PostgresBackend, SqliteBackend
from sluiceway.ports.partition_store import PartitionStore

_KINDS: dict[str, type[BackendSettings]] = {"sqlite": SqliteBackend, "postgres": PostgresBackend, "memory": MemoryBackend}


def read_configuration(path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, BackendSettings]:
    """The backends that the file names; without any, the default ones. Relative paths are relative to the file.

    Raises `invalid_request`, which names what is wrong and never a password; OSError.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid("config", f"{path} is not TOML: {error}") from None
    named = tables.pop("backends", {})
    for unknown in tables:
        raise invalid(unknown[:80], "unknown key; known: backends")
    if not isinstance(named, dict) or not all(isinstance(table, dict) for table in named.values()):
        raise invalid("backends", "expected tables, such as [backends.default]")
    backends = {name: _backend(name, table, path.parent, environment) for name, table in named.items()} or dict(DEFAULT_BACKENDS)
    check_backends(backends)
    return backends


def check_backends(backends: Mapping[str, BackendSettings]) -> None:
    """Raises `invalid_request` for backends that cannot stand together."""
    place(1, {name: settings.partition_affinity for name, settings in backends.items()})
    if len({isinstance(settings, MemoryBackend) for settings in backends.values()}) > 1:
        raise invalid("backends", "a memory backend cannot stand beside others: a queue would lose a part of its items at each start")


def _backend(name: str, table: dict[str, Any], folder: Path, environment: Mapping[str, str]) -> BackendSettings:
    where = f"backends.{name[:64]}"
    try:
        check_queue_name(name)
    except SluicewayError:
        raise invalid(where, "a backend's name is 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -") from None
    given = dict(table)
    kind = given.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise invalid(f"{where}.kind", f"expected one of {', '.join(_KINDS)}")
    if "write_timeout" in given:
        given["write_timeout"] = _write_timeout(given["write_timeout"], f"{where}.write_timeout")
    if kind == "postgres":
        given["url"] = _url(given, where, environment)
    try:
        settings = msgspec.convert(given, _KINDS[kind])
    except msgspec.ValidationError as error:
        raise invalid(where, str(error).replace("$.", "").replace("Object contains unknown field", "unknown key")) from None
    if isinstance(settings, SqliteBackend) and settings.path is not None:
        settings = msgspec.structs.replace(settings, path=str(folder.absolute() / settings.path))
    return settings


def _write_timeout(given: object, where: str) -> Millis:
    timeout = parse_duration(given, where)
    if not 0 < timeout <= MAX_REQUEST_TIMEOUT:
        raise invalid(where, f"expected more than 0s and at most {MAX_REQUEST_TIMEOUT // 60_000}m")
    return timeout


def _url(given: dict[str, Any], where: str, environment: Mapping[str, str]) -> object:
    """Takes `url_env` out of what was given."""
    variable = given.pop("url_env", None)
    if (variable is None) == ("url" not in given):
        raise invalid(f"{where}.url", "give either url, or url_env: the name of an environment variable that holds it")
    if variable is None:
        return given["url"]
    if not isinstance(variable, str) or not environment.get(variable):
        raise invalid(f"{where}.url_env", f"the environment variable {str(variable)[:80]!r} is not set")
    return environment[variable]


def open_store(name: str, settings: BackendSettings, data: Path) -> PartitionStore:
    """The store of that backend. Raises `invalid_request` for settings it cannot use, and what the store's constructor does."""
    if isinstance(settings, PostgresBackend):
        return _open_postgres(name, settings)
    if isinstance(settings, SqliteBackend):
        return SqlitePartitionStore(directory_of(name, settings, data))
    return MemoryPartitionStore()


def directory_of(name: str, settings: SqliteBackend, data: Path) -> Path:
    """Where the database files of that backend lie."""
    own = data / "partitions" if name == "default" else data / "backends" / name
    return own if settings.path is None else Path(settings.path)


def _open_postgres(name: str, settings: PostgresBackend) -> PartitionStore:
    try:
        from sluiceway.adapters.storage.postgres import PostgresPartitionStore
        from sluiceway.adapters.storage.postgres_connections import MARGIN
    except ImportError:
        raise invalid(f"backends.{name}", "PostgreSQL needs psycopg; install it with: pip install 'sluiceway[postgres]'") from None
    # So that the server says in time that a statement took too long: then it surely did not happen, which a time-out here cannot know.
    statement_timeout = max(1, settings.write_timeout // 2, settings.write_timeout - MARGIN)
    try:
        return PostgresPartitionStore(settings.url, schema=settings.schema, statement_timeout=statement_timeout)
    except Exception:
        # What the driver says may quote the URL.
        raise invalid(f"backends.{name}.url", "neither a PostgreSQL URL nor a connection string") from None
