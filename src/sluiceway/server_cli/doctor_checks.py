"""Checks of `sluiceway doctor`: each turns a finding into a state and a suggested fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.client import ProblemList

State = Literal["ok", "warning", "failed", "skipped"]

MAX_SKEW = 5.0
"""Maximum seconds between two clocks. The server's Date header has whole seconds, and slow answers add some."""
MIN_FREE = 1 << 30
"""Minimum free bytes: room for thirty of the largest requests, so there is time to act before the disk is full."""
FILES_PER_PARTITION = 3
"""The database, its write-ahead log and the log's index."""
SOON = 14
"""Days before an expiry at which to warn: enough time to get a replacement."""
OTHER_FILES = 1_024
"""Open files for connections and for the process itself."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check. `fix` is the suggested action, empty if none is needed. `figures`: numbers of the detail, with their units in
    their names."""

    name: str
    state: State
    detail: str
    fix: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def local(url: str) -> bool:
    import ipaddress

    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def transport(url: str, certificate: datetime | None, now: datetime) -> Check:
    """Whether the connection is encrypted. `certificate` is the expiry of the server's certificate."""
    if not url.startswith("https:"):
        if local(url):
            return Check("tls", "ok", "not needed: the server is on this machine")
        fix = "give the server tls_certificate and tls_key in [server] of its sluiceway.toml, and use an https URL"
        return Check("tls", "failed", "no TLS: keys and items can be read on the network", fix)
    if certificate is None:
        return Check("tls", "ok", "the server's certificate is trusted")
    days = (certificate - now).days
    detail = f"the server's certificate is trusted, until {certificate:%Y-%m-%d}"
    if days >= SOON:
        return Check("tls", "ok", detail)
    return Check("tls", "warning", f"{detail} ({days} days)", "renew the certificate; the server loads new files without a restart")


def unreachable(error: SluicewayError, url: str) -> Check:
    if "is not trusted" in error.detail:
        return Check("server", "failed", error.detail, "pass the certificate authority of the server: --ca-file FILE")
    if error.code == "outcome_unknown" and not url.startswith("https:"):
        return Check(
            "server", "failed", error.detail, "the server accepts connections but does not answer; if it uses TLS, use an https URL"
        )
    if local(url):
        return Check(
            "server", "failed", error.detail, "start a server: sluiceway dev; or pass its address: --url, SLUICEWAY_URL or a context"
        )
    return Check(
        "server", "failed", error.detail, "check that the server runs, that it listens on that address, and that no firewall blocks it"
    )


def versions(server: str | None, ours: str) -> Check:
    if server is None:
        return Check("server", "warning", "no version in its answer", "check that the URL is that of a Sluiceway server")
    if server == ours:
        return Check("server", "ok", f"version {server}")
    return Check("server", "warning", f"version {server}, but this program is {ours}", "upgrade the older one")


def clock(server: datetime | None, before: datetime, after: datetime) -> Check:
    """The skew of the server's clock. `before` and `after` are local times around its answer."""
    if server is None:
        return Check("clock", "skipped", "no time in the server's answer")
    ahead = max(0.0, (server - after).total_seconds()) or min(0.0, (server - before).total_seconds() + 1.0)
    if abs(ahead) <= MAX_SKEW:
        return Check("clock", "ok", f"within {MAX_SKEW:.0f} s of the server's clock")
    which = "ahead of" if ahead > 0 else "behind"
    fix = "synchronise both clocks by NTP: schedules, deadlines and key expiry follow the server's clock"
    return Check("clock", "failed", f"the server's clock is {abs(ahead):,.0f} s {which} this machine's", fix)


def server_time(ok: bool, detail: str) -> Check:
    """The server's own check of its clock."""
    fix = "" if ok else "synchronise the server's clock by NTP, then restart the server"
    return Check("server time", "ok" if ok else "failed", detail, fix)


def judged(found: ProblemList) -> Iterator[Check]:
    """What the server's judge finds wrong, most severe first; one check if it is nothing."""
    for each in found.items:
        detail = f"{each.subject}: {each.message}" + (f". Cause: {each.cause}" if each.cause else "")
        yield Check(each.kind, "failed" if each.severity == "critical" else "warning", detail, each.command)
    for name in found.silent:
        yield Check("problems", "warning", f"instance {name} did not answer, so its problems are not known", "sluiceway instance list")
    if not (found.items or found.silent):
        detail = f"none in {found.queues:,} queues" if found.watched else "the server has just started, and has not checked yet"
        yield Check("problems", "ok" if found.watched else "skipped", detail)


