"""Configuration of a server: each key with its meaning, its default, and whether it can change while the server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluiceway.kernel.address import DEFAULT_LISTEN
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import AUDIT_ENTRIES, MAX_AUDIT_ENTRIES, MAX_KEY_RATE, MAX_WORKERS, MIN_AUDIT_ENTRIES
from sluiceway.model.backends import DEFAULT_BACKENDS, BackendSettings
from sluiceway.model.settings import Settings, key

SQLITE_META = "sqlite:"
SHUTDOWN_TIMEOUT: Millis = 10_000
"""Below the time that service managers commonly wait before they kill."""
DISK_RESERVE = 64 << 20
"""Bytes: room for the logs of some partitions and of the meta store, which grow to 4 MiB each."""


CLUSTER_TIMES = ("settle_timeout", "round_interval", "heartbeat_interval", "beat_interval", "lease_timeout", "member_timeout")
"""The timing parameters in [cluster], all of them; the group's record has them, and all members follow it."""


class ServerSettings(Settings, frozen=True):
    """Listeners, TLS and authentication of the server."""

    listen: Annotated[str, key("HOST:PORT of the API; port 0 picks a free port", restart=True)] = DEFAULT_LISTEN
    admin_listen: Annotated[
        str, key("HOST:PORT of a second listener for administrators' calls and /metrics; empty: they are on `listen`", restart=True)
    ] = ""
    auth: Annotated[
        Literal["auto", "keys", "none"],
        key(
            "whether callers need an API key; auto: yes, unless all listeners are on loopback addresses and no admin_key is set",
            restart=True,
        ),
    ] = "auto"
    admin_key: Annotated[
        str, key("a secret that works as an API key with the scope admin, for creating the first keys", "secret", restart=True)
    ] = ""
    tls_certificate: Annotated[str, key("PEM file of the certificate and its intermediates; empty: no TLS", "path", restart=True)] = ""
    tls_key: Annotated[str, key("PEM file of the certificate's private key", "path", restart=True)] = ""
    shutdown_timeout: Annotated[Millis, key("time for requests in flight to finish when the server stops", "duration", restart=True)] = (
        SHUTDOWN_TIMEOUT
    )
    audit_entries: Annotated[
        int, Meta(ge=MIN_AUDIT_ENTRIES, le=MAX_AUDIT_ENTRIES), key("number of audit entries kept; older ones are removed")
    ] = AUDIT_ENTRIES
    disk_reserve: Annotated[
        int,
        Meta(ge=0),
        key(
            "bytes that produces leave free on each disk, at most a quarter of the disk; 0: no reserve",
            restart=True,
        ),
    ] = DISK_RESERVE
    new_queues: Annotated[
        Literal["safe", "plain"],
        key(
            "defaults of new queues; safe: at most 20 attempts, a retry back-off of 1s to 10m, a dead queue; plain: none of these",
            restart=True,
        ),
    ] = "safe"
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS), key("number of processes that share the data directory", restart=True)] = 1


class ClusterSettings(Settings, frozen=True):
    """Membership in a cluster that divides the partitions."""

    meta: Annotated[
        str,
        key(
            "meta store that all instances of the cluster share: sqlite:PATH, postgresql://…, etcd://HOST:PORT or s3://BUCKET/FOLDER; "
            "empty: no cluster",
            "credential",
            restart=True,
        ),
    ] = ""
    advertise: Annotated[
        str,
        key(
            "URL at which other instances reach this one, without a port if `workers` is above 1; empty: taken from `listen`",
            restart=True,
        ),
    ] = ""
    name: Annotated[
        str,
        key("name of this instance; each start adds a suffix of its own. Several instances may have the same", restart=True),
    ] = "instance"
    zone: Annotated[
        str,
        key(
            "failure domain of this instance, such as an availability zone; each queue's partitions are spread over the zones",
            restart=True,
        ),
    ] = ""
    ca: Annotated[
        str,
        key("PEM file of the authorities that issue the other instances' certificates; empty: those of the system", "path", restart=True),
    ] = ""
    strategy: Annotated[
        Literal["", "rounds", "claims"],
        key("how all instances divide the partitions; empty: the cluster's current strategy, rounds for a new cluster"),
    ] = ""
    settle_timeout: Annotated[
        Millis | None,
        key("quiet time without a new participant before a round is sealed; not set: the cluster's current value", "duration"),
    ] = None
    round_interval: Annotated[Millis | None, key("minimum time between two rounds; not set: the cluster's current value", "duration")] = (
        None
    )
    heartbeat_interval: Annotated[
        Millis | None, key("maximum time between two rounds; not set: the cluster's current value", "duration")
    ] = None
    beat_interval: Annotated[
        Millis | None, key("time between two heartbeats of an instance; not set: the cluster's current value", "duration")
    ] = None
    lease_timeout: Annotated[
        Millis | None,
        key(
            "time without a stored heartbeat after which an instance stops serving its partitions; not set: the cluster's current value",
            "duration",
        ),
    ] = None
    member_timeout: Annotated[
        Millis | None,
        key(
            "time without a heartbeat after which the others take over an instance's partitions; not set: the cluster's current value",
            "duration",
        ),
    ] = None

    @property
    def times(self) -> dict[str, Millis]:
        """Timing parameters set in this configuration."""
        return {name: value for name in CLUSTER_TIMES if (value := getattr(self, name)) is not None}

    def changed_times(self, before: ClusterSettings) -> dict[str, Millis]:
        """Timing parameters that are set and differ from `before`."""
        return {name: value for name, value in self.times.items() if value != getattr(before, name)}

    @property
    def spans_machines(self) -> bool:
        """Whether instances on other machines can be members. A SQLite file is confined to one machine."""
        return bool(self.meta) and not self.meta.startswith(SQLITE_META)


class LogSettings(Settings, frozen=True):
    """Log of the server, on its standard error."""

    format: Annotated[Literal["text", "json"], key("text: lines for people; json: one object per line")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], key("lowest level that is logged")] = "info"


class LimitSettings(Settings, frozen=True):
    """Default rate limits of callers. A key's own rates take precedence."""

    requests_per_second: Annotated[int, Meta(ge=0, le=MAX_KEY_RATE), key("requests per second of each API key; 0: no limit")] = 0
    bytes_per_second: Annotated[
        int, Meta(ge=0, le=MAX_KEY_RATE), key("bytes per second of request bodies of each API key; 0: no limit")
    ] = 0


class TraceSettings(Settings, frozen=True):
    """Export of OpenTelemetry traces."""

    endpoint: Annotated[str, key("URL of a collector for OTLP over HTTP; empty: no traces", restart=True)] = ""


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checked configuration. Durations are milliseconds, paths absolute, secrets the values themselves; `repr` shows no secret."""

    server: ServerSettings = ServerSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()
    limits: LimitSettings = LimitSettings()
    trace: TraceSettings = TraceSettings()
    backends: Mapping[str, BackendSettings] = msgspec.field(default_factory=lambda: dict(DEFAULT_BACKENDS))

    @property
    def is_clustered(self) -> bool:
        """Whether other processes may serve the same queues concurrently."""
        return bool(self.cluster.meta) or self.server.workers > 1


SECTIONS: dict[str, type[Settings]] = {
    "server": ServerSettings,
    "cluster": ClusterSettings,
    "log": LogSettings,
    "limits": LimitSettings,
    "trace": TraceSettings,
}
