"""Configuration loading: flag over environment over file over default, with the origin of each value."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from sluiceway.core.queue.backend_placement import check_backends
from sluiceway.kernel.address import parse_address
from sluiceway.kernel.clock import Millis, format_duration, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_REQUEST_TIMEOUT
from sluiceway.kernel.names import check_queue_name, check_zone
from sluiceway.kernel.plain_errors import plain_error
from sluiceway.kernel.secrets import read_secret
from sluiceway.model.access import check_admin_key
from sluiceway.model.backends import KINDS, BackendSettings, BucketBackend, MemoryBackend, PostgresBackend, kind_of
from sluiceway.model.configuration import SECTIONS, SQLITE_META, ClusterSettings, Configuration
from sluiceway.model.settings import MASK, Key, Settings, keys

PREFIX = "SLUICEWAY_"
_BACKENDS = "backends"
_TABLE = re.compile(r"\s*\[([A-Za-z0-9_.\-\"' ]+)\]\s*(?:#.*)?")
_LINE = re.compile(r"\s*([A-Za-z0-9_\-]+)\s*=")
_META = re.compile(r"sqlite:.+|postgres(ql)?://.+|etcds?://.+|(s3|gs)://.+", re.DOTALL)
_SHOWN = 80
_NOTHING: Mapping[str, str] = MappingProxyType({})

Name = tuple[str, ...]
"""`("server", "listen")`, `("backends", "shared", "url")`."""


class _Given(NamedTuple):
    value: Any
    origin: str
    folder: Path
    """Base of a relative path."""


@dataclass(frozen=True)
class Loaded:
    """A loaded and checked configuration, with its sources."""

    configuration: Configuration
    origins: Mapping[str, str]
    """Origin of each value that is not the default, by name such as `server.listen`: FILE:LINE, a variable, or a flag."""
    file: Path | None
    flags: Mapping[str, str]
    environment: Mapping[str, str] = field(repr=False)

    def again(self) -> Loaded:
        """Load it again from the same sources. Raises as `load` does."""
        return load(self.file, self.environment, self.flags)


def load(file: Path | None = None, environment: Mapping[str, str] = os.environ, flags: Mapping[str, str] = _NOTHING) -> Loaded:
    """Load the configuration from its sources. `flags`: values by key name, such as `server.listen`.

    Raises `invalid_request`, which names the key, the origin of its value and what was expected, and never a secret.
    """
    given = _from_file(file) if file is not None else {}
    given |= _from_environment(environment, {name[1] for name in given if name[0] == _BACKENDS})
    given |= {tuple(name.split(".")): _Given(value, _flag(name), Path.cwd()) for name, value in flags.items()}
    backends = {name[1] for name in given if name[0] == _BACKENDS}
    if backends <= {"default"}:
        given.setdefault((_BACKENDS, "default", "kind"), _Given("sqlite", "default", Path.cwd()))
        backends = {"default"}
    sections = {section: _table(table, (section,), given, environment) for section, table in SECTIONS.items()}
    named = [name[1] for name in given if name[0] == _BACKENDS]
    configuration = Configuration(
        **sections,  # type: ignore[arg-type]
        backends={name: _backend(name, given, environment) for name in dict.fromkeys(named)},
    )
    _check_server(configuration)
    check_backends(configuration.backends)
    _check_cluster(configuration)
    origins = {".".join(name): each.origin for name, each in given.items() if each.origin != "default"}
    # Copied, so that later changes of the process's environment do not count.
    return Loaded(configuration, origins, file, dict(flags), dict(environment))


def check(loaded: Loaded) -> list[str]:
    """Return known obstacles to a server's start with this well-formed configuration, as text."""
    server, problems = loaded.configuration.server, []
    ca = loaded.configuration.cluster.ca
    for name, path in (("server.tls_certificate", server.tls_certificate), ("server.tls_key", server.tls_key), ("cluster.ca", ca)):
        if path and not os.access(path, os.R_OK):
            problems.append(f"{name}: {path} cannot be read; is it there, and may this user read it?")
    if server.admin_key:
        try:
            check_admin_key(server.admin_key, "server.admin_key")
        except SluicewayError as error:
            problems.append(error.detail)
    for name, backend in loaded.configuration.backends.items():
        if isinstance(backend, PostgresBackend) and find_spec("psycopg") is None:
            problems.append(f"backends.{name}: PostgreSQL needs psycopg; install it with: pip install 'sluiceway[postgres]'")
        if isinstance(backend, BucketBackend) and find_spec("obstore") is None:
            problems.append(f"backends.{name}: a bucket needs obstore; install it with: pip install 'sluiceway[s3]'")
    if loaded.configuration.cluster.meta.startswith("postgres") and find_spec("psycopg") is None:
        problems.append("cluster.meta: PostgreSQL needs psycopg; install it with: pip install 'sluiceway[postgres]'")
    if loaded.configuration.trace.endpoint and find_spec("opentelemetry") is None:
        problems.append("trace.endpoint: traces need OpenTelemetry; install it with: pip install 'sluiceway[otel]'")
    return problems