def readiness(problems: list[str]) -> Check:
    if not problems:
        return Check("ready", "ok", "all partitions available")
    return Check("ready", "failed", "; ".join(problems), "check the server's log, and the named disk or database")


def cluster(states: Mapping[str, str]) -> Check:
    """The state of each instance, as seen by the instance that answered."""
    wrong = ", ".join(f"{name} is {state}" for name, state in states.items() if state in ("silent", "joining"))
    if wrong:
        fix = "check that it runs and reaches the meta store: sluiceway doctor --url ADDRESS, with the address from sluiceway instance list"
        return Check("cluster", "warning", f"{len(states)} instances: {wrong}", fix)
    return Check("cluster", "ok", f"{len(states)} instances; the check `ready` covers only the one that answered")


def refused(error: SluicewayError, has_key: bool) -> Check:
    if error.code == "unauthenticated" and not has_key:
        fix = "set SLUICEWAY_API_KEY, or run: sluiceway context add NAME --url URL --api-key"
        return Check("key", "failed", "the server requires an API key, and none is set", fix)
    if error.code == "unauthenticated":
        return Check("key", "failed", "the server rejects this API key", "it may be revoked or expired; get a new one")
    return Check("key", "failed", error.detail, "see the error")


def accepted(has_key: bool, scopes: Sequence[str], expires_at: datetime | None, now: datetime) -> Check:
    if not has_key:
        return Check("key", "ok", "authentication off")
    detail = f"accepted: {', '.join(scopes)}"
    if expires_at is None:
        return Check("key", "ok", detail)
    days = (expires_at - now).days
    detail += f"; until {expires_at:%Y-%m-%d}"
    if days >= SOON:
        return Check("key", "ok", detail)
    return Check("key", "warning", f"{detail} ({days} days)", "get a new key with the same scopes and deploy it before then")


def disk(folder: str, free: int, size: int, held: int | None = None) -> Check:
    """Free space in bytes on a disk of `size` bytes; small disks need only a quarter. `held` is the server's reserve; None: it has none."""
    detail = f"{free / 2**30:,.1f} GiB free under {folder}" if free >= MIN_FREE else f"{free / 2**20:,.1f} MiB free under {folder}"
    detail += "" if held is None else f", and {held / 2**20:,.1f} MiB held in reserve"
    if free >= min(MIN_FREE, size // 4):
        return Check("disk", "ok", detail)
    fix = "free space: complete or clear items, delete queues, or stop the server and move the data folder"
    return Check("disk", "failed", detail, fix)


def files(limit: int, partitions: int) -> Check:
    """Whether the open-file limit suffices. `limit`: files per process; negative: unlimited. `partitions`: database files in the folder."""
    needed = partitions * FILES_PER_PARTITION + OTHER_FILES
    if limit < 0:
        return Check("files", "ok", "no limit of open files for processes started here")
    detail = f"limit of {limit:,} open files for processes started here; {partitions:,} partitions need about {needed:,}"
    if limit >= needed:
        return Check("files", "ok", detail)
    return Check("files", "failed", detail, f"raise the limit: ulimit -n {needed}, or LimitNOFILE={needed} in the systemd unit")


def exposed(listen: str, has_tls: bool, asks_keys: bool) -> Check:
    """Whether an address is open to other machines without TLS or keys. `:PORT` listens on loopback."""
    if listen.startswith(":") or local(f"//{listen}"):
        return Check("listen", "ok", f"{listen}: this machine only")
    if not has_tls:
        fix = "set tls_certificate and tls_key in [server], or listen on 127.0.0.1 behind a TLS proxy"
        return Check("listen", "failed", f"{listen} is open to other machines without TLS", fix)
    if not asks_keys:
        return Check("listen", "failed", f"{listen} is open to other machines without API keys", 'set auth = "keys" in [server]')
    return Check("listen", "ok", f"{listen}, with TLS and API keys")
