"""What `sluiceway doctor` makes of what it finds: each fact is fine, or not, and then there is something to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal
from urllib.parse import urlsplit

from sluiceway.kernel.errors import SluicewayError

State = Literal["ok", "warning", "failed", "skipped"]

MAX_SKEW = 5.0
"""Seconds between two clocks. The header that tells the server's has whole seconds, and a slow answer takes some."""
MIN_FREE = 1 << 30
"""Bytes. A full disk stops every partition on it; this is thirty of the largest requests, and some time to act."""
FILES_PER_PARTITION = 3
"""The database, its write-ahead log and the log's index."""
SOON = 14
"""Days in which what expires should be replaced: time to ask whoever does it, and for their holidays."""
OTHER_FILES = 1_024
"""For connections, and what the process itself holds."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `fix` says what to do; it is empty where nothing need be done."""

    name: str
    state: State
    detail: str
    fix: str = ""


def local(url: str) -> bool:
    import ipaddress

    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def transport(url: str, certificate: datetime | None, now: datetime) -> Check:
    """Whether anybody on the way can read along. `certificate` is when the server's expires."""
    if not url.startswith("https:"):
        if local(url):
            return Check("tls", "ok", "not needed: the server is on this machine")
        fix = "give the server tls_certificate and tls_key in [server] of its sluiceway.toml, and use an https URL"
        return Check("tls", "failed", "none: whoever is on the way can read keys and items", fix)
    if certificate is None:
        return Check("tls", "ok", "the server's certificate is trusted")
    days = (certificate - now).days
    detail = f"the server's certificate is trusted, until {certificate:%Y-%m-%d}"
    if days >= SOON:
        return Check("tls", "ok", detail)
    return Check("tls", "warning", f"{detail}: {days} days", "renew the certificate; the server reads the new files without a restart")


def unreachable(error: SluicewayError, url: str) -> Check:
    if "is not trusted" in error.detail:
        return Check("server", "failed", error.detail, "name the authority that made the server's certificate: --ca-file FILE")
    if error.code == "outcome_unknown" and not url.startswith("https:"):
        return Check("server", "failed", error.detail, "it is reached but does not answer; if it has TLS, use an https URL")
    if local(url):
        return Check(
            "server", "failed", error.detail, "start one with: sluiceway dev; or say where it is: --url, SLUICEWAY_URL or a context"
        )
    return Check(
        "server", "failed", error.detail, "see that the server runs there, listens on that address, and that no firewall is between"
    )


def versions(server: str | None, ours: str) -> Check:
    if server is None:
        return Check("server", "warning", "it answers, but does not tell its version", "is the URL that of a Sluiceway server?")
    if server == ours:
        return Check("server", "ok", f"version {server}")
    return Check("server", "warning", f"version {server}, and this program has {ours}", "bring the older one up to date")


def clock(server: datetime | None, before: datetime, after: datetime) -> Check:
    """The server's time, told between two looks at ours."""
    if server is None:
        return Check("clock", "skipped", "the server does not tell its time")
    ahead = max(0.0, (server - after).total_seconds()) or min(0.0, (server - before).total_seconds() + 1.0)
    if abs(ahead) <= MAX_SKEW:
        return Check("clock", "ok", f"within {MAX_SKEW:.0f} s of the server's")
    which = "ahead of" if ahead > 0 else "behind"
    fix = "let NTP set both clocks: scheduled times, deadlines and the expiry of keys are the server's"
    return Check("clock", "failed", f"the server's is {abs(ahead):,.0f} s {which} this machine's", fix)


def server_time(ok: bool, detail: str) -> Check:
    """What the server says of its clock."""
    fix = "" if ok else "let NTP set the clock of the server's machine, then restart the server"
    return Check("server time", "ok" if ok else "failed", detail, fix)


def readiness(problems: list[str]) -> Check:
    if not problems:
        return Check("ready", "ok", "every partition serves")
    return Check("ready", "failed", "; ".join(problems), "the server's log says more; look at the disk or database that is named")


def cluster(states: Mapping[str, str]) -> Check:
    """How each instance is, as the one that answers sees it."""
    wrong = ", ".join(f"{name} is {state}" for name, state in states.items() if state in ("silent", "joining"))
    if wrong:
        fix = "see that it runs and reaches the meta store; sluiceway instance list has its address, for: sluiceway doctor --url"
        return Check("cluster", "warning", f"{len(states)} instances: {wrong}", fix)
    return Check("cluster", "ok", f"{len(states)} instances; the check `ready` is of the one that answered")


def refused(error: SluicewayError, has_key: bool) -> Check:
    if error.code == "unauthenticated" and not has_key:
        fix = "set SLUICEWAY_API_KEY, or: sluiceway context add NAME --url URL --api-key"
        return Check("key", "failed", "the server asks for an API key, and there is none", fix)
    if error.code == "unauthenticated":
        return Check("key", "failed", "the server does not accept this API key", "it may be revoked or expired; ask for another one")
    return Check("key", "failed", error.detail, "see what the error says")


def accepted(has_key: bool, scopes: Sequence[str], expires_at: datetime | None, now: datetime) -> Check:
    if not has_key:
        return Check("key", "ok", "the server asks for none")
    detail = f"accepted: {', '.join(scopes)}"
    if expires_at is None:
        return Check("key", "ok", detail)
    days = (expires_at - now).days
    detail += f"; until {expires_at:%Y-%m-%d}"
    if days >= SOON:
        return Check("key", "ok", detail)
    return Check("key", "warning", f"{detail}: {days} days", "ask for another key with the same scopes, and put it in place before then")


def disk(folder: str, free: int, size: int, held: int | None = None) -> Check:
    """Room of a disk of that size, of which a server keeps a quarter at most. `held`: bytes of the server's reserve there; None: it has
    given that up, or makes none."""
    detail = f"{free / 2**30:,.1f} GiB free under {folder}" if free >= MIN_FREE else f"{free / 2**20:,.1f} MiB free under {folder}"
    detail += "" if held is None else f", and {held / 2**20:,.1f} MiB held in reserve"
    if free >= min(MIN_FREE, size // 4):
        return Check("disk", "ok", detail)
    fix = "complete or clear items, delete queues, make room, or move the data folder while the server is stopped"
    return Check("disk", "failed", detail, fix)


def files(limit: int, partitions: int) -> Check:
    """`limit`: open files of a process; negative: none. `partitions`: database files in the data folder."""
    needed = partitions * FILES_PER_PARTITION + OTHER_FILES
    if limit < 0:
        return Check("files", "ok", "a process started here may open any number")
    detail = f"a process started here may open {limit:,}; {partitions:,} partitions need about {needed:,}"
    if limit >= needed:
        return Check("files", "ok", detail)
    return Check("files", "failed", detail, f"raise it: ulimit -n {needed}, or LimitNOFILE={needed} in the systemd unit")


def exposed(listen: str, has_tls: bool, asks_keys: bool) -> Check:
    """What a configuration lets other machines do. `:PORT` is one of the loopback address."""
    if listen.startswith(":") or local(f"//{listen}"):
        return Check("listen", "ok", f"{listen}: this machine only")
    if not has_tls:
        fix = "set tls_certificate and tls_key in [server], or listen on 127.0.0.1 behind a proxy that has TLS"
        return Check("listen", "failed", f"{listen} can be reached from other machines, without TLS", fix)
    if not asks_keys:
        return Check("listen", "failed", f"{listen} can be reached from other machines, without keys", 'set auth = "keys" in [server]')
    return Check("listen", "ok", f"{listen}, with TLS and keys")