def shown(loaded: Loaded, origin: bool = False) -> dict[str, Any]:
    """Return the tables in the form of a file, with defaults and with secrets masked. With `origin`, each value becomes an object of
    `value`, `origin` (`default`, FILE:LINE, a variable or a flag) and `restart` (whether a change needs one)."""

    def table(settings: Settings, name: str) -> dict[str, Any]:
        values = {each.name: (each, _written(each, settings)) for each in keys(type(settings))}
        if not origin:
            return {key_name: value for key_name, (_, value) in values.items()}
        return {key_name: entry(f"{name}.{key_name}", value, each.restart) for key_name, (each, value) in values.items()}

    def entry(name: str, value: Any, restart: bool) -> dict[str, Any]:
        return {"value": value, "origin": loaded.origins.get(name, "default"), "restart": restart}

    def backend(name: str, settings: BackendSettings) -> dict[str, Any]:
        kind = kind_of(settings)
        return {"kind": entry(f"backends.{name}.kind", kind, True) if origin else kind} | table(settings, f"backends.{name}")

    found = {section: table(getattr(loaded.configuration, section), section) for section in SECTIONS}
    return found | {_BACKENDS: {name: backend(name, settings) for name, settings in loaded.configuration.backends.items()}}


def schema() -> dict[str, Any]:
    """JSON Schema of the file, for editors and other programs."""
    tables = {**SECTIONS, **{f"backend_{kind}": table for kind, table in KINDS.items()}}
    properties = {section: {"$ref": f"#/$defs/{section}"} for section in SECTIONS}
    backends = {"type": "object", "additionalProperties": {"oneOf": [{"$ref": f"#/$defs/backend_{kind}"} for kind in KINDS]}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sluiceway.toml",
        "type": "object",
        "properties": properties | {_BACKENDS: backends},
        "additionalProperties": False,
        "$defs": {name: _table_schema(table) for name, table in tables.items()},
    }


