"""The configuration: what may be said and where, what is refused, where each value came from, and that no secret gets out."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from jsonschema_rs import validator_for

from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.instance.configuration import Loaded, check, load, schema, shown
from sluiceway.kernel.address import parse_address
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.stores import open_store
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings, MemoryBackend, PostgresBackend, SqliteBackend
from sluiceway.model.configuration import (
    SECTIONS,
    ClusterSettings,
    Configuration,
    LimitSettings,
    LogSettings,
    ServerSettings,
    TraceSettings,
)
from sluiceway.model.settings import Settings, keys
from sluiceway.testing.drive import driven

SECRET = "hunter2"
URL = f"postgresql://u:{SECRET}@db.example/q"
TABLES: list[type[Settings]] = [*SECTIONS.values(), SqliteBackend, PostgresBackend, MemoryBackend]
EVERYTHING = f"""
[server]
listen = "0.0.0.0:80"
admin_listen = "127.0.0.1:81"
auth = "keys"
admin_key = "file:admin.key"
tls_certificate = "tls/cert.pem"
tls_key = "/etc/key.pem"
shutdown_timeout = "5s"
workers = 4

[cluster]
meta = "env:META_URL"
advertise = "https://queue-1.example"
strategy = "claims"

[log]
format = "json"
level = "debug"

[limits]
requests_per_second = 100
bytes_per_second = 1000000

[trace]
endpoint = "http://collector:4318"

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

