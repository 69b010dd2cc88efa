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

    listen: Annotated[str, key("HOST:PORT of the API; port 0 takes a free one", restart=True)] = DEFAULT_LISTEN
    admin_listen: Annotated[
        str, key("HOST:PORT that alone serves what is for administrators, and /metrics; empty: listen serves that too", restart=True)
    ] = ""
    auth: Annotated[
        Literal["auto", "keys", "none"],
        key(
            "whether callers need an API key; auto: unless all listeners are on loopback addresses and there is no admin_key", restart=True
        ),
    ] = "auto"
    admin_key: Annotated[
        str, key("an API key with the scope admin that needs no record, to make the first ones", "secret", restart=True)
    ] = ""
    tls_certificate: Annotated[
        str, key("PEM file with the certificate and those between it and its root; empty: no TLS", "path", restart=True)
    ] = ""
    tls_key: Annotated[str, key("PEM file with the certificate's private key", "path", restart=True)] = ""
    shutdown_timeout: Annotated[Millis, key("what requests in flight have to end once the server stops", "duration", restart=True)] = (
        SHUTDOWN_TIMEOUT
    )
    audit_entries: Annotated[
        int, Meta(ge=MIN_AUDIT_ENTRIES, le=MAX_AUDIT_ENTRIES), key("how many entries of the audit trail are kept, the newest")
    ] = AUDIT_ENTRIES
    disk_reserve: Annotated[
        int,
        Meta(ge=0),
        key(
            "bytes that produces leave free on each disk, but no more than a quarter of it; 0: none",
            restart=True,
        ),
    ] = DISK_RESERVE
    new_queues: Annotated[
        Literal["safe", "plain"],
        key(
            "settings that a call to create a queue does not name; safe: at most 20 attempts, a retry back-off of 1s to 10m, a dead queue; "
            "plain: none of them",
            restart=True,
        ),
    ] = "safe"
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS), key("processes that serve the data directory together", restart=True)] = 1


class ClusterSettings(Settings, frozen=True):
    """Membership in a cluster that divides the partitions."""

    meta: Annotated[
        str,
        key(
            "the store that all instances of the cluster share: sqlite:PATH, postgresql://… or etcd://HOST:PORT; empty: no cluster",
            "credential",
            restart=True,
        ),
    ] = ""
    advertise: Annotated[
        str, key("URL by which other instances reach this one; with several workers without a port; empty: by listen", restart=True)
    ] = ""
    ca: Annotated[
        str,
        key("PEM file with the authorities whose certificates other instances have; empty: those of the system", "path", restart=True),
    ] = ""
    strategy: Annotated[
        Literal["", "rounds", "claims"],
        key("how the instances divide the partitions, for all of them; empty: as the cluster has it, and a new one by rounds"),
    ] = ""
    settle_timeout: Annotated[
        Millis | None, key("a round is sealed once no instance has joined it for so long; not set: as the cluster has it", "duration")
    ] = None
    round_interval: Annotated[Millis | None, key("the least between two rounds; not set: as the cluster has it", "duration")] = None
    heartbeat_interval: Annotated[Millis | None, key("there is a round at least so often; not set: as the cluster has it", "duration")] = (
        None
    )
    beat_interval: Annotated[
        Millis | None, key("how often an instance shows that it lives; not set: as the cluster has it", "duration")
    ] = None
    lease_timeout: Annotated[
        Millis | None,
        key("an instance that could not show it for so long serves nothing of its own; not set: as the cluster has it", "duration"),
    ] = None
    member_timeout: Annotated[
        Millis | None,
        key("an instance that was not heard of for so long is given up; not set: as the cluster has it", "duration"),
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

    format: Annotated[Literal["text", "json"], key("lines for people, or one JSON object per line")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], key("the least that is logged")] = "info"


class LimitSettings(Settings, frozen=True):
    """Default rate limits of callers. A key's own rates take precedence."""

    requests_per_second: Annotated[int, Meta(ge=0, le=MAX_KEY_RATE), key("requests of each API key; 0: no limit")] = 0
    bytes_per_second: Annotated[int, Meta(ge=0, le=MAX_KEY_RATE), key("bytes of request bodies of each API key; 0: no limit")] = 0


class TraceSettings(Settings, frozen=True):
    """Export of OpenTelemetry traces."""

    endpoint: Annotated[str, key("URL that takes OTLP over HTTP; empty: no traces", restart=True)] = ""


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