# ---- sources ----------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> dict[Name, _Given]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as error:
        raise invalid("config", f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid("config", f"{path} is not TOML: {error}") from None
    lines, folder = _lines(text), path.absolute().parent
    backends = tables.pop(_BACKENDS, {})
    for section, table in tables.items():
        if section not in SECTIONS:
            raise invalid(section[:_SHOWN], f"unknown key; known: {', '.join([*SECTIONS, _BACKENDS])}")
        if not isinstance(table, dict):
            raise invalid(section, f"expected a table, such as [{section}]")
    if not isinstance(backends, dict) or not all(isinstance(table, dict) for table in backends.values()):
        raise invalid(_BACKENDS, "expected tables, such as [backends.default]")
    found: dict[Name, _Given] = {}
    every: dict[Name, dict[str, Any]] = {(section,): table for section, table in tables.items()}
    every |= {(_BACKENDS, name): {"kind": None, **table} for name, table in backends.items()}
    for name, table in every.items():
        for key_name, value in _with_url(".".join(name), table).items():
            line = lines.get((*name, key_name)) or lines.get((*name, "url_env" if key_name == "url" else key_name))
            found[*name, key_name] = _Given(value, f"{path.name}:{line}" if line else path.name, folder)
    return found


def _lines(text: str) -> dict[Name, int]:
    """Line numbers of keys in the plainest notation; other keys have none."""
    found: dict[Name, int] = {}
    table: Name = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TABLE.fullmatch(line):
            table = tuple(part.strip(" \"'") for part in header[1].split("."))
        elif named := _LINE.match(line):
            found.setdefault((*table, named[1]), number)
    return found


def _with_url(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Translate `url_env`, the older spelling of an `env:` reference."""
    given = dict(table)
    variable = given.pop("url_env", None)
    if variable is not None:
        if "url" in given:
            raise invalid(f"{where}.url", "give either url, or url_env: the name of an environment variable that holds it")
        if not isinstance(variable, str):
            raise invalid(f"{where}.url_env", "expected the name of an environment variable")
        given["url"] = f"env:{variable}"
    return given


def _from_environment(environment: Mapping[str, str], backends: set[str]) -> dict[Name, _Given]:
    """Read variables such as SLUICEWAY_SERVER__LISTEN. Those without a double underscore belong to other programs."""
    spelt = {re.sub("[^A-Z0-9]", "_", name.upper()): name for name in sorted(backends)}
    found: dict[Name, _Given] = {}
    for variable, value in environment.items():
        section, separator, rest = variable.removeprefix(PREFIX).lower().partition("__")
        if not separator or not variable.startswith(PREFIX):
            continue
        name: Name = (section, rest)
        if section == _BACKENDS:
            backend, separator, key_name = rest.rpartition("__")
            if not separator:
                raise invalid(variable[:_SHOWN], f"a backend's key is set by {PREFIX}BACKENDS__NAME__KEY")
            name = (_BACKENDS, spelt.get(backend.upper(), backend), key_name)
        elif section not in SECTIONS:
            raise invalid(variable[:_SHOWN], f"there is no section {section[:_SHOWN]!r}; known: {', '.join([*SECTIONS, _BACKENDS])}")
        if name[-1] == "url_env":
            name, value = (*name[:-1], "url"), f"env:{value}"
        found[name] = _Given(value, variable, Path.cwd())
    return found


def _flag(name: str) -> str:
    section, _, key_name = name.rpartition(".")
    plain = section == "server" or name == "cluster.advertise"
    return "--" + (key_name if plain else f"{section}-{key_name}").replace("_", "-")


# ---- values -----------------------------------------------------------------------------------------------------


def _backend(name: str, given: Mapping[Name, _Given], environment: Mapping[str, str]) -> BackendSettings:
    where = f"{_BACKENDS}.{name[:64]}"
    try:
        check_queue_name(name)
    except SluicewayError:
        raise invalid(where, "a backend's name is 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -") from None
    kind = given.get((_BACKENDS, name, "kind"))
    if kind is None or not isinstance(kind.value, str) or kind.value not in KINDS:
        raise invalid(f"{where}.kind", f"expected one of {', '.join(KINDS)}")
    own = {key_name: each for key_name, each in given.items() if key_name != (_BACKENDS, name, "kind")}
    settings = _table(KINDS[kind.value], (_BACKENDS, name), own, environment)
    assert isinstance(settings, BackendSettings)
    return settings


def _table(table: type[Settings], name: Name, given: Mapping[Name, _Given], environment: Mapping[str, str]) -> Settings:
    where, known = ".".join(name), {each.name: each for each in keys(table)}
    values: dict[str, Any] = {}
    for full, each in given.items():
        if full[:-1] != name:
            continue
        if full[-1] not in known:
            raise invalid(where, f"unknown key `{full[-1][:_SHOWN]}` ({each.origin}); known: {', '.join(known)}")
        values[full[-1]] = _value(known[full[-1]], f"{where}.{full[-1]}", each, environment)
    for each_key in known.values():
        if each_key.required and each_key.name not in values:
            what = "a URL or connection string, or env:NAME or file:PATH that holds it" if each_key.name == "url" else each_key.meaning
            raise invalid(f"{where}.{each_key.name}", f"required: {what}")
    return table(**values)


def _value(key: Key, name: str, given: _Given, environment: Mapping[str, str]) -> Any:
    """Convert and check the value of one key."""
    value, where = given.value, f" ({given.origin})"
    # Values from variables and flags are text, whatever the key's type.
    strict = not given.origin.startswith((PREFIX, "--"))
    try:
        if key.form == "duration":
            return _duration(value, name)
        checked = msgspec.convert(value, key.type, strict=strict)
    except SluicewayError as error:
        raise SluicewayError(error.code, error.detail + where, name) from None
    except msgspec.ValidationError as error:
        raise invalid(name, plain_error(str(error).removesuffix(" - at `$`")) + where) from None
    if key.form == "path" and checked:
        return str(given.folder / checked)
    if key.hidden and checked:
        return _placed(name, _secret(key, name, checked, given, environment), given.folder)
    return checked


def _duration(given: object, name: str) -> Millis:
    millis = parse_duration(given, name)
    if not 0 < millis <= MAX_REQUEST_TIMEOUT:
        raise invalid(name, f"expected more than 0s and at most {MAX_REQUEST_TIMEOUT // 60_000}m")
    return millis


def _secret(key: Key, name: str, text: str, given: _Given, environment: Mapping[str, str]) -> str:
    """Resolve a reference to a secret. No error reveals any of it."""
    secret = read_secret(text, name, environment, given.folder, f" ({given.origin})")
    if secret is not None:
        return secret
    if key.form == "secret":
        raise invalid(name, f"expected env:NAME or file:PATH that holds the secret, not the secret itself ({given.origin})")
    return text


def _placed(name: str, text: str, folder: Path) -> str:
    """Resolve the path in the URL of a SQLite file against the same folder as other paths."""
    path = text.removeprefix(SQLITE_META)
    return f"{SQLITE_META}{folder / path}" if name == "cluster.meta" and path not in ("", text) else text


def _check_server(configuration: Configuration) -> None:
    server, trace = configuration.server, configuration.trace
    listen = parse_address(server.listen, "server.listen")
    if server.admin_listen:
        admin = parse_address(server.admin_listen, "server.admin_listen")
        if admin.port == listen.port != 0:
            raise invalid("server.admin_listen", "expected another port than that of server.listen")
    if bool(server.tls_certificate) != bool(server.tls_key):
        missing = "server.tls_key" if server.tls_certificate else "server.tls_certificate"
        raise invalid(missing, "TLS needs both tls_certificate and tls_key")
    if trace.endpoint and not trace.endpoint.startswith(("http://", "https://")):
        raise invalid("trace.endpoint", "expected a URL that begins with http:// or https://")


def _check_cluster(configuration: Configuration) -> None:
    server, cluster = configuration.server, configuration.cluster
    if cluster.meta and not _META.fullmatch(cluster.meta):
        # The value may hold a password, so the error does not quote it.
        raise invalid(
            "cluster.meta",
            "expected sqlite:PATH, postgresql://USER@HOST/DATABASE, etcd://HOST:PORT or s3://BUCKET/FOLDER, or env:NAME or file:PATH",
        )
    if cluster.times:
        _check_times(cluster.times)
    check_zone(cluster.zone, "cluster.zone")
    _check_name(cluster.name)
    if cluster.advertise:
        _check_advertise(cluster, server.workers)
    elif cluster.spans_machines and is_any(parse_address(server.listen, "server.listen").host):
        why = f"other machines cannot derive this instance's address from {server.listen}; set its URL, such as http://HOST:PORT"
        raise invalid("cluster.advertise", f"required: {why}")
    if configuration.is_clustered and any(isinstance(each, MemoryBackend) for each in configuration.backends.values()):
        field = "cluster.meta" if cluster.meta else "server.workers"
        raise invalid(field, "a memory backend belongs to one process; use another kind, or a single server without a cluster")


def _check_name(name: str) -> None:
    try:
        check_queue_name(name)
    except SluicewayError:
        detail = f"{name[:_SHOWN]!r} is not a name: 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -"
        raise invalid("cluster.name", detail) from None


def _check_times(times: Mapping[str, Millis]) -> None:
    """Check the times against the defaults. Against a cluster's own parameters they are checked when they are applied."""
    from sluiceway.cluster.ownership import PARAMETERS
    from sluiceway.core.group.group_records import with_times

    try:
        with_times(PARAMETERS, times)
    except SluicewayError as error:
        raise invalid(f"cluster.{error.field}", error.detail.removeprefix(f"{error.field}: ")) from None


def _check_advertise(cluster: ClusterSettings, workers: int) -> None:
    field, shown = "cluster.advertise", repr(cluster.advertise[:_SHOWN])
    try:
        parts = urlsplit(cluster.advertise)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise invalid(field, f"{shown} is not a URL such as http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise invalid(field, f"{shown} is not a URL such as http://HOST:PORT, with nothing after it")
    if is_any(host):
        raise invalid(field, f"{host} is not an address that other instances can reach; give this machine's name or address")
    if workers > 1 and port is not None:
        raise invalid(
            field, f"each of the {workers} server processes has its own port; give the URL without a port, such as {parts.scheme}://{host}"
        )


def is_any(host: str) -> bool:
    """Whether the host means all addresses of this machine, and so none that another machine could call."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


# ---- output -----------------------------------------------------------------------------------------------------


def _written(key: Key, settings: Settings) -> Any:
    """Return the value in the file's notation, a secret masked."""
    value = getattr(settings, key.name)
    if key.hidden and value:
        return MASK
    return format_duration(value) if key.form == "duration" and value is not None else value


def _table_schema(table: type[Settings]) -> dict[str, Any]:
    own: dict[str, Any] = msgspec.json.schema(table, ref_template="{name}")
    (described,) = own["$defs"].values()
    for each in keys(table):
        member = described["properties"][each.name]
        if each.form == "duration":
            unset = each.default is None
            member.pop("anyOf", None)
            member |= {"type": ["string", "null"] if unset else "string", "examples": ["500ms", "30s", "1m30s"]}
            member["default"] = None if unset else format_duration(each.default)
        if each.form == "secret":
            member["pattern"] = "^((env|file):.+)?$"
        member["description"] += "; a change needs a restart" if each.restart else "; can change live"
    if table is PostgresBackend:
        described["properties"]["url_env"] = {"type": "string", "description": 'the older spelling of url = "env:NAME"'}
        described["required"].remove("url")
        described["oneOf"] = [{"required": ["url"]}, {"required": ["url_env"]}]
    return dict(described)