[backends.third]
kind = "postgres"
url = "file:third.url"
"""


def read(folder: Path, text: str, **environment: str) -> Loaded:
    path = folder / "sluiceway.toml"
    path.write_text(text)
    return load(path, environment)


def backends(folder: Path, text: str, **environment: str) -> dict[str, BackendSettings]:
    return dict(read(folder, text, **environment).configuration.backends)


def everything(folder: Path) -> Loaded:
    (folder / "admin.key").write_text("the-admin-key\n")
    (folder / "third.url").write_text(f"{URL}\n")
    return read(folder, EVERYTHING, OTHER_URL=URL, META_URL=URL)


# ---- what may be said ---------------------------------------------------------------------------------------------


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    assert everything(tmp_path).configuration == Configuration(
        server=ServerSettings(
            listen="0.0.0.0:80",
            admin_listen="127.0.0.1:81",
            auth="keys",
            admin_key="the-admin-key",
            tls_certificate=str(tmp_path / "tls" / "cert.pem"),
            tls_key="/etc/key.pem",
            shutdown_timeout=5_000,
            workers=4,
        ),
        cluster=ClusterSettings(meta=URL, advertise="https://queue-1.example", strategy="claims"),
        log=LogSettings(format="json", level="debug"),
        limits=LimitSettings(requests_per_second=100, bytes_per_second=1_000_000),
        trace=TraceSettings(endpoint="http://collector:4318"),
        backends={
            "default": SqliteBackend(path=str(tmp_path / "fast" / "disk"), partition_affinity=0.5),
            "shared": PostgresBackend(url=URL, schema="queues", write_timeout=2_500),
            "other": PostgresBackend(url=URL, partition_affinity=0),
            "third": PostgresBackend(url=URL),
        },
    )
    assert backends(tmp_path, '[backends.m]\nkind = "memory"') == {"m": MemoryBackend()}
    assert backends(tmp_path, '[backends.d]\nkind = "sqlite"\npath = "/srv/queue"') == {"d": SqliteBackend(path="/srv/queue")}


@pytest.mark.parametrize("text", ["", "# nothing yet", "[backends]", "[server]"])
def test_a_file_that_says_nothing_means_the_defaults(tmp_path: Path, text: str) -> None:
    loaded = read(tmp_path, text)
    assert loaded.configuration == load(None, {}).configuration == Configuration()
    assert loaded.configuration.backends == DEFAULT_BACKENDS
    assert loaded.origins == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[backends", "not TOML"),
        ("[backend.default]", "backend: unknown key; known: server, cluster, log, limits, trace, backends"),
        ("server = 3", "server: expected a table, such as [server]"),
        ("backends = 3", "backends: expected tables"),
        ("[backends]\ndefault = 3", "backends: expected tables"),
        ("[server]\nlistn = 'x'", "server: unknown key `listn` (sluiceway.toml:2); known: listen, admin_listen"),
        ("[server]\nlisten = 3", "server.listen: expected a string, not an integer (sluiceway.toml:2)"),
        ("[server]\nlisten = 'nowhere'", "server.listen: 'nowhere' is not HOST:PORT"),
        ("[server]\nlisten = ':65536'", "server.listen: ':65536' is not HOST:PORT"),
        ("[server]\nadmin_listen = 'x'", "server.admin_listen: 'x' is not HOST:PORT"),
        ("[server]\nadmin_listen = '[::1]:2319'", "server.admin_listen: expected another port"),
        ("[server]\nauth = 'maybe'", "server.auth: invalid enum value 'maybe' (sluiceway.toml:2)"),
        ("[server]\nshutdown_timeout = 10", "server.shutdown_timeout: expected a duration"),
        ("[server]\ntls_key = 'x'", "server.tls_certificate: TLS needs both"),
        ("[server]\ntls_certificate = 'x'", "server.tls_key: TLS needs both"),
        ("[server]\nworkers = 0", "server.workers: expected an integer, at least 1"),
        ("[server]\nworkers = 65", "server.workers: expected an integer, at most 64"),
        ("[server]\nworkers = 2\n[backends.m]\nkind = 'memory'", "server.workers: a memory backend belongs to one process"),
        ("[cluster]\nmeta = 'sqlite:/m'\n[backends.m]\nkind = 'memory'", "cluster.meta: a memory backend belongs to one process"),
        ("[cluster]\nmeta = 'sqlite:'", "cluster.meta: expected sqlite:PATH"),
        ("[cluster]\nmeta = 'etcd://'", "cluster.meta: expected sqlite:PATH"),
        (f"[cluster]\nmeta = 'mysql://u:{SECRET}@db/q'", "cluster.meta: expected sqlite:PATH"),
        ("[cluster]\nmeta = 'env:NOT_SET'", "cluster.meta: the environment variable 'NOT_SET' is not set (sluiceway.toml:2)"),
        ("[cluster]\nstrategy = 'luck'", "cluster.strategy: invalid enum value 'luck'"),
        ("[cluster]\nzone = 'north east'", "cluster.zone: 'north east' is not the name of a zone"),
        ("[cluster]\nadvertise = 'queue-1:2319'", "cluster.advertise: 'queue-1:2319' is not a URL"),
        ("[cluster]\nadvertise = 'http://:2319'", "cluster.advertise: 'http://:2319' is not a URL"),
        ("[cluster]\nadvertise = 'http://a:99999'", "cluster.advertise: 'http://a:99999' is not a URL"),
        ("[cluster]\nadvertise = 'http://a/b'", "cluster.advertise: 'http://a/b' is not a URL such as http://HOST:PORT, with nothing"),
        ("[cluster]\nadvertise = 'http://u@a'", "cluster.advertise: 'http://u@a' is not a URL"),
        ("[cluster]\nadvertise = 'http://0.0.0.0:80'", "cluster.advertise: 0.0.0.0 is not an address that other instances can reach"),
        ("[cluster]\nadvertise = 'http://[::]:80'", "cluster.advertise: :: is not an address that other instances can reach"),
        (
            "[server]\nworkers = 2\n[cluster]\nadvertise = 'http://a:80'",
            "cluster.advertise: each of the 2 server processes has its own port",
        ),
        (f"[server]\nlisten = '0.0.0.0:1'\n[cluster]\nmeta = '{URL}'", "cluster.advertise: required: other machines cannot derive"),
        (f"[server]\nlisten = '[::]:1'\n[cluster]\nmeta = '{URL}'", "cluster.advertise: required: other machines cannot derive"),
        ("[log]\nlevel = 'loud'", "log.level"),
        ("[limits]\nrequests_per_second = -1", "limits.requests_per_second: expected an integer, at least 0"),
        ("[limits]\nrequests_per_second = '3'", "limits.requests_per_second: expected an integer, not a string"),
        ("[trace]\nendpoint = 'collector:4318'", "trace.endpoint: expected a URL"),
        ("[backends.d]", "backends.d.kind: expected one of sqlite, postgres, s3, gcs, azure, memory"),
        ('[backends.d]\nkind = "oracle"', "backends.d.kind"),
        ("[backends.d]\nkind = []", "backends.d.kind"),
        ('[backends.d]\nkind = "sqlite"\npaht = "x"', "backends.d: unknown key `paht` (sluiceway.toml:3)"),
        ('[backends.d]\nkind = "memory"\npath = "x"', "backends.d: unknown key `path`"),
        ('[backends.d]\nkind = "sqlite"\npath = 3', "backends.d.path: expected a string"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = 1.1', "partition_affinity"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = nan', "partition_affinity"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = -0.1', "partition_affinity"),
        ('[backends.d]\nkind = "sqlite"\npartition_affinity = 0', "partition_affinity above 0"),
        ('[backends.d]\nkind = "sqlite"\nwrite_timeout = 10', "backends.d.write_timeout: expected a duration"),
        ('[backends.d]\nkind = "sqlite"\nwrite_timeout = "0s"', "backends.d.write_timeout: expected more than 0s"),
        ('[backends.d]\nkind = "sqlite"\nwrite_timeout = "16m"', "backends.d.write_timeout: expected more than 0s and at most 15m"),
        ('[backends."../etc"]\nkind = "sqlite"', "backends.../etc: a backend's name is"),
        ('[backends.""]\nkind = "sqlite"', "a backend's name is"),
        ('[backends.d]\nkind = "postgres"', "backends.d.url: required"),
        (f'[backends.d]\nkind = "postgres"\nurl = "{URL}"\nurl_env = "X"', "backends.d.url: give either"),
        ('[backends.d]\nkind = "postgres"\nurl_env = "NOT_SET"', "backends.d.url: the environment variable 'NOT_SET' is not set"),
        ('[backends.d]\nkind = "postgres"\nurl_env = 3', "backends.d.url_env"),
        (f'[backends.d]\nkind = "postgres"\nurl = "{URL}"\nschema = "a b"', "backends.d.schema: expected a string matching"),
        ('[backends.d]\nkind = "sqlite"\n[backends.m]\nkind = "memory"', "cannot be combined with others"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        read(tmp_path, text)
    assert refused.value.code == "invalid_request"
    assert named in refused.value.detail
    assert SECRET not in refused.value.detail


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SluicewayError, match=r"sluiceway\.toml cannot be read: No such file"):
        load(tmp_path / "sluiceway.toml", {})


@pytest.mark.parametrize(
    ("text", "clustered", "spans"),
    [
        ("", False, False),
        ("[server]\nlisten = '0.0.0.0:1'\nworkers = 2", True, False),
        ("[server]\nlisten = '0.0.0.0:1'\n[cluster]\nmeta = 'sqlite:/m'", True, False),
        (f"[cluster]\nmeta = '{URL}'", True, True),
        ("[cluster]\nmeta = 'etcds://e:2379'", True, True),
        ("[server]\nlisten = '0.0.0.0:1'\n[cluster]\nmeta = 'etcd://e:2379'\nadvertise = 'http://[fd00::1]:1'", True, True),
        (f"[server]\nworkers = 2\n[cluster]\nmeta = '{URL}'\nadvertise = 'http://a'", True, True),
    ],
)
def test_what_makes_a_cluster(tmp_path: Path, text: str, clustered: bool, spans: bool) -> None:
    configuration = read(tmp_path, text).configuration
    assert (configuration.is_clustered, configuration.cluster.spans_machines) == (clustered, spans)


def test_the_path_of_a_meta_store_is_relative_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "meta.url").write_text("sqlite:shared/meta.sqlite\n")
    for text in ("[cluster]\nmeta = 'sqlite:shared/meta.sqlite'", "[cluster]\nmeta = 'file:meta.url'"):
        assert read(tmp_path, text).configuration.cluster.meta == f"sqlite:{tmp_path}/shared/meta.sqlite"
    flags = {"cluster.meta": "sqlite:meta.sqlite", "cluster.advertise": "http://a:1"}
    loaded = load(None, {}, flags)
    assert loaded.configuration.cluster.meta == f"sqlite:{Path.cwd()}/meta.sqlite"
    assert loaded.origins == {"cluster.meta": "--cluster-meta", "cluster.advertise": "--advertise"}


@pytest.mark.parametrize(
    ("text", "address"),
    [(":80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("host.example:65535", ("host.example", 65_535))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, "server.listen") == address


# ---- secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("env:NOT_SET", "server.admin_key: the environment variable 'NOT_SET' is not set (sluiceway.toml:2)"),
        ("env:", "the environment variable '' is not set"),
        ("file:gone", "gone cannot be read: No such file or directory (sluiceway.toml:2)"),
        ("file:empty", "empty is empty (sluiceway.toml:2)"),
        ("file:binary", "binary cannot be read: it is not UTF-8 text"),
        (f"slw_admin_{SECRET}", "server.admin_key: expected env:NAME or file:PATH that holds the secret, not the secret itself"),
    ],
)
def test_a_secret_that_is_not_there_is_named_by_its_place(tmp_path: Path, value: str, named: str) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(SECRET.encode() + b"\xff")
    with pytest.raises(SluicewayError) as refused:
        read(tmp_path, f"[server]\nadmin_key = '{value}'")
    assert named in refused.value.detail
    assert SECRET not in refused.value.detail


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    loaded = everything(tmp_path)
    for text in (repr(loaded), str(shown(loaded)), str(shown(loaded, origin=True)), str(loaded.configuration.server.__rich_repr__())):
        assert "***" in text
        assert SECRET not in text
        assert "the-admin-key" not in text


def test_which_keys_hold_secrets() -> None:
    assert [(table.__name__, key.name) for table in TABLES for key in keys(table) if key.hidden] == [
        ("ServerSettings", "admin_key"),
        ("ClusterSettings", "meta"),
        ("PostgresBackend", "url"),
    ]


# ---- where values come from ---------------------------------------------------------------------------------------


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "sluiceway.toml"
    path.write_text("[server]\nlisten = ':1'\nauth = 'none'\n\n# who reads them\n[log]\nlevel = 'debug'\nformat = 'json'\n")
    environment = {"SLUICEWAY_SERVER__LISTEN": ":2", "SLUICEWAY_LOG__LEVEL": "error", "SLUICEWAY_URL": "x", "OTHER__THING": "x"}
    loaded = load(path, environment, {"server.listen": ":3", "log.level": "warning"})
    assert (loaded.configuration.server.listen, loaded.configuration.server.auth) == (":3", "none")
    assert loaded.configuration.log == LogSettings(format="json", level="warning")
    assert loaded.origins == {
        "server.listen": "--listen",
        "server.auth": "sluiceway.toml:3",
        "log.level": "--log-level",
        "log.format": "sluiceway.toml:8",
    }
    without_flags = load(path, environment)
    assert without_flags.configuration.server.listen == ":2"
    assert without_flags.origins["server.listen"] == "SLUICEWAY_SERVER__LISTEN"
    assert shown(without_flags, origin=True)["log"]["level"] == {"value": "error", "origin": "SLUICEWAY_LOG__LEVEL", "restart": False}
    assert shown(without_flags, origin=True)["server"]["tls_key"] == {"value": "", "origin": "default", "restart": True}


def test_it_is_read_again_from_the_same_places(tmp_path: Path) -> None:
    path = tmp_path / "sluiceway.toml"
    path.write_text("")
    before = load(path, {"SLUICEWAY_LOG__LEVEL": "error"}, {"server.listen": ":3"})
    assert before.again() == before
    path.write_text("[limits]\nrequests_per_second = 7")
    again = before.again().configuration
    assert (again.limits.requests_per_second, again.log.level, again.server.listen) == (7, "error", ":3")


def test_the_environment_may_set_every_kind_of_value(tmp_path: Path) -> None:
    (tmp_path / "url").write_text(URL)
    environment = {
        "SLUICEWAY_LIMITS__REQUESTS_PER_SECOND": "12",
        "SLUICEWAY_SERVER__SHUTDOWN_TIMEOUT": "3s",
        "SLUICEWAY_SERVER__ADMIN_KEY": "env:THE_KEY",
        "THE_KEY": "abc",
        "SLUICEWAY_BACKENDS__ONE_TWO__PARTITION_AFFINITY": "0.5",
        "SLUICEWAY_BACKENDS__SHARED__KIND": "postgres",
        "SLUICEWAY_BACKENDS__SHARED__URL": f"file:{tmp_path / 'url'}",
    }
    # A backend of the file is found whatever characters its name has that a variable's name has not.
    configuration = read(tmp_path, "[backends.One-Two]\nkind = 'sqlite'", **environment).configuration
    assert configuration.limits.requests_per_second == 12
    assert (configuration.server.shutdown_timeout, configuration.server.admin_key) == (3_000, "abc")
    assert configuration.backends == {"One-Two": SqliteBackend(partition_affinity=0.5), "shared": PostgresBackend(url=URL)}


def test_the_environment_may_change_the_backend_that_is_there_without_any() -> None:
    configuration = load(None, {"SLUICEWAY_BACKENDS__DEFAULT__WRITE_TIMEOUT": "1s"}).configuration
    assert configuration.backends == {"default": SqliteBackend(write_timeout=1_000)}


def test_a_variable_takes_the_place_of_either_spelling_of_a_url(tmp_path: Path) -> None:
    text = "[backends.shared]\nkind = 'postgres'\nurl_env = 'GONE'"
    loaded = read(tmp_path, text, SLUICEWAY_BACKENDS__SHARED__URL_ENV="HERE", HERE=URL)
    assert loaded.configuration.backends == {"shared": PostgresBackend(url=URL)}
    assert loaded.origins["backends.shared.url"] == "SLUICEWAY_BACKENDS__SHARED__URL_ENV"


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("SLUICEWAY_SERVR__LISTEN", "x", "SLUICEWAY_SERVR__LISTEN: there is no section 'servr'"),
        ("SLUICEWAY_SERVER__LISTN", "x", "server: unknown key `listn` (SLUICEWAY_SERVER__LISTN)"),
        ("SLUICEWAY_BACKENDS__X", "x", "SLUICEWAY_BACKENDS__X: a backend's key is set by SLUICEWAY_BACKENDS__NAME__KEY"),
        ("SLUICEWAY_BACKENDS__X__PATH", "x", "backends.x.kind: expected one of"),
        (
            "SLUICEWAY_LIMITS__REQUESTS_PER_SECOND",
            "many",
            "limits.requests_per_second: expected an integer, not a string (SLUICEWAY_LIM",
        ),
        ("SLUICEWAY_SERVER__SHUTDOWN_TIMEOUT", "5", "server.shutdown_timeout: '5' is not a duration"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variable: str, value: str, named: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        load(None, {variable: value})
    assert named in refused.value.detail


def test_a_key_that_is_written_in_no_plain_way_is_of_the_file(tmp_path: Path) -> None:
    loaded = read(tmp_path, "backends = { d = { kind = 'sqlite' } }\n[log]\nlevel = 'info'\n")
    assert loaded.origins == {"backends.d.kind": "sluiceway.toml", "log.level": "sluiceway.toml:3"}


# ---- check, schema ------------------------------------------------------------------------------------------------


def test_check_names_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("")
    problems = check(read(tmp_path, "[server]\ntls_certificate = 'cert.pem'\ntls_key = 'key.pem'"))
    assert [problem.partition(":")[0] for problem in problems] == ["server.tls_key"]
    assert check(read(tmp_path, "")) == []


def test_the_schema_takes_what_is_right_and_refuses_what_is_not(tmp_path: Path) -> None:
    validator = validator_for(schema())
    assert [error.message for error in validator.iter_errors(tomllib.loads(EVERYTHING))] == []
    as_shown = shown(load(None, {}))
    as_shown["backends"]["default"].pop("path")
    assert [error.message for error in validator.iter_errors(as_shown)] == []
    refused: list[dict[str, dict[str, object]]] = [
        {"servr": {}},
        {"server": {"listn": "x"}},
        {"server": {"auth": "maybe"}},
        {"server": {"admin_key": SECRET}},
        {"server": {"shutdown_timeout": 10}},
        {"backends": {"d": {"kind": "oracle"}}},
        {"backends": {"d": {"kind": "postgres"}}},
        {"backends": {"d": {"kind": "sqlite", "url": "x"}}},
    ]
    for wrong in refused:
        assert not validator.is_valid(wrong), wrong


def test_every_key_says_what_it_does_and_whether_it_takes_a_restart() -> None:
    for table in schema()["$defs"].values():
        for name, member in table["properties"].items():
            if name not in ("kind", "url_env"):
                assert member["description"].endswith(("; can change live", "; a change needs a restart")), name


def test_the_documentation_has_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    for table in TABLES:
        for key in keys(table):
            of_key = [row for row in rows if f"`{key.name}`" in row[0]]
            assert of_key, f"{table.__name__}.{key.name} is not in docs/reference/configuration.md"
            assert any(row[-2] == ("restart" if key.restart else "live") for row in of_key), key.name
            default = format_duration(key.default) if key.form == "duration" and key.default is not None else key.default
            assert not default or any(str(default) in row[-3] for row in of_key), key.name


# ---- stores -------------------------------------------------------------------------------------------------------


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


def test_a_kind_of_backend_without_a_store_is_an_error_and_not_memory(tmp_path: Path) -> None:
    class TapeBackend(BackendSettings, frozen=True, tag="tape"):
        pass

    with pytest.raises(TypeError, match="TapeBackend"):
        open_store("default", TapeBackend(), tmp_path)
